"""The inner loop by exact enumeration: the law of a frame's codes, acceptance, independence of rows, statistics."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from trt_cpspec import frame as frame_module
from trt_cpspec import sampling
from trt_cpspec.config import MODES, Mode, SamplingParams, Window, resolve_window
from trt_cpspec.errors import NumericsError
from trt_cpspec.frame import CpSpecStats, FrameResult, FrameRow, Round, decode_frame
from trt_cpspec.sampling import Law, Noise, PhiloxNoise, Use, law

Array = NDArray[np.float64]
OFF = Window()
PLAIN = SamplingParams(temperature=1.0, top_k=0)
PARAMS = {
    "plain": PLAIN,
    "top_k": replace(PLAIN, top_k=2),
    "top_p": replace(PLAIN, top_p=0.7),
    "cold": replace(PLAIN, temperature=0.5),
    "greedy": replace(PLAIN, temperature=0.0),
}


def window(size: int) -> Window:
    return Window(requested=size, verify_size=size)


@dataclass
class TableModel:
    """A CodePredictor in which every head reads a table: a hidden state is the prefix it stands for.

    A prefix is (variant, code 0, code 1, ...); the variant is what the Talker's hidden state says. Head d on the full
    prefix of d codes is the target of depth d, and the same head on an earlier, shorter prefix the draft.

    ``agreement`` scales what a head sees of its prefix down: at 1 every draft equals its target. ``shaped`` makes rows
    peaked, tied, or of fewer possible codes. ``sure_drafts`` makes every draft one-hot. ``poison`` replaces the logits
    of one (variant, depth), of the target or the draft.
    """

    groups: int
    vocab: int
    seed: int = 0
    agreement: float = 0.0
    shaped: bool = False
    sure_drafts: bool = False
    poison: tuple[int, int, bool, float] | None = None
    passes: list[tuple[list[int], list[int]]] = field(default_factory=list)
    _known: dict[tuple[int, tuple[int, ...]], Array] = field(default_factory=dict)

    @property
    def num_code_groups(self) -> int:
        return self.groups

    def prefill(self, talker_hidden: Array, code0: NDArray[np.int32]) -> Array:
        self._cache = np.full((len(code0), self.groups + 1), -7, np.int64)
        self._cache[:, 0], self._cache[:, 1] = talker_hidden[:, 0], code0
        self._output = np.empty((len(code0), 8, self.groups + 2))
        return np.stack([self._state(row, 1) for row in range(len(code0))])

    def forward(self, codes: NDArray[np.int32], depths: NDArray[np.int64], counts: NDArray[np.int64]) -> Array:
        """Write the cache behind the committed prefix; the output is one buffer, padding is NaN."""
        self.passes.append((depths.tolist(), counts.tolist()))
        assert codes.shape[1] == counts.max()
        hidden = self._output[:, : codes.shape[1]]
        hidden[:] = np.nan
        for row, position in np.ndindex(codes.shape):
            if position < counts[row]:
                depth = int(depths[row]) + position
                assert depth <= self.groups - 2  # the last code is never an input
                self._cache[row, 1 + depth] = codes[row, position]
                hidden[row, position] = self._state(row, 1 + depth)
        return hidden

    def draft_logits(self, hidden: Array, depth: int, count: int) -> Array:
        assert hidden[0] == depth - 1  # the hidden state that gave the last committed code
        assert depth + count <= self.groups - 1  # a bonus always exists
        return np.stack([self.head(depth + i, self._prefix(hidden)) for i in range(count)])

    def target_logits(self, hidden: Array, depth: int) -> Array:
        assert hidden[:, 0].tolist() == [depth + i for i in range(len(hidden))]
        return np.stack([self.head(depth + i, self._prefix(row)) for i, row in enumerate(hidden)])

    def head(self, depth: int, prefix: tuple[int, ...]) -> Array:
        """Return the logits ``[V]`` of a depth after a prefix."""
        if (depth, prefix) not in self._known:
            self._known[depth, prefix] = self._make(depth, prefix)
        return self._known[depth, prefix]

    def _make(self, depth: int, prefix: tuple[int, ...]) -> Array:
        is_draft = len(prefix) - 1 < depth
        if self.poison and self.poison[:3] == (prefix[0], depth, is_draft):
            logits = np.zeros(self.vocab)
            logits[slice(None) if self.poison[3] == -math.inf else 1] = self.poison[3]
            return logits
        own = np.random.default_rng([self.seed, depth, *prefix])
        common = np.random.default_rng([self.seed, depth]).normal(size=self.vocab)
        logits = 1.5 * (self.agreement * common + (1 - self.agreement) * own.normal(size=self.vocab))
        if self.sure_drafts and is_draft:
            return np.where(np.arange(self.vocab) == logits.argmax(), 0.0, -np.inf)
        if self.shaped:
            shape = own.integers(5)
            if shape == 0:
                logits *= 8
            elif shape == 1:
                logits = np.round(logits)
            elif shape == 2:
                logits[own.integers(self.vocab)] = -np.inf
        return logits

    def _state(self, row: int, length: int) -> Array:
        hidden = np.full(self.groups + 2, -9.0)
        hidden[0] = length
        hidden[1 : length + 2] = self._cache[row, : length + 1]
        return hidden

    @staticmethod
    def _prefix(hidden: Array) -> tuple[int, ...]:
        return tuple(int(code) for code in hidden[1 : int(hidden[0]) + 2])


@dataclass(frozen=True)
class Request:
    """One row of a batch."""

    variant: int
    code0: int
    params: SamplingParams
    noise: Noise


def decode(model: TableModel, requests: Sequence[Request], size: Window, mode: Mode = "rejection") -> FrameResult:
    return decode_frame(
        model,
        np.array([[float(request.variant)] for request in requests]),
        np.array([request.code0 for request in requests], np.int32),
        [FrameRow(request.params, request.noise) for request in requests],
        window=size,
        mode=mode,
    )


# The law of a frame, by enumeration


@dataclass
class Branch:
    """Noise that follows a script of choices and takes the first possible one behind its end."""

    script: list[int]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def pick(self, law: Law, depth: int, use: Use) -> int:
        codes = np.flatnonzero(law)
        return int(codes[self._choose(law[codes].tolist())])

    def accept(self, probability: float, depth: int) -> bool:
        if probability in (0.0, 1.0):
            return probability == 1.0
        return self._choose([probability, 1 - probability]) == 0

    def _choose(self, probabilities: list[float]) -> int:
        step = len(self.taken)
        choice = self.script[step] if step < len(self.script) else 0
        self.taken.append(choice)
        self.widths.append(len(probabilities))
        self.probability *= probabilities[choice]
        return choice


def branches(run: Callable[[Noise], FrameResult]) -> Iterator[tuple[float, FrameResult]]:
    """Run every outcome of the random choices once, and yield each with its probability."""
    script: list[int] = []
    while True:
        branch = Branch(script)
        result = run(branch)
        yield branch.probability, result
        script = branch.taken
        while script and script[-1] + 1 == branch.widths[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def frames(model: TableModel, params: SamplingParams, size: Window) -> Iterator[tuple[float, FrameResult]]:
    return branches(lambda noise: decode(model, [Request(0, 1, params, noise)], size))


def joint_law(outcomes: Iterator[tuple[float, FrameResult]], model: TableModel) -> Array:
    """Return the probability of each frame, ``[V] * (G - 1)``."""
    joint = np.zeros((model.vocab,) * (model.groups - 1))
    for probability, result in outcomes:
        joint[tuple(result.codes[0, 1:])] += probability
    return joint


def autoregressive_law(model: TableModel, params: SamplingParams) -> Array:
    """Return the same by the chain rule: one law a depth, multiplied along every prefix."""
    joint = np.zeros((model.vocab,) * (model.groups - 1))
    pending = [((0, 1), 1.0)]
    while pending:
        prefix, probability = pending.pop()
        if len(prefix) == model.groups + 1:
            joint[prefix[2:]] = probability
            continue
        step = law(model.head(len(prefix) - 1, prefix), params)
        pending += [((*prefix, code), probability * step[code]) for code in range(model.vocab)]
    return joint


def discrepancy(model: TableModel, params: SamplingParams, size: int) -> float:
    """Return the largest error of any frame's probability."""
    ours = joint_law(frames(model, params, window(size)), model)
    return float(np.abs(ours - autoregressive_law(model, params)).max())


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("size", [0, 2, 3, 4, 8])
@pytest.mark.parametrize(("vocab", "depths"), [(2, 2), (2, 3), (2, 4), (2, 5), (3, 2), (3, 3), (3, 4)])
def test_joint_law_is_autoregressive(vocab: int, depths: int, size: int, name: str) -> None:
    for shaped in (False, True):
        model = TableModel(groups=depths + 1, vocab=vocab, seed=vocab + depths, shaped=shaped)
        assert discrepancy(model, PARAMS[name], size) < 1e-12


