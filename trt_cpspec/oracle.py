"""The sampler as it is defined, written down a second time, to check the frames that an engine decoded.

A frame is followed code by code: passes of one position along the codes that were drawn give the law of autoregressive
decoding at each of them, and every random number is known, so that each decision (a first code, a draft and its
acceptance, a residual draw, a bonus) can be made again. Nothing here calls the loop or the accept step that it checks:
of the production code it shares :func:`~trt_cpspec.sampling.law` and the numbers of Philox.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import SamplingParams
from .frame import Round
from .predictor import CodePredictor
from .sampling import Law, Use, law, uniforms

Float32 = NDArray[np.float32]
Kind = Literal["first", "draft", "bonus"]


class Draws(NamedTuple):
    """What decides a row of a frame, beside its logits."""

    params: SamplingParams
    seed: int
    frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one code of a frame came to be.

    Attributes
    ----------
    kind : {"first", "draft", "bonus"}
        The prefill's code; a depth whose draft was tested; the code behind accepted drafts, or of a round without.
    depth, offset : int
        ``offset`` is the draft's place in its round.
    draws : Draws
    target : ndarray, shape [V], float32
        Autoregressive logits, of the codes that were drawn before.
    draft : ndarray, shape [V], float32, or None
        Logits that the draft was drawn from.
    before : ndarray, shape [V], float32, or None
        Autoregressive logits of the depth before.
    code : int
        As it was committed.
    accepted : bool or None
        What the round reported of the draft.
    """

    kind: Kind
    depth: int
    offset: int
    draws: Draws
    target: Float32
    draft: Float32 | None = None
    before: Float32 | None = None
    code: int
    accepted: bool | None = None

    @property
    def outcome(self) -> tuple[bool | None, int]:
        """What was observed."""
        return self.accepted, self.code


def autoregressive_states(
    predictor: CodePredictor, talker_hidden: Float32, codes: NDArray[np.int32], *, width: int = 1
) -> Float32:
    """Run the passes of autoregressive decoding along codes that are known.

    Parameters
    ----------
    predictor : CodePredictor
    talker_hidden : ndarray, shape [B, Ht], float32
    codes : ndarray, shape [B, G], int32
    width : int
        Positions of one pass; 1 is what autoregressive decoding does.

    Returns
    -------
    ndarray, shape [B, G - 1, C], float32
        Row d - 1 is the hidden state that gives the code of depth d.
    """
    batch, groups = codes.shape
    states = [predictor.prefill(talker_hidden, codes[:, 0])[:, None]]
    for depth in range(1, groups - 1, width):
        count = min(width, groups - 1 - depth)
        rows = np.full(batch, depth), np.full(batch, count)
        states.append(predictor.forward(codes[:, depth : depth + count], *rows).copy())
    return np.concatenate(states, axis=1)


def decisions(
    predictor: CodePredictor,
    states: Float32,
    codes: NDArray[np.int32],
    rounds: Sequence[Round],
    draws: Draws,
) -> Iterator[Decision]:
    """Yield how each code of one row of a frame was decided.

    Parameters
    ----------
    predictor : CodePredictor
    states : ndarray, shape [G - 1, C], float32
        From :func:`autoregressive_states`.
    codes : ndarray, shape [G], int32
    rounds : sequence of Round
    draws : Draws
    """
    logits = predictor.target_logits(states, 1)  # [G - 1, V], row d - 1 of depth d
    yield Decision(kind="first", depth=1, offset=0, draws=draws, target=logits[0], code=int(codes[1]))
    for first, proposed, accepted in rounds:
        # The state that gave the last committed code is what the drafts of the round are read from.
        drafts = predictor.draft_logits(states[first - 2], first, proposed) if proposed else logits[:0]
        for offset in range(accepted + 1):
            depth, tested = first + offset, offset < proposed
            yield Decision(
                kind="draft" if tested else "bonus",
                depth=depth,
                offset=offset,
                draws=draws,
                target=logits[depth - 1],
                draft=drafts[offset] if tested else None,
                before=logits[depth - 2],
                code=int(codes[depth]),
                accepted=offset < accepted if tested else None,
            )


