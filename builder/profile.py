"""Optimisation profiles as values: which shapes an engine admits, and how a CodePredictor's are widened.

Nothing here talks to TensorRT or ONNX: a graph is a list of :class:`GraphInput`, a profile a dictionary from an
input's name to its :class:`ShapeRange`. A *contract* is a table of inputs whose axes carry symbols (``length``,
``tokens``, ``slots``, ...); an *extents table* gives each symbol its minimum, optimum and maximum. Widening changes
two symbols and nothing else, so every input that carries one of them is widened and none can be forgotten.

Sources: the portable graph is :mod:`.decoder`'s; the others are those of NVIDIA's TensorRT Edge-LLM (0.6, 0.10 and
0.11), whose C++ builder widens ``inputs_embeds`` and ``positions`` alone and so forgets ``rope_rotary_cos_sin``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from trt_cpspec.config import CODE_PREDICTOR_SUFFIX, MAX_INTEGER, MAX_VERIFY_SIZE
from trt_cpspec.encoders import AUDIO_TYPE, VISION_TYPE
from trt_cpspec.errors import ConfigError, EngineError, shown
from trt_cpspec.session import MIN_BUCKET, PREFILL_CHUNK, SCRATCH_SLOTS, bucket_for

DYNAMIC = -1
"""Extent of an axis that a profile must bound."""

PREFILL_ROWS = 2
"""Rows of a CodePredictor's prefill: the Talker's state and the frame's first code."""

TYPICAL_SLOTS = 256
"""Cache extent for which a Talker's steps are tuned: a short prompt and some 15 s of speech."""

MIN_PATCHES = 4
"""Patches of the smallest image: one row."""

TYPICAL_PATCHES = 1024
"""Patches for which the vision encoder is tuned: an image of 512 x 512 pixels in the release."""

TOKENS_PER_PAGE = 128
"""Tokens of one page of Edge-LLM's KV pool."""

CONTEXT, GENERATION = "context", "generation"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The shapes of one input that a profile admits, and the one it is tuned for."""

    min: Shape
    opt: Shape
    max: Shape

    def __str__(self) -> str:
        """Return ``1x1x16 | 1x1x16 | 4x8x16``."""
        return " | ".join("x".join(map(str, shape)) for shape in (self.min, self.opt, self.max))


Profile = Mapping[str, ShapeRange]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a graph; ``DYNAMIC`` marks an axis without a fixed extent."""

    name: str
    shape: Shape


class Kind(Enum):
    """What a component is; only a CodePredictor is ever widened."""

    CODE_PREDICTOR = "code predictor"
    DECODER = "decoder"
    CODEC = "codec decoder"
    AUDIO_ENCODER = "audio encoder"
    VISION_ENCODER = "vision encoder"


class Contract(Enum):
    """The input conventions this builder knows."""

    PORTABLE = "portable"
    EDGE_PADDED = "Edge-LLM padded (0.10)"
    EDGE_RAGGED = "Edge-LLM ragged (0.11)"
    CODEC = "codec"
    AUDIO_ENCODER = "audio encoder"
    VISION_ENCODER = "vision encoder"


