"""The inner loop: one audio frame's codes, by rounds of draft, verify and accept.

Autoregressive decoding is the same loop with zero drafts. This module knows neither the engine nor where random
numbers come from: a :class:`FrameModel` gives hidden states and logits, a :class:`~trt_cpspec.sampling.Noise` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .config import Mode, SamplingParams, Window
from .errors import NumericsError
from .sampling import Law, Noise, Proposal, Use, accept_by_rejection, accept_coupled, law

Codes = NDArray[np.int32]
Hidden = NDArray[np.floating]


class FrameModel(Protocol):
    """What a frame needs of a CodePredictor. G is the number of codes in a frame, C its hidden size."""

    @property
    def num_code_groups(self) -> int:
        """G, the Talker's code included."""
        ...

    def prefill(self, talker_hidden: Hidden, code0: Codes) -> Hidden:
        """Start a frame from ``[B, Ht]`` and ``[B]`` and return the hidden state ``[B, C]`` that gives code 1.

        The array is the caller's: no later pass writes it.
        """
        ...

    def forward(self, codes: Codes, depths: NDArray[np.int64], counts: NDArray[np.int64]) -> Hidden:
        """Run one pass over the codes ``[B, W]`` of depths ``depths[b], depths[b] + 1, ...``; return ``[B, W, C]``.

        Row b has ``counts[b]`` real positions; what is behind them is padding.
        """
        ...

    def draft_logits(self, hidden: Hidden, depth: int, count: int) -> Hidden:
        """Apply the heads of ``count`` depths from ``depth`` up to one hidden state ``[C]``; return ``[count, V]``."""
        ...

    def target_logits(self, hidden: Hidden, depth: int) -> Hidden:
        """Apply the head of depth ``depth + i`` to row i of ``[n, C]``; return ``[n, V]``."""
        ...


class FrameRow(NamedTuple):
    """How one row of a batch is sampled: its law and its randomness, independent of its neighbours."""

    params: SamplingParams
    noise: Noise


class Round(NamedTuple):
    """One verify pass of one row."""

    first_depth: int
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameResult:
    """What a frame decoded to.

    Attributes
    ----------
    codes : ndarray, shape [B, G], int32
        Column 0 is the Talker's code.
    rounds : list of list of Round
        The rounds of each row; the prefill is none.
    window : Window
        The verification window in force.
    embedded : ndarray, shape [B, Ht], float32, or None
        The sum of each frame's embedded codes, where the GPU made it (see ``CodePredictor.embed_frame``).
    """

    codes: Codes
    rounds: list[list[Round]]
    window: Window
    embedded: NDArray[np.float32] | None = None


def decode_frame(
    model: FrameModel,
    talker_hidden: Hidden,
    code0: Codes,
    rows: Sequence[FrameRow],
    *,
    window: Window,
    mode: Mode,
) -> FrameResult:
    """Decode the codes of one frame for every row of a batch.

    Parameters
    ----------
    model : FrameModel
    talker_hidden : ndarray, shape [B, Ht], floating
        The Talker's last hidden state, after its final norm.
    code0 : ndarray, shape [B], int32
        The Talker's code.
    rows : sequence of FrameRow
        B of them.
    window : Window
        ``verify_size`` 0 is autoregressive.
    mode : {"rejection", "coupled"}

    Raises
    ------
    NumericsError
        The model gave logits that describe no law; the message names the depth, the attribute ``row`` the row.
    """
    groups = model.num_code_groups
    codes = np.zeros((len(rows), groups), np.int32)
    codes[:, 0] = code0
    history: list[list[Round]] = [[] for _ in rows]
    hidden = model.prefill(talker_hidden, codes[:, 0])
    for index, row in enumerate(rows):
        codes[index, 1] = row.noise.pick(_target_law(model, hidden[index], row, index, 1), 1, Use.TARGET)
    last = np.ones(len(rows), np.int64)  # depth of each row's last committed code
    while (last < groups - 1).any():
        proposals = [
            _draft(model, hidden[index], row, index, int(last[index]) + 1, window.max_drafts, mode)
            for index, row in enumerate(rows)
        ]
        passed = model.forward(*_verify_inputs(codes, last, proposals))
        for index in np.flatnonzero(last < groups - 1).tolist():
            committed = _accept(model, passed[index], rows[index], index, proposals[index], mode)
            first = proposals[index].first_depth
            codes[index, first : first + len(committed)] = committed
            history[index].append(Round(first, len(proposals[index].codes), len(committed) - 1))
            last[index] += len(committed)
            hidden[index] = passed[index, len(committed) - 1]
    return FrameResult(codes=codes, rounds=history, window=window)


