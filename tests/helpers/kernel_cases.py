"""Shaped inputs of the sampling kernels, a float64 oracle of what is too close to call, and one way to run a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.config import SamplingParams
from trt_cpspec.cuda_sampling import KernelCalls, KernelSizes, request_array
from trt_cpspec.nvrtc import Call
from trt_cpspec.sampling import Use, uniforms

TOP_K = (0, 1, 2, 50, 385, 386, 512, 1024)
TOP_P = (0.01, 0.5, 0.8, 1.0)
BOUNDARY = 1e-6
"""A decision this close to its boundary, in float64, may fall either way."""
ALLOWED_SHARE = 1e-3
"""Of such decisions that do fall the other way."""

Array = NDArray[Any]


class Backend(Protocol):
    """A place that runs kernels: the CPU shim or a device."""

    def upload(self, array: Array) -> int: ...
    def download(self, address: int, like: Array) -> Array: ...
    def free(self, address: int) -> None: ...
    def run(self, call: Call, *, order: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The launches of one set of sizes, and where they run."""

    sizes: KernelSizes
    backend: Backend

    def __call__(
        self, name: str, arrays: dict[str, Array | None], *, order: int = 0, **numbers: Any
    ) -> dict[str, Array]:
        """Run one kernel; ``arrays`` are its device arguments (None is null). Return what they hold afterwards."""
        addresses = {key: 0 if array is None else self.backend.upload(array) for key, array in arrays.items()}
        self.backend.run(getattr(KernelCalls(self.sizes), name)(**addresses, **numbers), order=order)
        after = {
            key: self.backend.download(addresses[key], array) for key, array in arrays.items() if array is not None
        }
        for address in filter(None, addresses.values()):
            self.backend.free(address)
        return after


@dataclass(slots=True)
class Tally:
    """Decisions compared with a twin: how many, and which fell the other way."""

    cases: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, same: bool, near: Callable[[], bool], what: str) -> None:
        """Count one; a difference is excused only where ``near()`` says that float64 finds it too close to call."""
        self.cases += 1
        if same:
            return
        if near():
            self.excused += 1
        else:
            self.wrong.append(what)

    def check(self) -> None:
        """Assert that every difference is excused, and that these are few."""
        assert self.cases > 0
        assert not self.wrong, f"{len(self.wrong)} of {self.cases} differ: {self.wrong[:5]}"
        assert self.excused <= ALLOWED_SHARE * self.cases, f"{self.excused} of {self.cases} excused"


def requests(combinations: list[tuple[int, float, float]], *, seed: int = 11, frame: int = 5) -> Array:
    """Return a row for each (top_k, top_p, temperature), each with a seed of its own, large ones included."""
    return request_array(
        [
            (
                SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p),
                seed + row * 0x1_0000_0001_7,
                frame + row,
            )
            for row, (top_k, top_p, temperature) in enumerate(combinations)
        ]
    )


def _peaked(random: np.random.Generator, size: int) -> Array:
    logits = random.normal(0, 1, size)
    logits[random.integers(size, size=max(size // 200, 1))] += random.uniform(8, 14)
    return logits


def _flat(random: np.random.Generator, size: int) -> Array:
    return 2 + random.normal(0, 1e-3, size)


def _normal(random: np.random.Generator, size: int) -> Array:
    return random.normal(0, 3, size)


def _bfloat16(random: np.random.Generator, size: int) -> Array:
    """Rounded as a BF16 engine would: ties everywhere, at the k-th and inside the nucleus."""
    bits = random.normal(0, 3, size).astype(np.float32).view(np.uint32)
    return (bits & 0xFFFF0000).view(np.float32)


def _tied(random: np.random.Generator, size: int) -> Array:
    """Steps of one half: a few codes alone at the top, then ever more that tie; -0.0 and 0.0 are the same value.

    (A nucleus of equal codes only would end exactly at top_p, where float64 itself is undecided.)
    """
    return np.round(random.normal(0, 3, size) * 2) / 2


def _one_hot(random: np.random.Generator, size: int) -> Array:
    logits = np.full(size, -np.inf)
    logits[random.integers(size)] = 3.5
    return logits


def _forbidden(random: np.random.Generator, size: int) -> Array:
    """Many codes forbidden: half by -inf, some by a large negative number."""
    logits = random.normal(0, 3, size)
    logits[random.random(size) < 0.5] = -np.inf
    logits[random.random(size) < 0.2] = -1e9
    logits[random.integers(size)] = 0.25
    return logits


def _extreme(random: np.random.Generator, size: int) -> Array:
    """Magnitudes from denormal to the largest float."""
    return random.choice([-1, 1], size) * 10.0 ** random.uniform(-44, 38, size)


SHAPES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "peaked": _peaked, "flat": _flat, "normal": _normal, "bfloat16": _bfloat16, "tied": _tied, "one_hot": _one_hot,
    "forbidden": _forbidden, "extreme": _extreme,
}  # fmt: skip


def logits_of(shape: str, rows: int, size: int, *, seed: int = 0) -> Array:
    """Return ``[rows, size]`` float32 logits of one shape."""
    random = np.random.default_rng([seed, size, *shape.encode()])
    with np.errstate(over="ignore"):
        return np.stack([SHAPES[shape](random, size) for _ in range(rows)]).astype(np.float32)


def top_p_near(logits: Array, request: Any) -> bool:
    """Return whether the running sum comes within the boundary of ``1 - top_p`` for any entry that top-k keeps."""
    temperature, top_k, top_p = float(request["temperature"]), int(request["top_k"]), float(request["top_p"])
    if temperature == 0 or top_p == 1:
        return False
    values = np.sort(logits.astype(np.float64))[::-1][: top_k or None]
    weights = np.exp((values - values[0]) / temperature)
    return bool((np.abs(np.cumsum(weights[::-1]) / weights.sum() - (1 - top_p)) < BOUNDARY).any())


def pick_near(law: Array, request: Any, depth: int, use: Use) -> bool:
    """Return whether the two best scores of a Gumbel-max pick are within the boundary of each other."""
    codes = np.flatnonzero(law)
    noise = -np.log(-np.log(uniforms(int(request["seed"]), int(request["frame"]), depth, use, codes)))
    scores = np.sort(np.log(law[codes]) + noise)
    return len(scores) > 1 and bool(scores[-1] - scores[-2] < BOUNDARY)


def accept_near(target: Array, draft: Array, code: int, request: Any, depth: int) -> bool:
    """Return whether the uniform number of an accept test is within the boundary of the probability."""
    number = uniforms(int(request["seed"]), int(request["frame"]), depth, Use.ACCEPT, np.zeros(1, np.int64))[0]
    return bool(abs(number - min(1.0, float(target[code]) / float(draft[code]))) < BOUNDARY)
