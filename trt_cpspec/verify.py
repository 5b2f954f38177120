"""Show on an engine that speculation changes nothing, or say what it changes.

Six checks through the public :class:`~trt_cpspec.predictor.CodePredictor`, on whatever device it runs:

replay
    Every decision of the drawn frames is made again by the sampler as it is defined
    (:mod:`~trt_cpspec.oracle`), from the same random numbers. It finds an error from few frames, and can name it.
law
    Frames of the mode ``rejection`` against the law of autoregressive decoding, without any assumption on where random
    numbers come from: given the codes drawn before it, each code has a known law, so its place in that law is uniform
    and independent of all others. Chi-square over 17 equal cells, by depth, by kind of decision, and over all.
coupled
    The codes of the mode ``coupled`` against those of N = 0, one by one.
rows
    A row's codes in a batch, in a permuted batch, and alone.
graph
    Hidden states of a plan against those of the graph that it was built from, on the CPU.
edges
    The smallest and the largest random number that an accept step can meet, at drafts of probability 0 and 1.

What an engine rounds differently in passes of one position, of several, and of a batch is measured, and a decision
that moving the logits by twice that error turns round is reported as rounding, not as an error. Where it is too much
for rounding, that is the error, and the checks of decisions are not judged: they would blame the sampler for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import MAX_VERIFY_SIZE, Mode, SamplingParams
from .contexts import Contexts
from .errors import ConfigError, EngineError
from .frame import FrameResult
from .oracle import KNOWN_ERRORS, Decision, Draws, Sampler, autoregressive_states, bounds, cells, decisions, is_rounding
from .predictor import CodePredictor
from .uniformity import FALSE_ALARM, POWER, needed_noncentrality, uniformity

Float32 = NDArray[np.float32]
Progress = Callable[[int], None]

NEEDED_VARIATION = 0.05
"""Total variation for which the report says how many frames it takes."""

LOGIT_FLOOR = 1e-4
"""Least logit error that is assumed: the float32 arithmetic of the sampling kernels."""

LOGIT_LIMIT = 0.2
"""Most that a pass's shape may change a logit and still be rounding, of the standard deviation of its head's logits.

Five layers of the released size with random weights, every step rounded to BF16, change a logit by 0.05 of it at most,
whatever the head's scale; a pass that sees another past changes it by about 1.
"""

EXCUSE_TOLD = 0.1
"""Logits: a larger error excuses so many decisions that the verdict says so."""

POISONED = ("replay", "law", "coupled", "rows", "edges")
"""Checks that compare decisions made in passes of different shapes: more than rounding there leaves them nothing."""

GRAPH_TOLERANCE = 0.05
"""Of the largest magnitude of a frame's hidden states: FP16 plans are within 0.01 of their graph."""

LAWS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
)
"""Rows take turns through these: released defaults of Qwen3-TTS and of Qwen3-Omni, and no truncation at all."""

