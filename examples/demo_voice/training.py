"""What the stages of training share: the clock that rules a schedule, state that survives it, and the loss log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

SHARD_BYTES = 14_000_000
"""Largest file of saved weights; more is split."""


class Clock:
    """Time spent on a stage, over all its calls: the schedule is in seconds, whatever the machine's speed.

    Parameters
    ----------
    schedule : float
        Seconds of the whole stage.
    limit : float
        Seconds of this call.
    spent : float
        Seconds of earlier calls.
    """

    def __init__(self, schedule: float, limit: float, spent: float) -> None:
        self._started = time.perf_counter()
        self._schedule, self._limit, self._spent = schedule, limit, spent

    @property
    def spent(self) -> float:
        """Seconds of all calls."""
        return self._spent + time.perf_counter() - self._started

    @property
    def progress(self) -> float:
        """Share of the schedule, 0 to 1."""
        return min(self.spent / self._schedule, 1.0)

    @property
    def over(self) -> bool:
        """Whether the stage is complete, or this call's time is up."""
        return self.progress >= 1 or time.perf_counter() - self._started >= self._limit


def learning_rate(peak: float, step: int, progress: float, warmup: int = 100) -> float:
    """Return a cosine of the progress, behind a linear warm-up of each call."""
    return peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Replayed:
    """A training step as one CUDA graph for each shape of what it is given; on a CPU the step itself.

    A small model's step is thousands of short kernels, and starting them one by one takes longer than they do.

    Parameters
    ----------
    step : callable
        Takes a flag and tensors, returns one tensor. It must not wait for the device, and its shapes must follow from
        those of what it is given. The gradients must be cleared in it, to None, before they are made.
    device : torch.device
    eager : bool
        Make no graphs on a GPU either.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device, *, eager: bool = False) -> None:
        self._step, self._graphed = step, device.type == "cuda" and not eager
        self._warm: set[Any] = set()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self._pool: Any = None

    def __call__(self, flag: bool, *given: Tensor) -> Tensor:
        """Do one step."""
        if not self._graphed:
            return self._step(flag, *given)
        key = (flag, *(value.shape for value in given))
        if key not in self._warm:  # the first one of a shape chooses its kernels
            self._warm.add(key)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = self._step(flag, *given)
            torch.cuda.current_stream().wait_stream(side)
            return result
        if key not in self._graphs:
            own = tuple(value.clone() for value in given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                result = self._step(flag, *own)
            self._pool = graph.pool()
            self._graphs[key] = graph, own, result
        graph, own, result = self._graphs[key]
        for held, value in zip(own, given, strict=True):
            held.copy_(value)
        graph.replay()
        return result


def adam(parameters: Iterable[Tensor], device: torch.device, **options: Any) -> torch.optim.AdamW:
    """Return AdamW whose learning rate is a tensor, so that a graph can be told another one."""
    return torch.optim.AdamW(
        parameters, torch.zeros((), device=device), fused=True, capturable=device.type == "cuda", **options
    )


def set_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    """Set the learning rate."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def descend(optimizer: torch.optim.AdamW, loss: Tensor, most: float) -> Tensor:
    """Do a step of the optimizer, and return the norm of the gradients, which is cut; none if it is not finite."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, most)
    # What a scaler of gradients tells an optimizer: nothing is waited for.
    optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).float()
    optimizer.step()
    return norm


class Log:
    """A loss log, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **values: Any) -> None:
        """Append a line and print it."""
        line = json.dumps(
            {key: round(value, 5) if isinstance(value, float) else value for key, value in values.items()}
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def pick_device() -> torch.device:
    """Return the GPU where there is one, with TF32 products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_state(
    work: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
) -> None:
    """Save weights in FP32 as ``NAME-I.safetensors`` and facts in ``NAME.json``; moments beside them, for this machine.

    The moments may be lost: a call that finds none warms up anew.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, value in model.state_dict().items():
        size = value.numel() * value.element_size()
        if filled and filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][key] = value.detach().cpu().contiguous()
        filled += size
    for old in work.glob(f"{name}-*.safetensors"):
        old.unlink()
    for number, tensors in enumerate(shards):
        save_file(tensors, work / f"{name}-{number}.safetensors")
    torch.save(optimizer.state_dict(), work / f"{name}.moments")
    (work / f"{name}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def load_weights(work: Path, name: str) -> dict[str, Tensor]:
    """Return the weights that :func:`save_state` saved."""
    weights: dict[str, Tensor] = {}
    for path in sorted(work.glob(f"{name}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  it is no mapping
    return weights


def load_state(work: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load what an earlier call saved, and return its facts; without one, ``spent`` and ``steps`` are 0."""
    path = work / f"{name}.json"
    if not path.is_file():
        return {"spent": 0.0, "steps": 0}
    model.load_state_dict(load_weights(work, name))
    moments = work / f"{name}.moments"
    if moments.is_file():
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict(torch.load(moments, map_location=next(model.parameters()).device))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    print(f"{name}: goes on after {facts['steps']} steps, {facts['spent']:.0f} s", flush=True)
    return facts
