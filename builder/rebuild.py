"""Plans for graphs that exist already: one component or a tree, ours or Edge-LLM's, safely and only where needed.

:func:`build_component` builds one folder's plan; ``cpspec-build`` of a checkpoint uses it too. :func:`rebuild` finds
the components of an ONNX folder and of an engine folder, and with ``only_code_predictor`` touches that one alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from trt_cpspec import __version__
from trt_cpspec.config import MAX_VERIFY_SIZE
from trt_cpspec.durable import UNFINISHED, clear_unfinished
from trt_cpspec.encoders import AUDIO_FOLDER, VISION_FOLDER
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.runtime import AUDIO_PLAN, CODEC_PLAN, DECODER_PLAN, GRAPH_FILE, VISION_PLAN

from . import sidecar
from .engine import Backend, EngineOptions, OnnxGraph, Report, build_plan, expected_record
from .profile import (
    STATELESS,
    Kind,
    Limits,
    Profile,
    Profiles,
    component_kind,
    format_table,
    profiles_for,
    profiles_from_json,
    recognise,
)

Action = Literal["built", "unchanged", "would build", "skipped"]

_DECODER_KEYS = ("max_input_len", "max_batch_size", "max_kv_cache_capacity")
_CODEC_KEYS = ("min_code_len", "opt_code_len", "max_code_len")
_KEYS = {Kind.CODEC: _CODEC_KEYS, Kind.AUDIO_ENCODER: ("max_windows",), Kind.VISION_ENCODER: ("max_patches",)}
"""The limits of a component; of every other kind they are a decoder's."""

_PLAN_OF = {
    Kind.CODEC: CODEC_PLAN,
    Kind.DECODER: DECODER_PLAN,
    Kind.CODE_PREDICTOR: DECODER_PLAN,
    Kind.AUDIO_ENCODER: AUDIO_PLAN,
    Kind.VISION_ENCODER: VISION_PLAN,
}