_GREEDY = SamplingParams(temperature=1.0, top_k=1)
# Addresses (frame, at depth 2 of seed 0) whose accept number has the 24 bits all 0, and all 1.
_EDGE_SEED = 0
_SMALLEST = (6824499, 13778322, 20324346, 42484461, 62202464)
_LARGEST = (1329544, 37418322, 37771296, 47456904, 67079823)
_ROW_CHECKS = 4
_EXAMPLES = 100
# Not all: of an engine that rounds, some examples are off by that too.
_EXPLAINED_SHARE, _RIGHT_SHARE = 0.75, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How much is verified.

    Attributes
    ----------
    frames : int
        Frames of each mode.
    windows : tuple of int
        Verify sizes; empty is 2, 3 and the widest that the engine takes.
    seed : int
    """

    frames: int = 400
    windows: tuple[int, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ConfigError(f"frames is {self.frames}, it must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed is {self.seed}, it must be from 0 to 2**32 - 1")


def verify(
    predictor: CodePredictor,
    contexts: Contexts,
    options: VerifyOptions | None = None,
    *,
    reference: CodePredictor | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run every check; return the report (see :func:`format_report`).

    Parameters
    ----------
    predictor : CodePredictor
    contexts : Contexts
    options : VerifyOptions or None
    reference : CodePredictor or None
        The graph that a plan was built from, on the CPU; None compares nothing.
    progress : callable or None
        Called with the number of frames that were added.

    Raises
    ------
    EngineError
        The engine cannot verify, and why: there is no speculation whose effect could be shown.
    """
    options = options or VerifyOptions()
    windows = _usable_windows(predictor, options.windows)
    rounding = measure_rounding(predictor, contexts, windows)
    # What is more than rounding is an error of its own, and excuses nothing.
    rounding_errors = _rounding_errors(rounding)
    error = LOGIT_FLOOR if rounding_errors else max(rounding["largest_error"], LOGIT_FLOOR)
    run = _Run(predictor, contexts, options, error=error, shift=2 * min(rounding["rms_error"], error))
    batch = min(predictor.spec.limits.max_batch_size, MAX_VERIFY_SIZE, options.frames)
    for number, first in enumerate(range(0, options.frames, batch)):
        rows = range(first, min(first + batch, options.frames))
        run.add_batch(rows, number, windows[number % len(windows)], check_rows=number < _ROW_CHECKS)
        if progress is not None:
            progress(len(rows))
    run.check_edges(windows[0])
    graph = compare_with_graph(predictor, reference, contexts) if reference is not None else None
    report = run.report([*rounding_errors, *_graph_errors(graph)], judged=not rounding_errors)
    return report | {
        "graph": graph,
        "windows": list(windows),
        "frames": options.frames,
        "contexts": contexts.source,
        "seed": options.seed,
        "rounding": rounding,
    }


def _usable_windows(predictor: CodePredictor, asked: Sequence[int]) -> tuple[int, ...]:
    widest = min(predictor.max_verify_size, MAX_VERIFY_SIZE)
    windows = tuple(asked) or tuple(sorted({2, min(3, widest), widest} - {0, 1}))
    for size in windows:
        window = predictor.window(size)
        if window.verify_size == 0:
            reason = window.reason or "a verify size of 0 decodes autoregressively"
            raise EngineError(f"there is no speculation to verify: {reason}")
    return windows


# ---- the engine's rounding ------------------------------------------------------------------------------------------


def measure_rounding(
    predictor: CodePredictor, contexts: Contexts, windows: Sequence[int], count: int = 8
) -> dict[str, Any]:
    """Compare the logits of wider passes, and of batches, with those of one row's passes of one position.

    Returns
    -------
    dict
        ``largest_error`` and ``rms_error`` (in logits), ``argmax_flips`` of ``compared`` rows of logits,
        ``by_shape``, the largest error of each shape, ``relative_by_shape``, the same of the standard deviation of
        the head's logits, and ``logit_spread``, that deviation over all heads.
    """
    batch = min(predictor.spec.limits.max_batch_size, len(contexts.code0), count)
    hidden, code0 = contexts.talker_hidden[:batch], contexts.code0[:batch]
    codes = predictor.decode_frame(hidden, code0, seeds=list(range(batch)), verify_size=0).codes
    alone = [_logits(predictor, autoregressive_states(predictor, hidden[i : i + 1], codes[i : i + 1])[0])
             for i in range(batch)]  # fmt: skip
    # By head: their scales differ, and with them what a hidden state's rounding does to their logits.
    spread = np.sqrt(np.mean([logits.var(axis=1) for logits in alone], axis=0))
    scale = np.maximum(spread, LOGIT_FLOOR / LOGIT_LIMIT)
    by_shape: dict[str, float] = {}
    relative_by_shape: dict[str, float] = {}
    squares: list[float] = []
    flips = compared = 0
    for rows in sorted({1, min(predictor.spec.limits.max_batch_size, len(code0))}):
        for width in sorted({1, *windows}):
            if (rows, width) == (1, 1):
                continue
            errors, relative = [], []
            for first in range(0, len(code0), rows):
                part = slice(first, first + rows)
                states = autoregressive_states(predictor, hidden[part], codes[part], width=width)
                for reference, state in zip(alone[part], states, strict=True):
                    found = _logits(predictor, state)
                    largest = np.abs(found - reference).max(axis=1)
                    errors.append(largest.max())
                    relative.append((largest / scale).max())
                    squares.append(float(np.square(found - reference).mean()))
                    flips += int((found.argmax(axis=1) != reference.argmax(axis=1)).sum())
                    compared += len(found)
            shape = f"{rows} x {width}"
            by_shape[shape], relative_by_shape[shape] = float(np.max(errors)), float(np.max(relative))  # NaN of a NaN
    return {
        "largest_error": float(np.max(list(by_shape.values()))),
        "rms_error": math.sqrt(np.mean(squares)),
        "argmax_flips": flips,
        "compared": compared,
        "by_shape": by_shape,
        "relative_by_shape": relative_by_shape,
        "logit_spread": math.sqrt(np.mean(np.square(spread))),
    }


