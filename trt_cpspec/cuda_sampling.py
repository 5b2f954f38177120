"""The sampling kernels: how each is launched, and its numpy twin.

A :class:`KernelCalls` turns device addresses into launches and knows nothing of where they run; the functions below it
compute the same from numpy arrays and are what the kernels are tested against. The kernels' own header comments
(``kernels/*.cu``) describe layouts and limits.

In the shapes below B is the batch, W the entries of a row in one launch (its drafts, or the positions of a verify
pass), n the drafts, V the codebook, G the codes of a frame, H the CodePredictor's width, HT the Talker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import MAX_SPECULATIVE_CODEBOOK, MAX_VERIFY_SIZE, SamplingParams
from .errors import ConfigError, NumericsError
from .nvrtc import Call
from .sampling import PhiloxNoise, Proposal, Use, accept_by_rejection, accept_coupled, law

REQUEST = np.dtype(
    [("seed", "<u8"), ("temperature", "<f8"), ("top_p", "<f8"), ("top_k", "<i4"), ("frame", "<u4")], align=True
)
"""How a row of the batch is sampled, as the kernels read it from device memory (``Request`` in ``common.cuh``)."""

NO_ERROR = 0x7F7F7F7F
"""Of ``errors``: no depth of the row has failed. As bytes it is a memset of 0x7F."""

DTYPES = ("F32", "F16", "BF16")

Array = NDArray[Any]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


def request_entry(params: SamplingParams, seed: int, frame: int) -> tuple[int, float, float, int, int]:
    """Return one row of a ``REQUEST`` array; the repetition penalty is not the kernels'."""
    return seed, params.temperature, params.top_p, params.top_k, frame