def _silent(phase: str, done: float | None) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """What is rebuilt, and how.

    Attributes
    ----------
    max_verify_size : int
        Positions of one CodePredictor pass for each row.
    limits : mapping of str to int
        Limits that the user named (see :class:`~.profile.Limits`); the others are those of the existing engine, else of
        the ONNX folder, else the defaults.
    engine : EngineOptions
    only_code_predictor : bool
        Rebuild the CodePredictor of an existing engine folder and leave every other file as it is.
    dry_run : bool
        Say what would be done, and write nothing.
    backup : bool
        Keep the previous plan beside the new one, with the suffix ``.bak``.
    """

    max_verify_size: int = MAX_VERIFY_SIZE
    limits: Mapping[str, int] = field(default_factory=dict)
    engine: EngineOptions = field(default_factory=EngineOptions)
    only_code_predictor: bool = False
    dry_run: bool = False
    backup: bool = True

    def __post_init__(self) -> None:
        Limits(max_verify_size=self.max_verify_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done with one component.

    Attributes
    ----------
    folder : Path
        Of the engine; of the graph where the component was skipped.
    kind : str
    action : {"built", "unchanged", "would build", "skipped"}
    reason : str
        Why.
    table : str
        The profiles before and after; empty for a skipped component.
    seconds : float
        Of the build.
    """

    folder: Path
    kind: str
    action: Action
    reason: str
    table: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line: the folder, what was done, why."""
        took = f" in {self.seconds:.1f} s" if self.action == "built" else ""
        return f"{self.folder}: {self.kind} {self.action}{took} ({self.reason})"


def rebuild(
    onnx_dir: Path | None,
    engine_dir: Path,
    backend: Backend | None,
    options: RebuildOptions,
    *,
    report: Report = _silent,
) -> list[Outcome]:
    """Build the plans of an ONNX folder into an engine folder.

    Parameters
    ----------
    onnx_dir : Path or None
        One component, or a tree of them; None takes the graphs that lie in the engine folder.
    engine_dir : Path
        One component, or a tree.
    backend : Backend or None
        None does for a dry run.
    options : RebuildOptions
    report : callable
        See :data:`~.engine.Report`.

    Returns
    -------
    list of Outcome
        One for each component found.

    Raises
    ------
    ConfigError
        A folder is missing or holds no component, or a ``config.json`` cannot be used.
    EngineError
        A component does not fit its contract, or cannot be built. What was built before it stays.
    """
    source_dir = engine_dir if onnx_dir is None else onnx_dir
    sources = _graph_folders(source_dir)
    if options.only_code_predictor:
        source, target = _code_predictor_in(sources, source_dir), _code_predictor_engine(engine_dir)
        return [build_component(source, target, backend, options, report=report)]
    outcomes = []
    for source in sources:
        config = sidecar.read_config(source)
        try:
            kind = component_kind(config, str(source / sidecar.CONFIG_FILE))
        except EngineError as error:
            if len(sources) == 1:
                raise
            outcomes.append(Outcome(folder=source, kind="component", action="skipped", reason=str(error)))
            continue
        target = source if onnx_dir is None else _target_of(source, config, kind, engine_dir, single=len(sources) == 1)
        outcomes.append(build_component(source, target, backend, options, report=report))
    return outcomes


def build_component(
    source: Path,
    target: Path,
    backend: Backend | None,
    options: RebuildOptions,
    *,
    report: Report = _silent,
) -> Outcome:
    """Build the plan of one component where it is needed, and put it and its sidecar in place.

    Parameters
    ----------
    source : Path
        Holds ``model.onnx``, ``config.json`` and side files.
    target : Path
        Receives the plan; may be ``source``.
    backend, options, report
        See :func:`rebuild`.

    Raises
    ------
    ConfigError, EngineError
        See :func:`rebuild`. The target then holds what it held.
    """
    if not options.dry_run and target.is_dir():
        sidecar.recover(target)
    job = _Job(source, target, options)
    reason = job.reason_to_build(backend)
    action: Action = "unchanged" if reason is None else "would build"
    seconds = 0.0
    if reason is not None and not options.dry_run:
        if backend is None or backend.binding is None:
            raise EngineError(
                f"{target}: a plan needs TensorRT or TensorRT-RTX, ONNX Runtime runs the graph as it is; to widen a "
                f"graph, build it again: cpspec-build --checkpointDir CKPT --engineDir ENG --maxVerifySize N"
            )
        started = time.perf_counter()
        job.build(backend.binding, report)
        action, seconds = "built", time.perf_counter() - started
    return Outcome(
        folder=target,
        kind=job.kind.value,
        action=action,
        reason=reason or job.why_unchanged,
        table=format_table(job.before, job.before if reason is None else job.profiles.profiles),
        seconds=seconds,
    )


class _Job:
    """One component's build: what is there, what is wanted, and whether they differ."""

    def __init__(self, source: Path, target: Path, options: RebuildOptions) -> None:
        self.source, self.target, self.options = source, target, options
        source_config = sidecar.read_config(source)
        self.kind = component_kind(source_config, str(source / sidecar.CONFIG_FILE))
        self.plan_name = _PLAN_OF[self.kind]
        exists = (target / sidecar.CONFIG_FILE).is_file()
        old = sidecar.read_config(target) if exists else {}
        # The folder's own config stays where only the plan is new; a component that is built anew gets the graph's.
        self.config = old if options.only_code_predictor or source == target else source_config
        self.record = sidecar.record_of(old)
        self.engine = self._engine_options(options.engine)
        self.limits = _limits(self.kind, [source_config, old], options)
        _check_capacity(self.kind, source_config, self.limits, source)
        self.graph = OnnxGraph(source / GRAPH_FILE)
        self._check_outputs()
        self.profiles = profiles_for(self.kind, self.graph.inputs, self.limits)
        self.before = self._recorded_profiles() or self._profiles(1).profiles
        self.why_unchanged = "nothing to do"

    def _engine_options(self, given: EngineOptions) -> EngineOptions:
        """Return the options, for the recorded devices where none is named: a rebuild must not change the target."""
        if given.compute_capabilities or self.record.get("flavour") != "tensorrt_rtx":
            return given
        recorded = self.record.get("compute_capabilities")
        known = tuple(map(str, recorded)) if isinstance(recorded, list) else ()
        try:
            return replace(given, compute_capabilities=known)
        except ConfigError as error:
            raise ConfigError(f"{self.target / sidecar.CONFIG_FILE}: {error}") from error

    def _profiles(self, verify_size: int) -> Profiles:
        limits = _replaced(self.limits, max_verify_size=verify_size)
        return profiles_for(self.kind, self.graph.inputs, limits)

    def _check_outputs(self) -> None:
        """Refuse a decoder that does not give every row's hidden state."""
        if self.kind is Kind.CODE_PREDICTOR and "hidden_states" not in self.graph.outputs:
            recognise(self.graph.inputs)  # the older contract has a better reason
            raise EngineError(
                f"{self.graph.path}: a CodePredictor must give hidden_states, its outputs are "
                f"{', '.join(self.graph.outputs)}; export it again"
            )

    def _recorded_profiles(self) -> dict[str, Profile]:
        try:
            return profiles_from_json(self.record.get("profiles", []))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return {}

    def reason_to_build(self, backend: Backend | None) -> str | None:
        """Say why the plan must be built; None where the one in place serves."""
        if (self.target / UNFINISHED).exists():
            return "an earlier build was stopped while it put its files in place"
        if not (self.target / self.plan_name).is_file():
            return "there is no plan yet"
        if not self.record:
            return "config.json does not say how its plan was built"
        fault = sidecar.plan_fault(self.target, self.plan_name, {"builder_config": {sidecar.RECORD: self.record}})
        return fault or self._changed_build(backend) or self._changed_inputs() or self._changed_profiles()

    def _width_fault(self, width: int) -> str | None:
        wanted = self.limits.max_verify_size
        if self.kind is Kind.CODE_PREDICTOR and width < wanted:
            return f"it takes {width} position(s) a pass, {wanted} are wanted"
        if self.kind is Kind.CODE_PREDICTOR:
            self.why_unchanged = f"it takes {width} position(s) a pass, {wanted} are wanted: nothing to do"
        return None

    def _changed_build(self, backend: Backend | None) -> str | None:
        if backend is None or backend.binding is None:
            return None
        wanted = expected_record(backend.binding, self.graph.precision, self.engine)
        for key, value in wanted.items():
            if self.record.get(key) != value:
                return f"{key} was {self.record.get(key)!r}, it is now {value!r}"
        return None

    def _changed_inputs(self) -> str | None:
        hashes = {"graph": sidecar.graph_hashes(self.source), "side_files": self._side_hashes()}
        for key, value in hashes.items():
            recorded = self.record.get(key)
            if recorded != value:
                old = recorded if isinstance(recorded, dict) else {}
                names = sorted(n for n in old.keys() | value.keys() if old.get(n) != value.get(n))
                return f"{key.replace('_', ' ')} changed: {', '.join(names)}"
        return None

    def _side_hashes(self) -> dict[str, str]:
        # With only_code_predictor the engine folder's own files count: they stay.
        folder = self.target if self.options.only_code_predictor else self.source
        return sidecar.hashes_of(sidecar.side_files(folder))

    def _changed_profiles(self) -> str | None:
        recorded = self._recorded_profiles()
        if self.kind is Kind.CODE_PREDICTOR:
            width = self.record.get("verify_size")
            if not isinstance(width, int):
                return "its verify_size is not recorded"
            fault = self._width_fault(width)
            if fault is not None:
                return fault
            return None if recorded == self._profiles(width).profiles else "its limits changed"
        return None if recorded == self.profiles.profiles else "its limits changed"

    def build(self, trt: Any, report: Report) -> None:
        """Build the plan, copy what goes with it, and install."""
        self._check_same_model()
        plan = build_plan(trt, self.graph, self.profiles.profiles, self.engine, report=report)
        report("writing", None)
        self.target.mkdir(parents=True, exist_ok=True)
        if not self.options.only_code_predictor and self.source != self.target:
            sidecar.replace_files(sidecar.side_files(self.source), self.target)
        built = Profiles(contract=self.profiles.contract, profiles=plan.profiles)
        record = {
            "builder": f"trt_cpspec {__version__}",
            **plan.record,
            "contract": built.contract.value,
            "verify_size": self._verify_size(built),
            "profiles": built.as_json(),
            "plan": sidecar.plan_record(self.plan_name, plan.content),
            "graph": sidecar.graph_hashes(self.source),
            "side_files": sidecar.hashes_of(sidecar.side_files(self.target)),
        }
        config = sidecar.with_record(self.config, self._limit_keys(), record)
        sidecar.install(self.target, self.plan_name, plan.content, config, backup=self.options.backup)
        clear_unfinished(self.target)

    def _verify_size(self, built: Profiles) -> int | None:
        return built.verify_size(self.limits.max_batch_size) if self.kind is Kind.CODE_PREDICTOR else None

    def _limit_keys(self) -> dict[str, int]:
        keys = _KEYS.get(self.kind, _DECODER_KEYS)
        limits = {key: getattr(self.limits, key) for key in keys}
        if self.kind is Kind.CODE_PREDICTOR:
            limits["max_verify_size"] = self.limits.max_verify_size
        if self.limits.max_kv_pool_pages:
            limits["max_kv_pool_pages"] = self.limits.max_kv_pool_pages
        return limits

    def _check_same_model(self) -> None:
        """Refuse a graph whose side files are not the engine folder's: it would speak with another model's heads."""
        if not self.options.only_code_predictor or self.source == self.target:
            return
        for path in sidecar.side_files(self.source):
            other = self.target / path.name
            if other.is_file() and sidecar.sha256_of(path) != sidecar.sha256_of(other):
                raise EngineError(
                    f"{path} differs from {other}: the graph belongs to another model than the engine folder; build "
                    f"the whole folder without --onlyCodePredictor"
                )


def _limits(kind: Kind, configs: Sequence[Mapping[str, Any]], options: RebuildOptions) -> Limits:
    """Merge limits: defaults, the graph's config, the existing engine's, the user's."""
    values: dict[str, Any] = {}
    names = {item.name for item in fields(Limits)} - {"max_verify_size"}
    for config in configs:
        values |= {key: value for key, value in config.get("builder_config", {}).items() if key in names}
    values |= options.limits
    if kind is Kind.CODE_PREDICTOR:
        values["max_verify_size"] = options.max_verify_size
    return Limits(**values)


def _replaced(limits: Limits, **changes: int) -> Limits:
    return Limits(**{item.name: getattr(limits, item.name) for item in fields(Limits)} | changes)


def _check_capacity(kind: Kind, config: Mapping[str, Any], limits: Limits, folder: Path) -> None:
    groups = config.get("num_code_groups")
    if kind is Kind.CODE_PREDICTOR and isinstance(groups, int) and limits.max_kv_cache_capacity < groups:
        raise ConfigError(
            f"{folder}: max_kv_cache_capacity {limits.max_kv_cache_capacity} cannot hold a frame, which takes "
            f"num_code_groups {groups} positions"
        )


# -- folders -----------------------------------------------------------------------------------------------------------


def _component_folders(root: Path) -> list[Path]:
    """Return every folder at or below ``root`` that has a ``config.json`` and is not under construction."""
    found = [path.parent for path in sorted(root.rglob(sidecar.CONFIG_FILE))]
    return [folder for folder in found if not any(part.startswith(".") for part in folder.relative_to(root).parts)]


def _graph_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise ConfigError(f"the ONNX folder {root} does not exist")
    found = [folder for folder in _component_folders(root) if (folder / GRAPH_FILE).is_file()]
    if not found:
        raise ConfigError(
            f"{root} holds no component: none of its folders has both {GRAPH_FILE} and {sidecar.CONFIG_FILE}"
        )
    return found


def _is_code_predictor(folder: Path) -> bool:
    try:
        return component_kind(sidecar.read_config(folder), str(folder)) is Kind.CODE_PREDICTOR
    except EngineError:
        return False


def _code_predictor_in(folders: Sequence[Path], root: Path) -> Path:
    """Return the one CodePredictor among some folders."""
    found = [folder for folder in folders if _is_code_predictor(folder)]
    if len(found) != 1:
        listed = ", ".join(map(str, found or folders)) or "no component at all"
        raise ConfigError(
            f"{root} must hold exactly one CodePredictor (config.json: model ends with _code_predictor), it holds "
            f"{len(found)}: {listed}"
        )
    return found[0]


def _code_predictor_engine(engine_dir: Path) -> Path:
    if not engine_dir.is_dir():
        raise ConfigError(
            f"the engine folder {engine_dir} does not exist: --onlyCodePredictor rebuilds inside an existing one"
        )
    return _code_predictor_in(_component_folders(engine_dir), engine_dir)


def _target_of(source: Path, config: Mapping[str, Any], kind: Kind, engine_dir: Path, *, single: bool) -> Path:
    """Return the engine folder of a component: where its like lies already, else by the layout's names."""
    there = _component_folders(engine_dir) if engine_dir.is_dir() else []
    identity = (config.get("model"), config.get("model_type"))
    alike = []
    for folder in there:
        other = sidecar.read_config(folder)
        if (other.get("model"), other.get("model_type")) == identity:
            alike.append(folder)
    if len(alike) == 1:
        return alike[0]
    if single and not there:
        return engine_dir
    return engine_dir / _layout_name(source, config, kind)


def _layout_name(source: Path, config: Mapping[str, Any], kind: Kind) -> str:
    if kind is Kind.CODE_PREDICTOR:
        return "code_predictor"
    if kind is Kind.CODEC:
        # Qwen3-Omni's lies deeper, here and in Edge-LLM's exports; model_type is the same for both families there.
        return "multimodal/code2wav" if source.parent.name in ("multimodal", "audio") else "code2wav"
    if kind in STATELESS:
        return f"multimodal/{AUDIO_FOLDER if kind is Kind.AUDIO_ENCODER else VISION_FOLDER}"
    return "talker" if "talker" in str(config.get("model")) else source.name