def _logits(predictor: CodePredictor, states: Float32) -> Float32:
    return np.asarray(predictor.target_logits(states, 1), np.float32)


def compare_with_graph(
    predictor: CodePredictor, reference: CodePredictor, contexts: Contexts, count: int = 8
) -> dict[str, float]:
    """Follow the same codes through a plan and through the graph that it was built from.

    Returns
    -------
    dict
        ``relative_error`` of the hidden states, of their largest magnitude, and ``largest_logit_error``.
    """
    hidden, code0 = contexts.talker_hidden[:count], contexts.code0[:count]
    relative, absolute = [], []
    for row in range(len(code0)):
        part = slice(row, row + 1)
        codes = reference.decode_frame(hidden[part], code0[part], seeds=row).codes
        expected = autoregressive_states(reference, hidden[part], codes)[0]
        found = autoregressive_states(predictor, hidden[part], codes)[0]
        relative.append(np.abs(found - expected).max() / np.abs(expected).max())
        absolute.append(np.abs(_logits(predictor, found) - _logits(reference, expected)).max())
    # numpy's maximum, that of a NaN is NaN.
    return {"relative_error": float(np.max(relative)), "largest_logit_error": float(np.max(absolute))}


# ---- the checks -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Replay:
    """Decisions that were made again."""

    made: int = 0
    rounding: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[Decision] = field(default_factory=list)
    right: list[Decision] = field(default_factory=list)
    where: str = ""

    def names(self) -> list[str]:
        """Return the known errors that make nearly every example as it was observed, and what was right as well."""
        return [
            error.title
            for error in KNOWN_ERRORS
            if _share(error, self.examples) >= _EXPLAINED_SHARE and _share(error, self.right) >= _RIGHT_SHARE
        ]


def _share(sampler: Sampler, observed: Sequence[Decision]) -> float:
    """Return the share of decisions that a sampler makes as they were observed; 1 of none."""
    made = [sampler.outcome(decision) == decision.outcome for decision in observed]
    return sum(made) / len(made) if made else 1.0


class _Row(NamedTuple):
    """One row of a decoded frame."""

    context: int
    draws: Draws