@pytest.mark.parametrize("name", ["plain", "cold"])
@pytest.mark.parametrize("size", [4, 8])
def test_joint_law_of_long_windows(size: int, name: str) -> None:
    """Eight depths under one-hot drafts: every commit length up to the seven that fit occurs."""
    model = TableModel(groups=9, vocab=2, seed=3, sure_drafts=True)
    outcomes = list(frames(model, PARAMS[name], window(size)))
    ours = joint_law(iter(outcomes), model)
    np.testing.assert_allclose(ours, autoregressive_law(model, PARAMS[name]), rtol=0, atol=1e-12)
    commits = {step.accepted + 1 for _, result in outcomes for step in result.rounds[0]}
    assert commits == set(range(1, min(size, 7) + 1))


@pytest.mark.parametrize("agreement", [0.5, 0.9, 1.0])
def test_joint_law_under_agreement(agreement: float) -> None:
    """Drafts near the target, where residuals are small, and equal to it, where there is none."""
    assert discrepancy(TableModel(groups=5, vocab=3, agreement=agreement), PLAIN, 3) < 1e-12


def acceptance(model: TableModel, params: SamplingParams, offset: int) -> float:
    """Return the sum of min(target, draft) along the first round's drafts up to ``offset``."""

    def rest(prefix: tuple[int, ...], stale: tuple[int, ...], left: int) -> float:
        if left < 0:
            return 1.0
        depth = len(prefix) - 1
        target, draft = law(model.head(depth, prefix), params), law(model.head(depth, stale), params)
        return sum(
            min(target[code], draft[code]) * rest((*prefix, code), stale, left - 1) for code in range(model.vocab)
        )

    first = law(model.head(1, (0, 1)), params)
    return sum(first[code] * rest((0, 1, code), (0, 1), offset) for code in range(model.vocab))


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("size", [2, 4])
def test_acceptance_is_the_sum_of_min(size: int, name: str) -> None:
    model = TableModel(groups=6, vocab=2, seed=5, agreement=0.3)
    outcomes = [(probability, result.rounds[0][0]) for probability, result in frames(model, PARAMS[name], window(size))]
    assert {step.proposed for _, step in outcomes} == {size - 1}
    for offset in range(size - 1):
        accepted = sum(probability for probability, step in outcomes if step.accepted > offset)
        assert accepted == pytest.approx(acceptance(model, PARAMS[name], offset), abs=1e-12)
    assert 0.2 < acceptance(model, PLAIN, 0) < 0.95