def request_array(rows: Sequence[tuple[SamplingParams, int, int]]) -> Array:
    """Return the ``REQUEST`` array of (params, seed, frame) of each row."""
    return np.array([request_entry(*row) for row in rows], REQUEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """What the kernels are compiled for.

    Attributes
    ----------
    codebook_size : int
        V.
    num_code_groups : int
        G.
    hidden_size, talker_hidden_size : int
        H and HT, multiples of 8.
    weight_dtype : {"F32", "F16", "BF16"}
        Of heads, embedding tables and projection.
    hidden_dtype, input_dtype : {"F32", "F16", "BF16"}
        Of the engine's ``hidden_states`` and ``inputs_embeds``.

    Raises
    ------
    ConfigError
        A size or a dtype that the kernels cannot take, by name.
    """

    codebook_size: int
    num_code_groups: int
    hidden_size: int
    talker_hidden_size: int
    weight_dtype: str = "F32"
    hidden_dtype: str = "F32"
    input_dtype: str = "F32"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "talker_hidden_size"):
            if getattr(self, name) <= 0 or getattr(self, name) % 8:
                raise ConfigError(f"{name} is {getattr(self, name)}; the CUDA kernels need a positive multiple of 8")
        for name in ("weight_dtype", "hidden_dtype", "input_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(DTYPES)}")

    @property
    def threads(self) -> int:
        """Threads of one block of the sampling kernels: a power of two, four codes each up to V = 2048."""
        return min(max(32, 1 << (-(-self.codebook_size // 4) - 1).bit_length()), 512)

    def macros(self) -> dict[str, str]:
        """Return what the sources are compiled with."""
        return {
            "V": str(self.codebook_size), "G": str(self.num_code_groups), "H": str(self.hidden_size),
            "HT": str(self.talker_hidden_size), "THREADS": str(self.threads), "WEIGHT": self.weight_dtype,
            "HIDDEN": self.hidden_dtype, "INPUT": self.input_dtype,
        }  # fmt: skip


class KernelCalls:
    """Builds the launches of one set of sizes. Every array argument is a device address; 0 is null."""

    def __init__(self, sizes: KernelSizes) -> None:
        self.sizes = sizes

    def draft_heads(
        self, *, heads: int, hidden: int, states: int, last: int, logits: int,
        rows: int, width: int, rows_of_hidden: int, deepest: int,
    ) -> Call:  # fmt: skip
        """Apply heads to hidden states (see :func:`draft_heads`); ``states`` 0 takes hidden row w for entry w."""
        arguments = (heads, hidden, states, last, logits, np.int32(rows_of_hidden), np.int32(deepest))
        return Call("draft_heads", (-(-self.sizes.codebook_size // 8), width, rows), 256, arguments)

    def select_sample(
        self, *, logits: int, requests: int, last: int, codes: int, laws: int, errors: int,
        rows: int, width: int, use: Use, deepest: int,
    ) -> Call:  # fmt: skip
        """Compute laws and pick codes (see :func:`select_sample`); ``laws`` 0 writes none."""
        arguments = (logits, requests, last, codes, laws, errors, np.int32(use), np.int32(deepest))
        if self.sizes.codebook_size > MAX_SPECULATIVE_CODEBOOK:
            return Call("select_sample_general", (width, rows, 1), 1024, arguments)
        return Call("select_sample", (width, rows, 1), self.sizes.threads, arguments)

    def accept(
        self, *, drafts: int, draft_laws: int, picks: int, target_laws: int, requests: int, last: int, codes: int,
        states: int, rounds: int, history: int, rows: int, drafts_per_row: int, coupled: bool,
    ) -> Call:  # fmt: skip
        """Commit codes (see :func:`accept`); ``rounds`` and ``history`` 0 record nothing."""
        arguments = (
            drafts, draft_laws, picks, target_laws, requests, last, codes, states, rounds, history,
            np.int32(drafts_per_row), np.int32(coupled),
        )  # fmt: skip
        return Call("accept", (rows, 1, 1), self.sizes.threads, arguments)

    def embed_project(
        self, *, tables: int, projection: int, bias: int, codes: int, drafts: int, last: int, embeds: int,
        positions: int, rows: int, drafts_per_row: int, padding: int,
    ) -> Call:  # fmt: skip
        """Make the rows of a verify pass (see :func:`embed_project`); ``projection`` and ``bias`` 0 is the identity."""
        if drafts_per_row >= MAX_VERIFY_SIZE:
            raise ConfigError(f"{drafts_per_row} drafts a row; embed_project takes at most {MAX_VERIFY_SIZE - 1}")
        arguments = (
            tables, projection, bias, codes, drafts, last, embeds, positions,
            np.int32(drafts_per_row), np.int32(padding),
        )  # fmt: skip
        return Call("embed_project", self._channels(rows), 256, arguments)

    def start_frame(
        self, *, talker_hidden: int, talker_table: int, projection: int, bias: int, codes: int, embeds: int,
        positions: int, last: int, states: int, rounds: int, errors: int, rows: int,
    ) -> Call:  # fmt: skip
        """Make the two rows of the prefill and reset what a frame counts (see :func:`start_frame`)."""
        arguments = (
            talker_hidden, talker_table, projection, bias, codes, embeds, positions, last, states, rounds, errors,
        )  # fmt: skip
        return Call("start_frame", self._channels(rows), 256, arguments)

    def sum_embeddings(self, *, talker_table: int, tables: int, codes: int, sums: int, rows: int) -> Call:
        """Sum a frame's embeddings (see :func:`sum_embeddings`)."""
        grid = (-(-self.sizes.talker_hidden_size // 256), rows, 1)
        return Call("sum_embeddings", grid, 256, (talker_table, tables, codes, sums))

    def advance_frame(self, *, requests: int, rows: int) -> Call:
        """Add 1 to each row's frame number."""
        return Call("advance_frame", (1, 1, 1), 256, (requests, np.int32(rows)))

    def repeat_round(self, *, handle: int, last: int, rows: int) -> Call:
        """Set a conditional node's value: 1 while a row misses codes. ``handle`` is the node's."""
        return Call("repeat_round", (1, 1, 1), 32, (np.uint64(handle), last, np.int32(rows)))

    def _channels(self, rows: int) -> tuple[int, int, int]:
        return (-(-self.sizes.hidden_size // 8), rows, 1)


# ------------------------------------------------------------------------------------------------------ numpy twins


def draft_heads(heads: Float32, hidden: Float32, last: Int32, *, width: int, states: Int32 | None) -> Float32:
    """Apply to each row the heads of the depths after its last one; entries above the last depth are NaN.

    Parameters
    ----------
    heads : ndarray, shape [G - 1, V, H], float32
    hidden : ndarray, shape [B, S, H], float32
    last : ndarray, shape [B], int32
        Depth of each row's last committed code.
    width : int
        W.
    states : ndarray, shape [B], int32, or None
        Which hidden row all entries of a row read; None: entry w reads hidden row w.

    Returns
    -------
    ndarray, shape [B, W, V], float32
    """
    logits = np.full((len(last), width, heads.shape[1]), np.nan, np.float32)
    for row, depth in enumerate(last.tolist()):
        for entry in range(min(width, len(heads) - depth)):
            logits[row, entry] = heads[depth + entry] @ hidden[row, entry if states is None else states[row]]
    return logits


class Selection(NamedTuple):
    """What ``select_sample`` writes; entries with nothing to do are -1 and NaN.

    Attributes
    ----------
    codes : ndarray, shape [B, W], int32
    laws : ndarray, shape [B, W, V], float64
    errors : ndarray, shape [B], int32
        The smallest depth whose logits describe no law, or ``NO_ERROR``.
    """

    codes: Int32
    laws: NDArray[np.float64]
    errors: Int32


def select_sample(logits: Float32, requests: Array, last: Int32, *, use: Use, deepest: int) -> Selection:
    """Compute the law of every entry and pick from it.

    Parameters
    ----------
    logits : ndarray, shape [B, W, V], float32
    requests : ndarray, shape [B], REQUEST
    last : ndarray, shape [B], int32
        Entry w of row b has depth ``last[b] + 1 + w``.
    use : Use
    deepest : int
        Last depth to work on: G - 2 for drafts, G - 1 for targets.
    """
    batch, width, size = logits.shape
    codes = np.full((batch, width), -1, np.int32)
    laws = np.full((batch, width, size), np.nan)
    errors = np.full(batch, NO_ERROR, np.int32)
    for row, entry in np.ndindex(batch, width):
        depth = int(last[row]) + 1 + entry
        if depth > deepest:
            continue
        try:
            laws[row, entry] = law(logits[row, entry], _params(requests[row]))
            codes[row, entry] = _noise(requests[row]).pick(laws[row, entry], depth, use)
        except NumericsError:
            laws[row, entry] = np.arange(size) == 0
            codes[row, entry] = 0
            errors[row] = min(errors[row], depth)
    return Selection(codes, laws, errors)


class FrameState(NamedTuple):
    """What ``accept`` reads and replaces.

    Attributes
    ----------
    codes : ndarray, shape [B, G], int32
    last : ndarray, shape [B], int32
        Depth of each row's last committed code.
    states : ndarray, shape [B], int32
        Which row of the last pass made that code.
    rounds : ndarray, shape [B], int32
    history : ndarray, shape [B, G, 3], int32
        First depth, proposed and accepted of each round.
    """

    codes: Int32
    last: Int32
    states: Int32
    rounds: Int32
    history: Int32


def accept(
    drafts: Int32, draft_laws: Float32, target_laws: Float32, requests: Array, state: FrameState, *, coupled: bool
) -> FrameState:
    """Commit the codes of one round and return the new state; a row whose frame is complete stays as it is.

    Parameters
    ----------
    drafts : ndarray, shape [B, n], int32
    draft_laws : ndarray, shape [B, n, V], floating
    target_laws : ndarray, shape [B, n + 1, V], floating
    requests : ndarray, shape [B], REQUEST
    state : FrameState
    coupled : bool
        The verification mode.
    """
    new = FrameState(*(array.copy() for array in state))
    groups = new.codes.shape[1]
    for row in np.flatnonzero(new.last < groups - 1).tolist():
        first = int(new.last[row]) + 1
        proposed = min(drafts.shape[1], groups - 1 - first)
        proposal = Proposal(
            first_depth=first,
            codes=drafts[row, :proposed].tolist(),
            laws=[values.astype(np.float64) for values in draft_laws[row, :proposed]],
        )
        targets = [values.astype(np.float64) for values in target_laws[row, : proposed + 1]]
        walk = accept_coupled if coupled else accept_by_rejection
        committed = walk(targets, proposal, _noise(requests[row]))
        new.codes[row, first : first + len(committed)] = committed
        new.history[row, new.rounds[row]] = first, proposed, len(committed) - 1
        new.rounds[row] += 1
        new.last[row] += len(committed)
        new.states[row] = len(committed) - 1
    return new


class PassInputs(NamedTuple):
    """The rows of one pass.

    Attributes
    ----------
    embeds : ndarray, shape [B, W, H], float32
    positions : ndarray, shape [B, W], int32
    """

    embeds: Float32
    positions: Int32


Projection = tuple[Float32, Float32]
"""``small_to_mtp_projection``: weight ``[H, HT]`` and bias ``[H]``."""


def embed_project(
    tables: Float32, projection: Projection | None, codes: Int32, drafts: Int32, last: Int32, *, padding: int
) -> PassInputs:
    """Embed and project the last committed code and the drafts of each row.

    Parameters
    ----------
    tables : ndarray, shape [G - 1, V, HT], float32
    projection : weight ``[H, HT]`` and bias ``[H]``, float32, or None
    codes : ndarray, shape [B, G], int32
    drafts : ndarray, shape [B, n], int32
    last : ndarray, shape [B], int32
    padding : int
        Position of a row without a code.
    """
    batch, groups = codes.shape
    width = drafts.shape[1] + 1
    positions = np.full((batch, width), padding, np.int32)
    embeds = np.zeros((batch, width, tables.shape[2] if projection is None else len(projection[1])), np.float32)
    for row, depth in enumerate(last.tolist()):
        inputs = [int(codes[row, depth]), *drafts[row].tolist()]
        for entry in range(min(width, groups - 1 - depth) if depth else 0):
            positions[row, entry] = depth + 1 + entry
            embeds[row, entry] = _project(tables[depth + entry - 1, inputs[entry]], projection)
    return PassInputs(embeds, positions)


def start_frame(
    talker_hidden: Float32, talker_table: Float32, projection: Projection | None, codes: Int32
) -> PassInputs:
    """Embed and project the two rows of a frame's prefill.

    Parameters
    ----------
    talker_hidden : ndarray, shape [B, HT], float32
    talker_table : ndarray, shape [*, HT], float32
    projection : weight ``[H, HT]`` and bias ``[H]``, float32, or None
    codes : ndarray, shape [B, G], int32
    """
    inputs = np.stack([talker_hidden, talker_table[codes[:, 0]]], axis=1)
    return PassInputs(_project(inputs, projection), np.tile(np.arange(2, dtype=np.int32), (len(codes), 1)))


def sum_embeddings(talker_table: Float32, tables: Float32, codes: Int32) -> Float32:
    """Return the sum of each frame's embeddings, ``[B, G]`` to ``[B, HT]``, added in the order of the depths."""
    sums: Float32 = talker_table[codes[:, 0]].astype(np.float32)
    for depth in range(1, codes.shape[1]):
        sums += tables[depth - 1, codes[:, depth]]
    return sums


def _project(inputs: Float32, projection: Projection | None) -> Float32:
    if projection is None:
        return inputs
    weight, bias = projection
    projected: Float32 = inputs @ weight.T + bias
    return projected


def _params(request: Any) -> SamplingParams:
    return SamplingParams(
        temperature=float(request["temperature"]), top_k=int(request["top_k"]), top_p=float(request["top_p"])
    )


def _noise(request: Any) -> PhiloxNoise:
    return PhiloxNoise(int(request["seed"]), int(request["frame"]))