class _Run:
    """Accumulates what the checks see."""

    def __init__(
        self, predictor: CodePredictor, contexts: Contexts, options: VerifyOptions, *, error: float, shift: float
    ) -> None:
        self._predictor, self._contexts, self._error = predictor, contexts, error
        # What rounding moves a probability by, relative to it, at the coldest of the laws.
        self._shift = shift / min(params.temperature for params in LAWS)
        self._first_seed = options.seed
        self._random = np.random.default_rng(options.seed)
        self._sampler = Sampler()
        self._replay = _Replay()
        self._cells: dict[str, list[float]] = defaultdict(list)
        self._forbidden = 0
        self._coupled: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._edges: Counter[str] = Counter()

    def add_batch(self, numbers: range, frame: int, window: int, *, check_rows: bool) -> None:
        """Decode one batch in every mode, and look at it from every side."""
        rows = [
            _Row(i % len(self._contexts.code0), Draws(LAWS[i % len(LAWS)], self._first_seed + i, frame))
            for i in numbers
        ]
        plain = self._decode(rows, 0, "rejection")
        plain_states = self._states(rows, plain)
        speculative = self._decode(rows, window, "rejection")
        for decision in self._decisions(rows, plain, plain_states):
            self._make_again(decision, f"N = 0, depth {decision.depth}")
            self._place(decision, ["autoregressive, all depths"])
        for decision in self._decisions(rows, speculative, self._states(rows, speculative)):
            self._make_again(decision, f"N = {window}, depth {decision.depth}, draft offset {decision.offset}")
            kind = {"first": [], "bonus": ["bonus"], "draft": [f"draft offset {decision.offset}"]}[decision.kind]
            self._place(decision, ["all depths", f"depth {decision.depth}", *kind])
        self._compare_coupled(rows, self._decode(rows, window, "coupled"), plain, plain_states)
        if check_rows and len(rows) > 1:
            self._check_rows(rows, speculative, window)

    def check_edges(self, window: int) -> None:
        """Meet the smallest accept number at a draft of probability 0, and the largest at one of probability 1."""
        titles = {True: "probability 1, largest number", False: "probability 0, smallest number"}
        for context in range(len(self._contexts.code0)):
            if all(self._edges[title] >= len(_SMALLEST) for title in titles.values()):
                return
            possible = self._forced_draft(context)
            if possible is None:
                continue
            frames, title = (_LARGEST if possible else _SMALLEST), titles[possible]
            frame = frames[context % len(frames)]
            row = _Row(context, Draws(_GREEDY, _EDGE_SEED, frame))
            accepted = self._decode([row], window, "rejection").rounds[0][0].accepted > 0
            self._edges[title] += 1
            self._edges[f"{title}: wrong"] += accepted != possible

    def _forced_draft(self, context: int) -> bool | None:
        """Return whether the greedy draft of depth 2 is the greedy code; None where rounding could decide."""
        row = _Row(context, Draws(_GREEDY, _EDGE_SEED, 0))
        plain = self._decode([row], 0, "rejection")
        states = self._states([row], plain)[0]
        target = self._predictor.target_logits(states[1:2], 2)[0]
        draft = self._predictor.draft_logits(states[0], 2, 1)[0]
        first = self._predictor.target_logits(states[0:1], 1)[0]
        if min(_gap(logits) for logits in (first, target, draft)) <= 2 * self._error:
            return None
        return int(np.argmax(target)) == int(np.argmax(draft))

    def _decode(self, rows: Sequence[_Row], window: int, mode: Mode) -> FrameResult:
        kept = [row.context for row in rows]
        return self._predictor.decode_frame(
            self._contexts.talker_hidden[kept],
            self._contexts.code0[kept],
            params=[row.draws.params for row in rows],
            seeds=[row.draws.seed for row in rows],
            frames=[row.draws.frame for row in rows],
            verify_size=window,
            mode=mode,
        )

    def _states(self, rows: Sequence[_Row], result: FrameResult) -> Float32:
        kept = [row.context for row in rows]
        return autoregressive_states(self._predictor, self._contexts.talker_hidden[kept], result.codes)

    def _decisions(self, rows: Sequence[_Row], result: FrameResult, states: Float32) -> Iterator[Decision]:
        for row, codes, rounds, state in zip(rows, result.codes, result.rounds, states, strict=True):
            yield from decisions(self._predictor, state, codes, rounds, row.draws)

    def _make_again(self, decision: Decision, where: str) -> None:
        self._replay.made += 1
        wanted = self._sampler.outcome(decision)
        if wanted == decision.outcome:
            if decision.kind == "draft" and len(self._replay.right) < _EXAMPLES:
                self._replay.right.append(decision)
            return
        if is_rounding(decision, self._error):
            self._replay.rounding += 1
            return
        self._replay.wrong[_what_differs(decision, wanted)] += 1
        if not self._replay.examples:
            self._replay.where = (
                f"{where}, seed {decision.draws.seed}: {_in_words(decision.outcome)}, {_in_words(wanted)} is right"
            )
        if len(self._replay.examples) < _EXAMPLES:
            self._replay.examples.append(decision)

    def _place(self, decision: Decision, groups: Sequence[str]) -> None:
        """Add a decision's cells to the chi-square tests."""
        found = cells(decision, self._random)
        if found.code is None:
            self._forbidden += _is_forbidden(decision, self._error)
        for group in groups:
            self._add(group, found.code)
        self._add("whether a draft is accepted", found.accept)
        self._add("an accepted draft", found.accepted)
        self._add("a rejected draft's replacement", found.residual)

    def _add(self, group: str, value: float | None) -> None:
        if value is not None:
            self._cells[group].append(value)

    def _compare_coupled(
        self, rows: Sequence[_Row], coupled: FrameResult, plain: FrameResult, plain_states: Float32
    ) -> None:
        for row, codes, expected, states in zip(rows, coupled.codes, plain.codes, plain_states, strict=True):
            self._coupled["codes"] += len(codes) - 1
            different = np.flatnonzero(codes != expected)
            if not len(different):
                continue
            depth = int(different[0])
            logits = self._predictor.target_logits(states[depth - 1 : depth], depth)[0]
            decision = Decision(
                kind="bonus", depth=depth, offset=0, draws=row.draws, target=logits, code=int(codes[depth])
            )
            self._coupled["rounding" if is_rounding(decision, self._error) else "wrong"] += 1

    def _check_rows(self, rows: Sequence[_Row], batched: FrameResult, window: int) -> None:
        """Decode the rows in another order, and one by one."""
        order = [*range(1, len(rows)), 0]
        permuted = self._decode([rows[i] for i in order], window, "rejection")
        for place, index in enumerate(order):
            self._compare_row(rows[index], batched, index, permuted, place)
        for index, row in enumerate(rows):
            self._compare_row(row, batched, index, self._decode([row], window, "rejection"), 0)

    def _compare_row(self, row: _Row, batched: FrameResult, index: int, other: FrameResult, place: int) -> None:
        self._rows["compared"] += 1
        if np.array_equal(batched.codes[index], other.codes[place]):
            return
        explained = all(self._is_explained(row, result, at) for result, at in ((batched, index), (other, place)))
        self._rows["rounding" if explained else "wrong"] += 1

    def _is_explained(self, row: _Row, result: FrameResult, at: int) -> bool:
        single = FrameResult(codes=result.codes[at : at + 1], rounds=[result.rounds[at]], window=result.window)
        return all(
            self._sampler.outcome(decision) == decision.outcome or is_rounding(decision, self._error)
            for decision in self._decisions([row], single, self._states([row], single))
        )

    # ---- the report ----

    def report(self, errors: list[str], *, judged: bool) -> dict[str, Any]:
        """Return verdict, errors, those of other checks before its own, and what each check saw.

        Unless ``judged``, what was seen is told and nothing is made of it.
        """
        tests = self._law_tests()
        if judged:
            errors = [*errors, *self._errors(tests)]
        return {
            "verdict": "fail" if errors else "pass",
            "errors": errors,
            "not_judged": [] if judged else list(POISONED),
            "law": tests if judged else {name: test | {"judged": False} for name, test in tests.items()},
            "replay": {
                "decisions": self._replay.made,
                "within_rounding": self._replay.rounding,
                "wrong": dict(self._replay.wrong),
                "example": self._replay.where or None,
            },
            "coupled": {key: self._coupled[key] for key in ("codes", "rounding", "wrong")},
            "rows": {key: self._rows[key] for key in ("compared", "rounding", "wrong")},
            "edges": dict(self._edges),
            "logit_error": self._error,
            "false_alarm": FALSE_ALARM,
            "power": POWER,
            "frames_for_variation": self._frames_needed(FALSE_ALARM / max(len(tests), 1)),
        }

    def _errors(self, tests: dict[str, dict[str, Any]]) -> list[str]:
        errors = [*self._law_errors(tests), *self._replay_errors()]
        if self._coupled["wrong"]:
            errors.append(f"coupled: {self._coupled['wrong']} frame(s) have other codes than N = 0 gives")
        if self._rows["wrong"]:
            # A sampler that is wrong elsewhere explains nothing of its rows, so nothing is said of the cause.
            cause = "" if self._replay.wrong else ": seeds or states go by the batch slot"
            errors.append(
                f"rows: {self._rows['wrong']} of {self._rows['compared']} rows have other codes alone or at another "
                f"place of the batch{cause}"
            )
        errors += [
            f"edges: a draft of {title.removesuffix(': wrong')} is decided wrongly, {count} time(s)"
            for title, count in self._edges.items()
            if title.endswith(": wrong") and count
        ]
        return errors

    def _frames_needed(self, threshold: float) -> dict[str, Any]:
        """Return how many frames find a total variation of 0.05, over all depths and at each of them."""
        sample = needed_noncentrality(threshold) / (4 * NEEDED_VARIATION**2)
        depths = self._predictor.num_code_groups - 1
        return {
            "variation": NEEDED_VARIATION,
            "all_depths": math.ceil(sample / depths),
            "each_depth": math.ceil(sample),
        }

    def _law_tests(self) -> dict[str, dict[str, Any]]:
        threshold = FALSE_ALARM / max(len(self._cells), 1)
        return {
            name: uniformity(np.array(values), shift=self._shift, threshold=threshold)
            for name, values in sorted(self._cells.items(), key=lambda item: _by_number(item[0]))
        }

    def _law_errors(self, tests: dict[str, dict[str, Any]]) -> list[str]:
        failed = [
            f"{name} (total variation {test['total_variation']:.3f}, p {test['p_value']:.0e})"
            for name, test in tests.items()
            if test["judged"] and test["p_value"] < test["threshold"]
        ]
        errors = [f"law: not that of autoregressive decoding: {'; '.join(failed)}"] if failed else []
        if self._forbidden:
            errors.append(f"law: {self._forbidden} codes have probability 0 in autoregressive decoding")
        return errors

    def _replay_errors(self) -> list[str]:
        wrong = self._replay.wrong
        if not wrong:
            return []
        names = self._replay.names()
        what = ", ".join(f"{count} {kind}" for kind, count in wrong.most_common())
        total = f"replay: {wrong.total()} of {self._replay.made} decisions are wrong ({what})"
        if not names:
            return [f"{total}; {self._replay.where}"]
        return [f"{total}: {' or: '.join(names)}"]