class Sampler:
    """Makes a decision again, as the sampler is defined.

    A subclass is a sampler with one known error; ``title`` says which.
    """

    title = "as it is defined"

    def target(self, decision: Decision) -> Law:
        """Return the law of autoregressive decoding."""
        return law(decision.target, decision.draws.params)

    def bonus(self, decision: Decision) -> Law:
        """Return the law of the code behind the accepted drafts."""
        return self.target(decision)

    def draft(self, decision: Decision) -> Law:
        """Return the law that the draft is drawn from."""
        assert decision.draft is not None
        return law(decision.draft, decision.draws.params)

    def stated_draft(self, decision: Decision) -> Law:
        """Return the law that the accept step takes for it."""
        return self.draft(decision)

    def residual(self, target: Law, draft: Law) -> Law:
        """Return the law of the code in a rejected draft's place."""
        excess = np.where(target > draft, target - draft, 0.0)
        return excess / excess.sum() if excess.any() else target

    def residual_use(self) -> Use:
        """Return the stream that the residual draw takes its numbers from."""
        return Use.RESIDUAL

    def outcome(self, decision: Decision) -> tuple[bool | None, int]:
        """Return whether the draft is accepted (None: there is none), and the code to commit."""
        if decision.draft is None:
            wanted = self.bonus(decision) if decision.kind == "bonus" else self.target(decision)
            return None, pick(wanted, decision, Use.TARGET)
        code = pick(self.draft(decision), decision, Use.DRAFT)
        target, stated = self.target(decision), self.stated_draft(decision)
        number = uniforms(*_address(decision), Use.ACCEPT, np.zeros(1, np.int64))[0]
        if number * stated[code] < target[code]:
            return True, code
        return False, pick(self.residual(target, stated), decision, self.residual_use())


def pick(wanted: Law, decision: Decision, use: Use) -> int:
    """Draw from a law as the noise of a decision has it: the largest of log-probability and Gumbel noise."""
    codes = np.flatnonzero(wanted > 0)
    numbers = uniforms(*_address(decision), use, codes)
    return int(codes[np.argmax(np.log(wanted[codes]) - np.log(-np.log(numbers)))])


def _address(decision: Decision) -> tuple[int, int, int]:
    return decision.draws.seed, decision.draws.frame, decision.depth


def _changed(params: SamplingParams, **changes: float) -> SamplingParams:
    return replace(params, **changes)  # type: ignore[arg-type]


class _UntruncatedStatement(Sampler):
    title = "the draft law in the accept step is the whole softmax, not the truncated law that drafts were drawn from"

    def stated_draft(self, decision: Decision) -> Law:
        assert decision.draft is not None
        return law(decision.draft, _changed(decision.draws.params, top_k=0, top_p=1.0))


class _OneHotStatement(Sampler):
    title = "the draft law in the accept step is one-hot, although drafts were drawn from a soft one"

    def stated_draft(self, decision: Decision) -> Law:
        stated = np.zeros_like(self.target(decision))
        stated[pick(self.draft(decision), decision, Use.DRAFT)] = 1.0
        return stated


class _TargetWithoutTopP(Sampler):
    title = "top-p on the draft side only"

    def target(self, decision: Decision) -> Law:
        return law(decision.target, _changed(decision.draws.params, top_p=1.0))


class _DraftWithoutTopP(Sampler):
    title = "top-p on the target side only"

    def draft(self, decision: Decision) -> Law:
        assert decision.draft is not None
        return law(decision.draft, _changed(decision.draws.params, top_p=1.0))