class DisjointModel(TableModel):
    """Every draft has the codes below V / 2 only, every target the others."""

    def _make(self, depth: int, prefix: tuple[int, ...]) -> Array:
        logits = super()._make(depth, prefix)
        half = self.vocab // 2
        logits[half:] = -np.inf if len(prefix) - 1 < depth else logits[half:]
        logits[:half] = -np.inf if len(prefix) - 1 == depth else logits[:half]
        return logits


def test_disjoint_drafts_are_never_accepted() -> None:
    model = DisjointModel(groups=5, vocab=4)
    assert all(step.accepted == 0 for _, result in frames(model, PLAIN, window(3)) for step in result.rounds[0])
    assert discrepancy(model, PLAIN, 3) < 1e-12


# The enumeration finds faults


class Fault:
    """Faults of the accept step, each put into the production loop."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.rule = frame_module.accept_by_rejection

    def targets(self, change: Callable[[list[Law]], list[Law]]) -> None:
        self.patch.setattr(
            frame_module,
            "accept_by_rejection",
            lambda targets, drafts, noise: self.rule(change(list(targets)), drafts, noise),
        )

    def drafts(self, change: Callable[[list[Law]], list[Law]]) -> None:
        self.patch.setattr(
            frame_module,
            "accept_by_rejection",
            lambda targets, drafts, noise: self.rule(targets, replace(drafts, laws=change(drafts.laws)), noise),
        )

    def before_top_p(self) -> Callable[[list[Law]], list[Law]]:
        """Return a function from the laws of the loop to those without their top-p."""
        made: dict[int, tuple[Law, Law]] = {}

        def recorded(logits: Array, params: SamplingParams) -> Law:
            result = law(logits, params)
            made[id(result)] = result, law(logits, replace(params, top_p=1.0))
            return result

        self.patch.setattr(frame_module, "law", recorded)
        return lambda laws: [made[id(each)][1] for each in laws]

    def residual_is_the_target(self) -> None:
        self.patch.setattr(sampling, "residual_law", lambda target, draft: target)

    def residual_is_not_normalised(self) -> None:
        self.patch.setattr(sampling, "residual_law", lambda target, draft: np.maximum(target - draft, 0))

    def residual_of_absolute_difference(self) -> None:
        self.patch.setattr(
            sampling, "residual_law", lambda target, draft: abs(target - draft) / abs(target - draft).sum()
        )

    def every_draft_is_accepted(self) -> None:
        self.patch.setattr(sampling, "accept_probability", lambda target, draft, code: 1.0)

    def accepted_with_the_target_probability(self) -> None:
        self.patch.setattr(sampling, "accept_probability", lambda target, draft, code: float(target[code]))

    def accept_ratio_is_inverted(self) -> None:
        self.patch.setattr(
            sampling, "accept_probability", lambda target, draft, code: min(1.0, draft[code] / max(target[code], 1e-9))
        )

    def bonus_from_the_first_row(self) -> None:
        self.targets(lambda targets: [*targets[:-1], targets[0]])

    def bonus_from_the_row_before(self) -> None:
        self.targets(lambda targets: [*targets[:-1], targets[max(len(targets) - 2, 0)]])

    def targets_from_the_next_row(self) -> None:
        self.targets(lambda targets: [*targets[1:], targets[-1]])

    def drafts_forget_their_law(self) -> None:
        self.drafts(lambda laws: [np.full(len(each), 1 / len(each)) for each in laws])

    def draft_law_of_another_offset(self) -> None:
        self.drafts(lambda laws: [np.maximum(each, 1e-9) for each in laws[::-1]])

    def top_p_for_the_drawing_of_drafts_only(self) -> None:
        self.drafts(self.before_top_p())

    def top_p_for_drafts_only(self) -> None:
        self.targets(self.before_top_p())


@pytest.mark.parametrize("fault", [name for name in vars(Fault) if "_" in name.strip("_") and name != "before_top_p"])
def test_enumeration_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableModel(groups=5, vocab=3, seed=1, agreement=0.3)
    params = replace(PLAIN, top_p=0.8) if "top_p" in fault else PLAIN
    assert discrepancy(model, params, 3) < 1e-12
    getattr(Fault(monkeypatch), fault)()
    assert discrepancy(model, params, 3) > 1e-3


class StaleModel(TableModel):
    """Keeps what a rejected draft left in the cache."""

    def forward(self, codes: NDArray[np.int32], depths: NDArray[np.int64], counts: NDArray[np.int64]) -> Array:
        before = self._cache.copy()
        hidden = super().forward(codes, depths, counts)
        self._cache = np.where(before == -7, self._cache, before)
        return hidden


def test_enumeration_finds_a_stale_cache() -> None:
    assert discrepancy(TableModel(groups=5, vocab=3, seed=1), PLAIN, 3) < 1e-12
    assert discrepancy(StaleModel(groups=5, vocab=3, seed=1), PLAIN, 3) > 1e-3


# Philox in the loop


@dataclass(frozen=True)
class Recorder:
    """Philox noise that keeps the addresses it was asked for."""

    noise: PhiloxNoise
    asked: list[tuple[str, int]] = field(default_factory=list)

    def pick(self, law: Law, depth: int, use: Use) -> int:
        self.asked.append((use.name, depth))
        return self.noise.pick(law, depth, use)

    def accept(self, probability: float, depth: int) -> bool:
        self.asked.append(("ACCEPT", depth))
        return self.noise.accept(probability, depth)


@pytest.mark.parametrize("size", [3, 8])
def test_a_number_decides_once(size: int) -> None:
    """Only the draft of a depth that was never tested may be drawn again: nothing committed depends on the first."""
    model = TableModel(groups=10, vocab=4, agreement=0.5)
    redrawn = 0
    for seed in range(50):
        noise = Recorder(PhiloxNoise(seed=seed, frame=seed))
        decode(model, [Request(0, 1, PLAIN, noise)], window(size))
        once = [address for address in noise.asked if address[0] != "DRAFT"]
        assert len(set(once)) == len(once)
        assert {address[0] for address in once} <= {"TARGET", "ACCEPT", "RESIDUAL"}
        for depth in range(2, 10):
            kinds = {kind for kind, at in once if at == depth}
            assert kinds in ({"TARGET"}, {"ACCEPT"}, {"ACCEPT", "RESIDUAL"})  # bonus, accepted, rejected
            drawn = [i for i, address in enumerate(noise.asked) if address == ("DRAFT", depth)]
            redrawn += len(drawn) > 1
            if ("ACCEPT", depth) in once:
                assert drawn[-1] < noise.asked.index(("ACCEPT", depth))
    assert redrawn > 10


def test_rejection_follows_the_law_under_philox() -> None:
    """The enumeration takes the numbers as independent; this draws them, with drafts that are drawn again."""
    model = TableModel(groups=5, vocab=2, seed=2, agreement=0.2)
    count = 2_000
    requests = [Request(0, 1, PLAIN, PhiloxNoise(seed=7, frame=frame)) for frame in range(count)]
    codes = decode(model, requests, window(3)).codes[:, 1:]
    observed = np.bincount(codes @ [8, 4, 2, 1], minlength=16)
    expected = count * autoregressive_law(model, PLAIN).ravel()
    assert expected.min() > 5
    assert ((observed - expected) ** 2 / expected).sum() < 15 + 3 * math.sqrt(30)


def autoregressive_codes(model: TableModel, request: Request) -> list[int]:
    """Draw one code a depth, without the loop."""
    prefix = (request.variant, request.code0)
    for depth in range(1, model.groups):
        step = law(model.head(depth, prefix), request.params)
        prefix = (*prefix, request.noise.pick(step, depth, Use.TARGET))
    return list(prefix[1:])


@pytest.fixture(scope="module")
def thousand() -> tuple[TableModel, list[Request], list[list[int]]]:
    """A thousand seeds under five laws, with what autoregressive decoding draws from them."""
    model = TableModel(groups=10, vocab=5, seed=4, agreement=0.8, shaped=True)
    params = list(PARAMS.values())
    requests = [
        Request(seed % 3, seed % 5, params[seed % 5], PhiloxNoise(seed=seed, frame=seed % 7)) for seed in range(1000)
    ]
    return model, requests, [autoregressive_codes(model, request) for request in requests]


@pytest.mark.parametrize("mode", MODES)
def test_no_window_is_one_stream(mode: Mode, thousand: tuple[TableModel, list[Request], list[list[int]]]) -> None:
    model, requests, expected = thousand
    result = decode(model, requests, OFF, mode)
    assert result.codes.dtype == np.int32
    assert result.codes.tolist() == expected
    assert all(rounds == [Round(depth, 0, 0) for depth in range(2, 10)] for rounds in result.rounds)


@pytest.mark.parametrize("size", range(2, 9))
def test_coupled_codes_do_not_depend_on_the_window(
    size: int, thousand: tuple[TableModel, list[Request], list[list[int]]]
) -> None:
    model, requests, expected = thousand
    result = decode(model, requests, window(size), "coupled")
    assert result.codes.tolist() == expected
    commits = {step.accepted + 1 for rounds in result.rounds for step in rounds}
    assert commits == set(range(1, size + 1))


def test_rejection_and_coupled_differ(thousand: tuple[TableModel, list[Request], list[list[int]]]) -> None:
    model, requests, expected = thousand
    codes = decode(model, requests[:50], window(3), "rejection").codes.tolist()
    assert sum(ours != theirs for ours, theirs in zip(codes, expected, strict=False)) > 10


# Rows of a batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 3, 8])
def test_rows_are_independent(size: int, mode: Mode) -> None:
    """Each row's codes and rounds are those of the row alone, whoever its neighbours are and wherever it stands."""
    model = TableModel(groups=10, vocab=5, seed=6, agreement=0.7, shaped=True)
    params = [PLAIN, PARAMS["greedy"], replace(PLAIN, temperature=1.7, top_k=3), replace(PLAIN, top_p=0.6)]
    requests = [Request(row, 4 - row, params[row], PhiloxNoise(seed=2**40 * row + 3, frame=row)) for row in range(4)]
    alone = [decode(model, [request], window(size), mode) for request in requests]
    assert len({len(result.rounds[0]) for result in alone}) > 1 or size == 0  # they finish at different rounds
    for order in itertools.permutations(range(4)):
        together = decode(model, [requests[row] for row in order], window(size), mode)
        assert together.codes.tolist() == [alone[row].codes[0].tolist() for row in order]
        assert together.rounds == [alone[row].rounds[0] for row in order]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_belongs_to_its_row(mode: Mode) -> None:
    model = TableModel(groups=10, vocab=5)
    requests = [Request(0, 1, PLAIN, PhiloxNoise(seed=seed, frame=0)) for seed in (1, 2, 1)]
    codes = decode(model, requests, window(3), mode).codes
    assert codes[0].tolist() == codes[2].tolist() != codes[1].tolist()
    later = replace(requests[0], noise=PhiloxNoise(seed=1, frame=1))
    assert decode(model, [later], window(3), mode).codes[0].tolist() != codes[0].tolist()