def _rounding_errors(rounding: dict[str, Any]) -> list[str]:
    # Written so that a NaN is an error.
    relative = rounding["relative_by_shape"]
    wrong = [shape for shape, error in relative.items() if not error <= LOGIT_LIMIT]
    if not wrong:
        return []
    return [
        f"rounding: passes of {', '.join(wrong)} rows x positions give logits that differ by up to "
        f"{rounding['largest_error']:.2g} from those of one row and one position, "
        f"{float(np.max(list(relative.values()))):.2g} of their standard deviation, which is no rounding above "
        f"{LOGIT_LIMIT}: {', '.join(POISONED)} are not judged"
    ]


def _graph_errors(graph: dict[str, float] | None) -> list[str]:
    # Written so that a NaN is an error.
    if graph is None or graph["relative_error"] <= GRAPH_TOLERANCE:
        return []
    return [
        f"graph: hidden states differ by {graph['relative_error']:.2g} of their largest magnitude from those of the "
        f"graph that the plan was built from, {GRAPH_TOLERANCE} is allowed: the plan computes something else"
    ]


def _what_differs(decision: Decision, wanted: tuple[bool | None, int]) -> str:
    if decision.accepted is None:
        return f"{decision.kind} codes"
    if decision.accepted != wanted[0]:
        return "acceptances"
    return "drafts" if decision.accepted else "residual draws"