class _ResidualOfLostMass(Sampler):
    title = "the residual law is not normalised: what it lacks falls to the last code"

    def residual(self, target: Law, draft: Law) -> Law:
        excess = np.where(target > draft, target - draft, 0.0)
        excess[-1] += 1 - excess.sum()
        return excess


class _TargetForResidual(Sampler):
    title = "a rejected draft is replaced by a draw from the target law, not from the residual law"

    def residual(self, target: Law, draft: Law) -> Law:
        return target


class _BonusOfTheRowBefore(Sampler):
    title = "the bonus is drawn from the wrong row, the one before"

    def bonus(self, decision: Decision) -> Law:
        return law(decision.target if decision.before is None else decision.before, decision.draws.params)


class _SharedNoise(Sampler):
    title = "the residual draw shares its noise with the draft"

    def residual_use(self) -> Use:
        return Use.DRAFT


class _ResidualOfTargetNoise(Sampler):
    title = "the residual draw shares its noise with target draws"

    def residual_use(self) -> Use:
        return Use.TARGET


class _AlwaysAccepts(Sampler):
    title = "every draft is accepted"

    def outcome(self, decision: Decision) -> tuple[bool | None, int]:
        if decision.draft is None:
            return super().outcome(decision)
        return True, pick(self.draft(decision), decision, Use.DRAFT)


class _GreedyDraft(Sampler):
    title = "drafts are the most likely codes, and the accept step takes them for draws of the soft law"

    def draft(self, decision: Decision) -> Law:
        assert decision.draft is not None
        return law(decision.draft, _changed(decision.draws.params, temperature=0.0))

    def stated_draft(self, decision: Decision) -> Law:
        assert decision.draft is not None
        return law(decision.draft, decision.draws.params)


class _AcceptsAgreement(Sampler):
    title = "a draft is accepted only where it equals a draw of the target"

    def outcome(self, decision: Decision) -> tuple[bool | None, int]:
        if decision.draft is None:
            return super().outcome(decision)
        drawn = pick(self.target(decision), decision, Use.TARGET)
        return drawn == pick(self.draft(decision), decision, Use.DRAFT), drawn


KNOWN_ERRORS: tuple[Sampler, ...] = (
    _UntruncatedStatement(), _OneHotStatement(), _TargetWithoutTopP(), _DraftWithoutTopP(), _ResidualOfLostMass(),
    _TargetForResidual(), _BonusOfTheRowBefore(), _SharedNoise(), _ResidualOfTargetNoise(), _AlwaysAccepts(),
    _GreedyDraft(), _AcceptsAgreement(),
)  # fmt: skip
"""Samplers that have been met in the field, each with the one error it is named after."""


class Bounds(NamedTuple):
    """The least and the largest probability of each code, ``[V]`` float64, when logits may be off by an error."""

    low: Law
    high: Law


def bounds(logits: Float32, params: SamplingParams, error: float) -> Bounds:
    """Return what a law may be when each logit is off by ``error`` at most, normaliser aside.

    A code near the edge of top-k or top-p may be in or out; so may what top-p's edge decides, which moves by as much.
    """
    values = logits.astype(np.float64)
    if params.temperature == 0:
        two = np.partition(values, len(values) - 2)[-2:]
        certain = (values == two[1]) & (two[1] - two[0] > 2 * error)
        return Bounds(certain.astype(np.float64), (values + 2 * error >= two[1]).astype(np.float64))
    edges = (params.top_p,) if params.top_p == 1 else (max(params.top_p - error, 1e-9), min(params.top_p + error, 1.0))
    fewest, most = (law(logits, _changed(params, top_p=edge)) > 0 for edge in (edges[0], edges[-1]))
    outside = values[~fewest].max(initial=-np.inf)
    weights = np.exp((values - values.max()) / params.temperature)
    factor = np.exp(error / params.temperature)
    low = np.where(fewest & (values - error > outside + error), weights / factor / weights[most].sum(), 0.0)
    high = np.where(values + error >= values[most].min() - error, weights * factor / weights[fewest].sum(), 0.0)
    return Bounds(low, high)