STATELESS = {
    Kind.CODEC: Contract.CODEC,
    Kind.AUDIO_ENCODER: Contract.AUDIO_ENCODER,
    Kind.VISION_ENCODER: Contract.VISION_ENCODER,
}
"""The kinds without a cache: each has a contract of its own, and one profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For what a component's engine is built; the field names are the keys of ``builder_config``.

    Attributes
    ----------
    max_input_len : int
        Rows of a prefill.
    max_kv_cache_capacity : int
        Positions of a sequence.
    max_batch_size : int
    max_verify_size : int
        Positions of one CodePredictor pass for each row; 1 leaves its profile as it is.
    max_kv_pool_pages : int
        Pages of Edge-LLM's KV pool; 0 is the least that serves.
    min_code_len, opt_code_len, max_code_len : int
        Frames of one call of the codec.
    max_windows : int
        Windows of one call of the audio encoder.
    max_patches : int
        Patches of an image, a multiple of those that become one row.
    """

    max_input_len: int = 1024
    max_kv_cache_capacity: int = 4096
    max_batch_size: int = 4
    max_verify_size: int = 1
    max_kv_pool_pages: int = 0
    min_code_len: int = 1
    opt_code_len: int = 300
    max_code_len: int = 2000
    max_windows: int = 8
    max_patches: int = 4096

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "max_kv_pool_pages" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INTEGER:
                raise ConfigError(
                    f"{name} is {shown(value)}, it must be an integer of at least {least} and at most {MAX_INTEGER}"
                )
        if self.max_batch_size * max(self.max_input_len, self.max_kv_cache_capacity) > MAX_INTEGER:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} times max_input_len {self.max_input_len}, or times "
                f"max_kv_cache_capacity {self.max_kv_cache_capacity}, exceeds the {MAX_INTEGER} that a plan can count"
            )
        if self.max_verify_size > MAX_VERIFY_SIZE:
            raise ConfigError(f"max_verify_size is {self.max_verify_size}, the widest window is {MAX_VERIFY_SIZE}")
        if not self.min_code_len <= self.opt_code_len <= self.max_code_len:
            raise ConfigError(
                f"min_code_len {self.min_code_len}, opt_code_len {self.opt_code_len} and max_code_len "
                f"{self.max_code_len} must not decrease"
            )
        if self.max_kv_pool_pages and self.max_kv_pool_pages < self.least_pool_pages:
            raise ConfigError(
                f"max_kv_pool_pages is {self.max_kv_pool_pages}, max_batch_size {self.max_batch_size} and "
                f"max_kv_cache_capacity {self.max_kv_cache_capacity} need {self.least_pool_pages}"
            )

    @property
    def pages_per_sequence(self) -> int:
        """Pages that one sequence may fill."""
        return -(-self.max_kv_cache_capacity // TOKENS_PER_PAGE)

    @property
    def least_pool_pages(self) -> int:
        """Pages that all sequences may fill together."""
        return self.max_batch_size * self.pages_per_sequence


Extent = tuple[int, int, int]
Axes = tuple["str | None", ...]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Axes of the inputs whose whole name matches ``pattern``; None is an axis that the graph itself must fix."""

    pattern: str
    axes: Axes


_EDGE_WEIGHTS = (_Rule(r"lm_heads", (None, None, None)), _Rule(r"lm_head_idx", (None,)))

CONTRACTS: dict[Contract, tuple[_Rule, ...]] = {
    Contract.PORTABLE: (
        _Rule(r"inputs_embeds", ("batch", "length", None)),
        _Rule(r"positions", ("batch", "length")),
        _Rule(r"past_(key|value)_\d+", ("batch", None, "slots", None)),
        _Rule(r"rotary_positions|deepstack_embeds", ("batch", "length", None)),
    ),
    Contract.EDGE_PADDED: (
        _Rule(r"inputs_embeds", ("batch", "length", None)),
        _Rule(r"past_key_values_\d+", (None, "pool", None, None, None)),
        _Rule(r"rope_rotary_cos_sin", ("batch", "table", None)),
        _Rule(r"context_lengths", ("batch",)),
        _Rule(r"kvcache_start_index", ("batch or none",)),
        _Rule(r"kv_page_table", ("batch", None, "pages")),
        _Rule(r"last_token_ids", ("batch", "one")),
        _Rule(r"skip_softmax_scale", ("skipped",)),
        *_EDGE_WEIGHTS,
    ),
    Contract.EDGE_RAGGED: (
        _Rule(r"inputs_embeds", ("tokens", None)),
        _Rule(r"positions", ("tokens",)),
        _Rule(r"rope_rotary_cos_sin", ("tokens", None)),
        _Rule(r"past_key_values_\d+", (None, "pool", None, None, None)),
        _Rule(r"(query|past|attention_sequence)_lengths", ("batch",)),
        _Rule(r"state_indices|logits_indices", ("batch",)),
        _Rule(r"query_start_offsets", ("offsets",)),
        _Rule(r"context_sequence_count_carrier", ("carrier",)),
        _Rule(r"execution_phase_marker", ("phase",)),
        _Rule(r"kv_page_table", ("batch", None, "pages")),
        _Rule(r"skip_softmax_scale", ("skipped",)),
        *_EDGE_WEIGHTS,
    ),
    Contract.CODEC: (
        _Rule(r"codes", ("one", None, "frames")),
        # Of a codec that carries its state from call to call; Edge-LLM's, and our own of before, have codes alone.
        _Rule(r"position", (None,)),
        _Rule(r"past_(key|value)_\d+", ("one", None, None, None)),
        _Rule(r"past_tail_\d+", ("one", None, None)),
    ),
    Contract.AUDIO_ENCODER: (
        _Rule(r"mel", ("windows", None, None, None)),
        _Rule(r"extents", (None,)),
        _Rule(r"lengths", ("windows",)),
    ),
    Contract.VISION_ENCODER: (_Rule(r"patches|places|corners|shares", ("patches", None)),),
}
"""The contract table: for each convention its inputs and the symbols of their axes."""

WIDENED: dict[Contract, dict[str, str]] = {
    Contract.PORTABLE: {"length": "W"},
    Contract.EDGE_PADDED: {"length": "W"},
    # A verify pass runs as a context chunk, whose carrier has one entry a sequence.
    Contract.EDGE_RAGGED: {"tokens": "B*W", "carrier": "B"},
}
"""The symbols whose maximum widening raises in the generation profile, and to what."""

_TOKEN_SYMBOLS = ("length", "tokens")


ENCODERS = {AUDIO_TYPE: Kind.AUDIO_ENCODER, VISION_TYPE: Kind.VISION_ENCODER}


def component_kind(config: Mapping[str, Any], where: str) -> Kind:
    """Say what a component is from its ``config.json``.

    A CodePredictor is recognised by ``config["model"]`` ending with ``_code_predictor``, and by nothing else; a
    codec by ``model_type`` (or ``model``) ending with ``_code2wav``; an encoder of Qwen3-Omni by its ``model_type``,
    which Edge-LLM's have too, and by saying what stands before it, which theirs do not.

    Raises
    ------
    EngineError
        Neither key is there, or the component is one for which this builder has no profile.
    """
    model, model_type = config.get("model"), config.get("model_type")
    if isinstance(model, str) and model.endswith(CODE_PREDICTOR_SUFFIX):
        return Kind.CODE_PREDICTOR
    name = next((value for value in (model, model_type) if isinstance(value, str) and value), None)
    if name is None:
        raise EngineError(f"{where}: neither model nor model_type says what this component is")
    if name.endswith("_code2wav"):
        return Kind.CODEC
    if name in ENCODERS and "preprocessor" in config:
        return ENCODERS[name]
    if "encoder" in name or not isinstance(model, str):
        raise EngineError(f"{where}: {name!r} is no decoder and no codec; build it with Edge-LLM's own builders")
    role, speculation = config.get("engine_role", "llm"), config.get("spec_decode_type", "none")
    if (role, speculation) != ("llm", "none"):
        raise EngineError(
            f"{where}: engine_role {role!r} with spec_decode_type {speculation!r} is not supported, only 'llm' with "
            f"'none'; build it with Edge-LLM's own builder"
        )
    return Kind.DECODER


def recognise(inputs: Sequence[GraphInput]) -> Contract:
    """Recognise the contract of a graph by the names and ranks of its inputs.

    Raises
    ------
    EngineError
        Edge-LLM's dense contract of 0.6, with the reason it cannot be used; or none that is known.
    """
    ranks = {item.name: len(item.shape) for item in inputs}
    rank = ranks.get("inputs_embeds")
    dense = _dense_sign(inputs)
    if dense:
        raise EngineError(
            f"the graph follows Edge-LLM's dense contract of 0.6 ({dense}): one LM head is bound at a time and the "
            f"cache has no pages, so a pass cannot verify several depths; export it again with Edge-LLM 0.10 or "
            f"later, or build from the checkpoint"
        )
    if ranks.get("codes") == 3 and (len(ranks) == 1 or "position" in ranks):
        return Contract.CODEC
    if set(ranks) == {"mel", "extents", "lengths"}:
        return Contract.AUDIO_ENCODER
    if set(ranks) == {"patches", "places", "corners", "shares"}:
        return Contract.VISION_ENCODER
    if rank == 3 and "past_key_0" in ranks and ranks.get("positions") == 2:
        return Contract.PORTABLE
    if rank == 3 and {"context_lengths", "kvcache_start_index"} <= set(ranks):
        return Contract.EDGE_PADDED
    if rank == 2 and "context_sequence_count_carrier" in ranks:
        return Contract.EDGE_RAGGED
    known = ", ".join(contract.value for contract in Contract)
    listed = ", ".join(f"{item.name} (rank {len(item.shape)})" for item in inputs) or "none"
    raise EngineError(f"the graph's inputs follow no known contract ({known}); they are: {listed}")


def _dense_sign(inputs: Sequence[GraphInput]) -> str | None:
    """Return what marks a graph of Edge-LLM 0.6, or None."""
    for item in inputs:
        if item.name == "lm_head_weight" or re.fullmatch(r"[kv]_cache_\d+", item.name):
            return f"input {item.name}"
        # Pages come with plane 0 for keys and plane 1 for values; dense caches have the batch there.
        if re.fullmatch(r"past_key_values_\d+", item.name) and len(item.shape) == 5 and item.shape[1] == 2:
            return f"input {item.name} without pages"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """The profiles of one engine, in the order of their indices.

    Attributes
    ----------
    contract : Contract
    profiles : dict of str to Profile
        ``context`` is index 0 and ``generation`` index 1; a codec has one, ``frames``, and so have encoders.
    """

    contract: Contract
    profiles: dict[str, Profile] = field(default_factory=dict)

    def verify_size(self, max_batch_size: int) -> int:
        """Return how many positions a row one generation pass binds: the least over all token-aligned inputs."""
        return verify_size_of(self.contract, self.profiles[GENERATION], max_batch_size)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the numbers of all profiles in a form that JSON keeps."""
        return [
            {"name": name, "inputs": {key: [list(r.min), list(r.opt), list(r.max)] for key, r in profile.items()}}
            for name, profile in self.profiles.items()
        ]


def profiles_from_json(value: Any) -> dict[str, Profile]:
    """Read what :meth:`Profiles.as_json` returned; a ValueError, KeyError or TypeError says it is something else."""
    return {
        entry["name"]: {key: ShapeRange(*(tuple(map(int, shape)) for shape in r)) for key, r in entry["inputs"].items()}
        for entry in value
    }


def profiles_for(kind: Kind, inputs: Sequence[GraphInput], limits: Limits) -> Profiles:
    """Return the profiles of an engine; a CodePredictor's generation profile is ``limits.max_verify_size`` wide.

    Raises
    ------
    EngineError
        The graph follows no contract, or one of its inputs does not fit: the message names the tensor.
    """
    contract = recognise(inputs)
    if STATELESS.get(kind) is not (contract if contract in STATELESS.values() else None):
        raise EngineError(f"config.json calls the component a {kind.value}, its graph's contract is {contract.value}")
    profiles: dict[str, Profile] = {
        name: {item.name: _range_of(item, contract, extents) for item in inputs}
        for name, extents in _extents(kind, contract, limits).items()
    }
    if kind is Kind.CODE_PREDICTOR:
        profiles[GENERATION] = widened(contract, inputs, profiles[GENERATION], limits)
    for name, profile in profiles.items():
        check_profile(inputs, profile, name)
    return Profiles(contract=contract, profiles=profiles)


def widened(contract: Contract, inputs: Sequence[GraphInput], profile: Profile, limits: Limits) -> Profile:
    """Raise the maximum of every token-aligned axis of a generation profile; optimum and minimum stay.

    Parameters
    ----------
    contract : Contract
    inputs : sequence of GraphInput
    profile : Profile
        The generation profile as it is.
    limits : Limits
        ``max_verify_size`` and ``max_batch_size`` count.

    Raises
    ------
    EngineError
        The graph fixes the extent of an axis that would have to grow.
    """
    batch, width = limits.max_batch_size, limits.max_verify_size
    sizes = {"W": width, "B*W": batch * width, "B": batch}
    # A window of one position is a plain step: nothing to verify, nothing to widen.
    targets = {symbol: sizes[size] for symbol, size in WIDENED[contract].items()} if width > 1 else {}
    shapes = {item.name: item.shape for item in inputs}
    result = dict(profile)
    for name, found in profile.items():
        upper = list(found.max)
        for axis, symbol in enumerate(_axes_of(name, contract)):
            if symbol in targets and targets[symbol] > upper[axis]:
                if shapes[name][axis] != DYNAMIC:
                    raise EngineError(
                        f"input {name}: axis {axis} is fixed to {shapes[name][axis]} in the graph, a window of {width} "
                        f"needs up to {targets[symbol]}; export the graph with a dynamic axis"
                    )
                upper[axis] = targets[symbol]
        result[name] = ShapeRange(found.min, found.opt, tuple(upper))
    return result


def verify_size_of(contract: Contract, profile: Profile, max_batch_size: int) -> int:
    """Return the positions a row that a generation profile admits: the least over all token-aligned inputs."""
    sizes = []
    for name, found in profile.items():
        for axis, symbol in enumerate(_axes_of(name, contract)):
            if symbol in _TOKEN_SYMBOLS:
                sizes.append(found.max[axis] // (max_batch_size if symbol == "tokens" else 1))
            elif symbol == "carrier" and found.max[axis] < max_batch_size:
                sizes.append(1)
    return min(sizes)


def check_profile(inputs: Iterable[GraphInput], profile: Profile, where: str) -> None:
    """Check ranks, static extents and ``min <= opt <= max`` before TensorRT sees a profile.

    Raises
    ------
    EngineError
        By tensor and axis; also a tensor that the profile lacks or has too many.
    """
    shapes = {item.name: item.shape for item in inputs}
    for names, fault in ((shapes.keys() - profile.keys(), "lacks"), (profile.keys() - shapes.keys(), "has an unknown")):
        if names:
            raise EngineError(f"profile {where} {fault} input: {', '.join(sorted(names))}")
    for name, shape in shapes.items():
        _check_range(f"profile {where}, input {name}", shape, profile[name])


def _check_range(where: str, shape: Shape, found: ShapeRange) -> None:
    for word, value in (("min", found.min), ("opt", found.opt), ("max", found.max)):
        if len(value) != len(shape):
            raise EngineError(f"{where}: {word} has rank {len(value)}, the graph has rank {len(shape)}")
    for axis, (extent, low, best, high) in enumerate(zip(shape, found.min, found.opt, found.max, strict=True)):
        if not 0 <= low <= best <= high:
            raise EngineError(f"{where}, axis {axis}: min {low}, opt {best}, max {high} must not decrease")
        if extent != DYNAMIC and (low, best, high) != (extent,) * 3:
            raise EngineError(
                f"{where}, axis {axis}: the graph fixes it to {extent}, the profile has {low} | {best} | {high}"
            )


def _axes_of(name: str, contract: Contract) -> Axes:
    for rule in CONTRACTS[contract]:
        if re.fullmatch(rule.pattern, name):
            return rule.axes
    raise EngineError(f"input {name} is unknown to the contract {contract.value}: its shapes cannot be bounded")


def _range_of(item: GraphInput, contract: Contract, extents: Mapping[str, Extent]) -> ShapeRange:
    """Bound one input, axis by axis."""
    axes = _axes_of(item.name, contract)
    if len(axes) != len(item.shape):
        raise EngineError(
            f"input {item.name} has rank {len(item.shape)}, the contract {contract.value} gives it {len(axes)}"
        )
    bounds = [_bounds(item, axis, symbol, extents) for axis, symbol in enumerate(axes)]
    low, best, high = (tuple(bound[i] for bound in bounds) for i in range(3))
    return ShapeRange(low, best, high)


def _bounds(item: GraphInput, axis: int, symbol: str | None, extents: Mapping[str, Extent]) -> Extent:
    fixed = item.shape[axis]
    if fixed == DYNAMIC:
        if symbol is None:
            raise EngineError(f"input {item.name}: axis {axis} is dynamic, the contract needs it fixed in the graph")
        return extents[symbol]
    if symbol is not None:
        low, _, high = extents[symbol]
        # A roomier table or pool than the limits ask for does no harm; an axis that varies must be dynamic.
        if fixed < high or low != high:
            raise EngineError(
                f"input {item.name}: axis {axis} ({symbol}) is fixed to {fixed} in the graph, the limits need {low} "
                f"to {high}"
            )
    return fixed, fixed, fixed


def _extents(kind: Kind, contract: Contract, limits: Limits) -> dict[str, dict[str, Extent]]:
    """Return the extents table of each profile, before widening."""
    if contract is Contract.CODEC:
        frames = (limits.min_code_len, limits.opt_code_len, limits.max_code_len)
        return {"frames": {"one": (1, 1, 1), "frames": frames}}
    if contract is Contract.AUDIO_ENCODER:
        return {"clip": {"windows": (1, 1, limits.max_windows)}}
    if contract is Contract.VISION_ENCODER:
        least = min(MIN_PATCHES, limits.max_patches)
        return {"image": {"patches": (least, min(TYPICAL_PATCHES, limits.max_patches), limits.max_patches)}}
    if contract is Contract.PORTABLE:
        return _portable_extents(kind, limits)
    return _edge_extents(limits)


def _portable_extents(kind: Kind, limits: Limits) -> dict[str, dict[str, Extent]]:
    # The runtime feeds longer prompts in chunks, and the scores of a longer pass would cost memory for nothing.
    longest = min(limits.max_input_len, PREFILL_CHUNK)
    slots = limits.max_kv_cache_capacity + SCRATCH_SLOTS
    # Speech is one request at a time on most machines: a batch is admitted, a single row is what kernels are tuned for.
    batch = (1, 1, limits.max_batch_size)
    least = min(MIN_BUCKET, slots)
    if kind is Kind.CODE_PREDICTOR:
        # A frame's cache is small: below the smallest bucket its extent is fixed, and TensorRT can specialise.
        rows = (1, PREFILL_ROWS, max(longest, PREFILL_ROWS))
        context_slots = generation_slots = (least, slots, slots)
    else:
        half = max(1, longest // 2)
        rows = (1, half, longest)
        context_slots = (least, bucket_for(half + 1 + SCRATCH_SLOTS, slots), slots)
        generation_slots = (least, min(TYPICAL_SLOTS, slots), slots)
    return {
        CONTEXT: {"batch": batch, "length": rows, "slots": context_slots},
        GENERATION: {"batch": batch, "length": (1, 1, 1), "slots": generation_slots},
    }


def _edge_extents(limits: Limits) -> dict[str, dict[str, Extent]]:
    """Return the extents of Edge-LLM's ``llm_build``, for both its contracts."""
    batch, longest, capacity = limits.max_batch_size, limits.max_input_len, limits.max_kv_cache_capacity
    half = max(1, longest // 2)
    pool = limits.max_kv_pool_pages or limits.least_pool_pages
    shared: dict[str, Extent] = {
        "one": (1, 1, 1),
        "batch": (1, batch, batch),
        "batch or none": (0, batch, batch),
        "offsets": (2, batch + 1, batch + 1),
        "pages": (limits.pages_per_sequence,) * 3,
        "pool": (pool,) * 3,
        "table": (capacity,) * 3,
        "skipped": (0, 0, capacity),
    }
    context: dict[str, Extent] = {
        "length": (1, half, longest),
        "tokens": (1, batch * half, batch * longest),
        "carrier": (1, batch, batch),
        "phase": (1, 1, 8),
    }
    generation: dict[str, Extent] = {
        "length": (1, 1, 1), "tokens": (1, batch, batch), "carrier": (0, 0, 0), "phase": (1, 3, 8),
    }  # fmt: skip
    return {CONTEXT: shared | context, GENERATION: shared | generation}


def format_table(before: Mapping[str, Profile], after: Mapping[str, Profile]) -> str:
    """Return profiles before and after as a table of ``min | opt | max``.

    A changed row is marked with ``*``. Inputs that differ in their number only (a layer's) share a row where their
    shapes agree.
    """
    rows: dict[tuple[str, ...], int] = {}
    for label, profile in after.items():
        old = before.get(label, {})
        for name, found in profile.items():
            mark = "*" if name in old and old[name] != found else ""
            key = (mark, label, re.sub(r"\d+$", "*", name), str(old.get(name, "unknown")), str(found))
            rows[key] = rows.get(key, 0) + 1
    table = [("", "profile", "input", "before (min | opt | max)", "after (min | opt | max)")]
    for (mark, label, name, was, now), count in rows.items():
        table.append((mark, label, f"{name} ({count})" if name.endswith("*") else name, was, now))
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