def test_a_finished_row_takes_no_part() -> None:
    """Row 0 agrees and is done in one round, row 1 goes on alone: it counts 0 from then on."""

    class HalfAgreeing(DisjointModel):
        def _make(self, depth: int, prefix: tuple[int, ...]) -> Array:
            if prefix[0] == 1:
                return super()._make(depth, prefix)
            return one_hot_logits(self.vocab, depth)

    model = HalfAgreeing(groups=6, vocab=4)
    requests = [Request(variant, 1, PLAIN, PhiloxNoise(seed=variant, frame=0)) for variant in (0, 1)]
    result = decode(model, requests, window(8))
    assert result.rounds[0] == [Round(2, 3, 3)]
    assert result.rounds[1] == [Round(2, 3, 0), Round(3, 2, 0), Round(4, 1, 0), Round(5, 0, 0)]
    assert [counts for _, counts in model.passes] == [[4, 4], [0, 3], [0, 2], [0, 1]]
    assert [depths[1] for depths, _ in model.passes] == [1, 2, 3, 4]
    assert result.codes[0].tolist() == [1, 1, 2, 3, 0, 1]


def one_hot_logits(size: int, depth: int) -> Array:
    return np.where(np.arange(size) == depth % size, 0.0, -np.inf)


# Logits without a law


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("size", "depth", "is_draft"),
    [
        (0, 1, False),
        (0, 4, False),
        (3, 6, True),
        (3, 6, False),
        (8, 2, True),
        (8, 6, True),
        (8, 6, False),
        (8, 7, False),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_bad_logits_name_row_and_depth(mode: Mode, size: int, depth: int, is_draft: bool, value: float) -> None:
    """Also behind the start of a round: at N = 3 depth 6 is the second draft of a round, at N = 8 the fifth."""
    model = TableModel(groups=8, vocab=4, agreement=1.0, poison=(2, depth, is_draft, value))
    requests = [Request(variant, 1, PLAIN, PhiloxNoise(seed=3, frame=0)) for variant in (0, 2, 1)]
    with pytest.raises(NumericsError, match=rf"depth {depth}\b") as caught:
        decode(model, requests, window(size), mode)
    assert caught.value.row == 1
    healthy = [requests[0], requests[2]]
    codes = decode(model, healthy, window(size), mode).codes
    assert codes.tolist() == [decode(model, [request], window(size), mode).codes[0].tolist() for request in healthy]


# Small frames and perfect agreement


@pytest.mark.parametrize(("depths", "size"), [(1, 0), (2, 0), (3, 3), (15, 3)])
def test_a_window_needs_a_depth_that_can_be_drafted(depths: int, size: int) -> None:
    """The first residual code comes from the prefill and the last is always a bonus."""
    found = resolve_window(3, codebook_size=4, residual_depths=depths, max_verify_size=8)
    assert (found.verify_size, found.reason is None) == (size, size > 0)


@pytest.mark.parametrize("mode", MODES)
def test_one_residual_depth_needs_no_pass(mode: Mode) -> None:
    """G = 2: the prefill gives the frame, and a window has no room."""
    fallback = resolve_window(3, codebook_size=4, residual_depths=1, max_verify_size=8)
    assert (fallback.verify_size, bool(fallback.reason)) == (0, True)
    model = TableModel(groups=2, vocab=4)
    request = Request(0, 1, PLAIN, PhiloxNoise(seed=3, frame=0))
    expected = autoregressive_codes(model, request)
    for size in (OFF, fallback, window(3)):
        result = decode(model, [request], size, mode)
        assert (result.codes[0].tolist(), result.rounds, model.passes) == (expected, [[]], [])
        assert result.window == size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "commits"),
    [(0, [1] * 14), (2, [2] * 7), (3, [3, 3, 3, 3, 2]), (4, [4, 4, 4, 2]), (7, [7, 7]), (8, [8, 6])],
)
def test_perfect_agreement_commits_whole_windows(size: int, commits: list[int], mode: Mode) -> None:
    """Sixteen codes: one by the prefill, fourteen by the rounds; the last missing code is never drafted."""
    model = TableModel(groups=16, vocab=6, agreement=1.0)
    stats = CpSpecStats(window(size), mode, 16)
    frame_count = 5
    for frame in range(frame_count):
        result = decode(model, [Request(0, 1, PLAIN, PhiloxNoise(seed=1, frame=frame))], window(size), mode)
        assert [step.accepted + 1 for step in result.rounds[0]] == commits
        stats.add_frame(result.rounds[0])
    report = stats.as_dict()
    bonuses = set(1 + np.cumsum(commits))
    assert report["acceptance_by_depth"] == [None if d < 2 or d in bonuses else 1.0 for d in range(16)]
    assert report["commit_histogram"] == [frame_count * commits.count(k + 1) for k in range(max(size, 1))]
    assert report["passes"] == frame_count * (1 + len(commits)) == frame_count + len(model.passes)