def is_rounding(decision: Decision, error: float) -> bool:
    """Return whether an outcome is possible when each logit is off by ``error`` at most.

    The winner of a draw, noise included, may then change places with a code that is within twice the error. An
    acceptance and a residual law compare normalised probabilities, each off by the factor ``exp(2 * error)`` at most.
    """
    params, target = decision.draws.params, decision.target
    if decision.draft is None:
        return bool(_possible_winners(bounds(target, params, error), decision, Use.TARGET)[decision.code])
    drawn = _possible_winners(bounds(decision.draft, params, error), decision, Use.DRAFT)
    targets, drafts = bounds(target, params, 2 * error), bounds(decision.draft, params, 2 * error)
    number = uniforms(*_address(decision), Use.ACCEPT, np.zeros(1, np.int64))[0]
    if decision.accepted:
        return bool(drawn[decision.code] and number * drafts.low[decision.code] < targets.high[decision.code])
    residual = Bounds(np.maximum(targets.low - drafts.high, 0.0), np.maximum(targets.high - drafts.low, 0.0))
    can_reject = drawn & (number * drafts.high >= targets.low)
    return bool(can_reject.any() and _possible_winners(residual, decision, Use.RESIDUAL)[decision.code])


def _possible_winners(chances: Bounds, decision: Decision, use: Use) -> NDArray[np.bool_]:
    """Return which codes can have the largest sum of log-probability and noise."""
    numbers = uniforms(*_address(decision), use, np.arange(len(chances.low)))
    noise = -np.log(-np.log(numbers))
    with np.errstate(divide="ignore"):
        low, high = (np.log(chance) + noise for chance in chances)
    possible: NDArray[np.bool_] = np.isfinite(high) & (high >= low.max())
    return possible


class Cells(NamedTuple):
    """A code's place in its law, as numbers that are uniform in (0, 1) if and only if the law is kept.

    Attributes
    ----------
    code : float or None
        Of the committed code, whichever way it came; None where the law forbids it.
    accept : float or None
        Of whether a draft was accepted.
    accepted, residual : float or None
        Of an accepted draft's code, or of the code in a rejected one's place.
    """

    code: float | None
    accept: float | None = None
    accepted: float | None = None
    residual: float | None = None


def cells(decision: Decision, random: np.random.Generator) -> Cells:
    """Return the probability integral transforms of a decision, randomised within the steps of its laws.

    Codes are put in the order of draft over target: an error that favours the drafts, or slights them, piles up at one
    end.
    """
    sampler = Sampler()
    target = sampler.target(decision)
    spread = random.random(4)
    if decision.draft is None:
        return Cells(_transform(target, -target, decision.code, spread[0]))
    draft = sampler.draft(decision)
    # A target far below its draft gives infinity, the limit: such codes come first, and ties go by the code. Whatever
    # the laws alone put in order keeps the numbers uniform.
    with np.errstate(over="ignore"):
        order = -np.divide(draft, target, out=np.zeros_like(draft), where=target > 0)
    whole = _transform(target, order, decision.code, spread[0])
    shared = np.minimum(target, draft)
    chance = float(shared.sum())
    accept = spread[1] * chance if decision.accepted else chance + spread[1] * (1 - chance)
    if decision.accepted:
        return Cells(whole, accept, accepted=_transform(shared, order, decision.code, spread[2]))
    return Cells(whole, accept, residual=_transform(sampler.residual(target, draft), order, decision.code, spread[3]))


def _transform(wanted: Law, order: NDArray[np.float64], code: int, spread: float) -> float | None:
    """Return the share of a law's mass before a code, and a random part of the code's own; None where it has none."""
    if wanted[code] <= 0:
        return None
    before = (order < order[code]) | ((order == order[code]) & (np.arange(len(order)) < code))
    return float((wanted[before].sum() + spread * wanted[code]) / wanted.sum())