def _in_words(outcome: tuple[bool | None, int]) -> str:
    accepted, code = outcome
    return f"code {code}" if accepted is None else f"{'accepted' if accepted else 'rejected'}, code {code}"


def _is_forbidden(decision: Decision, error: float) -> bool:
    return bool(bounds(decision.target, decision.draws.params, error).high[decision.code] == 0)


def _gap(logits: NDArray[np.floating]) -> float:
    second, first = np.partition(logits, len(logits) - 2)[-2:]
    return float(first - second)


def _by_number(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition(" ")
    return (head, int(tail)) if tail.isdigit() else (name, 0)


# ---- text -----------------------------------------------------------------------------------------------------------


def format_report(report: dict[str, Any]) -> str:
    """Return the report as text; its last line is the verdict."""
    rounding, replay, needed = report["rounding"], report["replay"], report["frames_for_variation"]
    sizes = ", ".join(map(str, report["windows"]))
    lines = [
        f"{report['frames']} frames of each mode at N = {sizes}, seed {report['seed']}, from {report['contexts']}",
        f"rounding  logits of other pass widths and batches differ by {rounding['largest_error']:.1e} at most, their "
        f"standard deviation is {rounding['logit_spread']:.2g}; {rounding['argmax_flips']} of {rounding['compared']} "
        f"argmax flips",
        f"replay    {replay['decisions']} decisions made again: {replay['within_rounding']} differ within the "
        f"rounding, {sum(replay['wrong'].values())} beyond it",
        f"coupled   {report['coupled']['codes']} codes against N = 0: {report['coupled']['rounding']} frames differ "
        f"within the rounding, {report['coupled']['wrong']} beyond it",
        _rows_line(report["rows"]),
        _edges_line(report["edges"]),
        *_graph_lines(report["graph"]),
        "law       rejection against autoregressive, total variation over 17 cells",
        *_law_lines(report["law"], told="unjudged" if report["not_judged"] else "too few"),
        f"          a correct engine fails once in {1 / report['false_alarm']:,.0f} seeds; 'found' is the variation "
        f"found with a chance of {report['power']}:",
        f"          for {needed['variation']} over all depths it takes {needed['all_depths']:,} frames, at each depth "
        f"{needed['each_depth']:,}",
    ]
    lines += [f"error     {error}" for error in report["errors"]]
    return "\n".join([*lines, f"{report['verdict'].upper()}: {_verdict(report)}"])


def _verdict(report: dict[str, Any]) -> str:
    if report["not_judged"]:
        return "this engine's passes differ by more than rounding; whether speculation changes the speech is not judged"
    changed = "nothing" if report["verdict"] == "pass" else "the speech"
    excused = 2 * report["logit_error"]
    but = f"; decisions within {excused:.2g} logits were excused as rounding" if excused > 2 * EXCUSE_TOLD else ""
    if report["verdict"] == "pass" and not any(test["judged"] for test in report["law"].values()):
        but += "; too few frames for the law by itself, every decision was checked"
    return f"speculation changes {changed} on this engine{but}"


def _graph_lines(graph: dict[str, float] | None) -> list[str]:
    if graph is None:
        return []
    return [
        f"graph     hidden states differ from the graph's on the CPU by {graph['relative_error']:.1e} of their largest "
        f"magnitude, logits by {graph['largest_logit_error']:.1e}"
    ]


def _rows_line(rows: dict[str, int]) -> str:
    if not rows["compared"]:
        return "rows      not compared: the engine takes one row, or there is one frame"
    return (
        f"rows      {rows['compared']} compared alone and permuted: {rows['rounding']} differ within the rounding, "
        f"{rows['wrong']} beyond it"
    )


def _edges_line(edges: dict[str, int]) -> str:
    met = [f"{count} of {title}" for title, count in sorted(edges.items()) if not title.endswith("wrong")]
    return f"edges     {'; '.join(met) or 'not met: rounding could decide everywhere'}"


def _law_lines(tests: dict[str, dict[str, Any]], *, told: str) -> list[str]:
    lines = [f"          {'':<32} {'sample':>7} {'variation':>9} {'noise':>6} {'found':>6} {'p':>8}"]
    for name, test in tests.items():
        verdict = f"{test['p_value']:8.2g}" if test["judged"] else told
        lines.append(
            f"          {name:<32} {test['sample']:>7} {test['total_variation']:>9.3f} {test['noise']:>6.3f} "
            f"{test['detectable']:>6.3f} {verdict:>8}"
        )
    return lines