# Statistics


def test_statistics_of_a_known_history() -> None:
    stats = CpSpecStats(window(3), "rejection", 6)
    stats.add_frame([Round(2, 2, 2), Round(5, 0, 0)])
    stats.add_frame([Round(2, 2, 0), Round(3, 2, 1), Round(5, 0, 0)])
    expected = {
        "requested_verify_size": 3,
        "verify_size": 3,
        "mode": "rejection",
        "fallback_reason": None,
        "frames": 2,
        "rounds": 5,
        "passes": 7,
        "proposed": 6,
        "accepted": 3,
        "codes": 10,
        "codes_per_round": 1.6,
        "acceptance_by_depth": [None, None, 1 / 2, 1.0, 0.0, None],
        "acceptance_by_offset": [2 / 3, 1 / 2],
        "commit_histogram": [3, 1, 1],
    }
    report = stats.as_dict()
    assert {key: report[key] for key in expected} == expected


def test_statistics_of_nothing() -> None:
    report = CpSpecStats(Window(requested=3, verify_size=0, reason="why"), "coupled", 4).as_dict()
    assert (report["frames"], report["passes"], report["codes"], report["codes_per_round"]) == (0, 0, 0, None)
    assert (report["requested_verify_size"], report["verify_size"], report["fallback_reason"]) == (3, 0, "why")
    assert report["acceptance_by_depth"] == [None] * 4
    assert (report["acceptance_by_offset"], report["commit_histogram"]) == ([], [0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 2, 3, 8])