def _draft(
    model: FrameModel, hidden: Hidden, row: FrameRow, index: int, depth: int, max_drafts: int, mode: Mode
) -> Proposal:
    """Propose the codes of the next depths from one hidden state; the last missing code is never drafted."""
    count = max(min(max_drafts, model.num_code_groups - depth - 1), 0)
    if count == 0:
        return Proposal(first_depth=depth, codes=[], laws=[])
    logits = model.draft_logits(hidden, depth, count)
    laws = [_law(values, row, index, depth + offset) for offset, values in enumerate(logits)]
    use = Use.TARGET if mode == "coupled" else Use.DRAFT
    return Proposal(
        first_depth=depth, codes=[row.noise.pick(draft, depth + i, use) for i, draft in enumerate(laws)], laws=laws
    )


def _verify_inputs(
    codes: Codes, last: NDArray[np.int64], proposals: Sequence[Proposal]
) -> tuple[Codes, NDArray[np.int64], NDArray[np.int64]]:
    """Return the codes ``[B, W]``, first depths ``[B]`` and counts ``[B]`` of one pass; a finished row counts 0."""
    live = last < codes.shape[1] - 1
    counts = np.where(live, [1 + len(proposal.codes) for proposal in proposals], 0)
    inputs = np.zeros((len(codes), int(counts.max())), np.int32)
    for index in np.flatnonzero(live).tolist():
        inputs[index, : counts[index]] = [codes[index, last[index]], *proposals[index].codes]
    return inputs, last.copy(), counts


def _accept(model: FrameModel, hidden: Hidden, row: FrameRow, index: int, proposal: Proposal, mode: Mode) -> list[int]:
    # Laws are made as the walk asks for them: behind a rejection no head is applied.
    laws = (
        _target_law(model, hidden[offset], row, index, proposal.first_depth + offset)
        for offset in range(len(proposal.codes) + 1)
    )
    return (accept_coupled if mode == "coupled" else accept_by_rejection)(laws, proposal, row.noise)


def _target_law(model: FrameModel, hidden: Hidden, row: FrameRow, index: int, depth: int) -> Law:
    return _law(model.target_logits(hidden[None], depth)[0], row, index, depth)


def _law(logits: Hidden, row: FrameRow, index: int, depth: int) -> Law:
    try:
        return law(logits, row.params)
    except NumericsError as error:
        raise NumericsError(f"CodePredictor, depth {depth}: {error}", row=index) from error


@dataclass(slots=True)
class CpSpecStats:
    """Statistics of speculation over the frames of a request, as written under ``cp_spec``.

    Attributes
    ----------
    window : Window
    mode : {"rejection", "coupled"}
    num_code_groups : int
    frames, rounds : int
        ``rounds`` does not count the prefill of each frame.
    """

    window: Window
    mode: Mode
    num_code_groups: int
    frames: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    _tested_by_depth: list[int] = field(init=False)
    _accepted_by_depth: list[int] = field(init=False)
    _tested_by_offset: list[int] = field(init=False)
    _accepted_by_offset: list[int] = field(init=False)
    _commits: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._tested_by_depth, self._accepted_by_depth = [0] * self.num_code_groups, [0] * self.num_code_groups
        self._tested_by_offset = [0] * self.window.max_drafts
        self._accepted_by_offset = [0] * self.window.max_drafts
        self._commits = [0] * (self.window.max_drafts + 1)

    def add_frame(self, rounds: Iterable[Round]) -> None:
        """Count one frame of one row."""
        self.frames += 1
        for first_depth, proposed, accepted in rounds:
            self.rounds += 1
            self.proposed += proposed
            self.accepted += accepted
            self._commits[accepted] += 1
            for offset in range(min(accepted + 1, proposed)):
                for tested, passed, key in (
                    (self._tested_by_depth, self._accepted_by_depth, first_depth + offset),
                    (self._tested_by_offset, self._accepted_by_offset, offset),
                ):
                    tested[key] += 1
                    passed[key] += offset < accepted

    @property
    def passes(self) -> int:
        """Passes of the CodePredictor: a prefill a frame, and the rounds."""
        return self.frames + self.rounds

    @property
    def codes(self) -> int:
        """Codes that the CodePredictor made."""
        return self.frames * (self.num_code_groups - 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the ``cp_spec`` object; a rate without a sample is None."""
        return {
            "requested_verify_size": self.window.requested,
            "verify_size": self.window.verify_size,
            "mode": self.mode,
            "fallback_reason": self.window.reason,
            "frames": self.frames,
            "rounds": self.rounds,
            "passes": self.passes,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "codes": self.codes,
            "codes_per_round": (self.codes - self.frames) / self.rounds if self.rounds else None,
            "acceptance_by_depth": _rates(self._accepted_by_depth, self._tested_by_depth),
            "acceptance_by_offset": _rates(self._accepted_by_offset, self._tested_by_offset),
            "tested_by_depth": list(self._tested_by_depth),
            "tested_by_offset": list(self._tested_by_offset),
            "commit_histogram": list(self._commits),
        }


def _rates(accepted: Sequence[int], tested: Sequence[int]) -> list[float | None]:
    return [hits / total if total else None for hits, total in zip(accepted, tested, strict=True)]