def test_statistics_are_consistent(size: int, mode: Mode) -> None:
    groups, rows = 10, 40
    model = TableModel(groups=groups, vocab=4, agreement=0.7)
    requests = [Request(0, 1, PLAIN, PhiloxNoise(seed=row, frame=0)) for row in range(rows)]
    stats = CpSpecStats(window(size), mode, groups)
    for rounds in decode(model, requests, window(size), mode).rounds:
        assert 1 + sum(step.accepted + 1 for step in rounds) == groups - 1
        depth = 2
        for step in rounds:
            assert step.first_depth == depth
            assert step.accepted <= step.proposed == max(min(size - 1, groups - 1 - depth), 0)
            depth += step.accepted + 1
        stats.add_frame(rounds)
    report = stats.as_dict()
    assert report["frames"] == rows
    assert report["passes"] == rows + report["rounds"]
    assert report["codes"] == rows * (groups - 1) == rows + report["rounds"] + report["accepted"]
    assert report["codes_per_round"] == (report["codes"] - rows) / report["rounds"]
    assert sum(report["commit_histogram"]) == report["rounds"]
    assert sum(k * count for k, count in enumerate(report["commit_histogram"])) == report["accepted"]
    assert [report["acceptance_by_depth"][depth] for depth in (0, 1, groups - 1)] == [None] * 3
    if size == 0:
        assert report["passes"] == rows * (groups - 1)
        assert (report["proposed"], report["accepted"], report["codes_per_round"]) == (0, 0, 1)
    else:
        assert all(0 < rate <= 1 for rate in report["acceptance_by_offset"])
        assert report["accepted"] < report["proposed"]
