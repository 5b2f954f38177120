"""From a portable or an Edge-LLM graph to a serialized TensorRT engine. Only this module talks to TensorRT's builder.

The binding module, ``tensorrt`` (8.6 to 11) or ``tensorrt_rtx`` (1.4 and later), is a value that every function takes;
:func:`load_binding` alone imports one. What a version can do is asked of the module itself, never of its number.

Types: where the version has strongly typed networks, the graph's own types rule. TensorRT 8.6 has none, so the same
graph's types are set there layer by layer, as precision constraints that must be obeyed: the FP32 islands of a graph
(norms, rotary angles, softmax, ``silu(gate) * up``, ``down_proj``) are where the graph says so, on every version.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from trt_cpspec.durable import write_file
from trt_cpspec.errors import ConfigError, EngineError, did_you_mean

from .external import check_files
from .profile import DYNAMIC, GraphInput, Profile, ShapeRange

logger = logging.getLogger(__name__)

BACKENDS = ("tensorrt", "tensorrt_rtx", "onnxruntime")
"""In the order in which an unnamed backend is looked for. ONNX Runtime runs the portable graph, without a plan."""

_EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}
_TITLES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}

Report = Callable[[str, "float | None"], None]
"""Called with a phase and how much of the build is done, 0 to 1; None where the version does not say."""


def _silent(phase: str, done: float | None) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine is built.

    Attributes
    ----------
    optimization_level : int or None
        0 to 5; None is the version's own default.
    workspace_mib : int or None
        Most scratch memory a layer may use, in MiB; None leaves it to the version.
    timing_cache : Path or None
        Read before and written after the build. TensorRT-RTX keeps none.
    compute_capabilities : tuple of str
        ``("8.6", "12.0")``; TensorRT-RTX only, which then builds for GPUs that are not there. Empty is its default;
        plain TensorRT always builds for the GPU at hand.
    plugin_libraries : tuple of Path
        Shared libraries with the custom operators of a graph.
    """

    optimization_level: int | None = None
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    compute_capabilities: tuple[str, ...] = ()
    plugin_libraries: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.optimization_level is not None and not 0 <= self.optimization_level <= 5:
            raise ConfigError(f"builderOptimizationLevel is {self.optimization_level}, it must be 0 to 5")
        if self.workspace_mib is not None and self.workspace_mib < 1:
            raise ConfigError(f"workspaceMiB is {self.workspace_mib}, it must be at least 1")
        for value in self.compute_capabilities:
            if not re.fullmatch(r"\d+\.\d", value):
                raise ConfigError(f"computeCapability is {value!r}; give major.minor, for example 8.6 or 12.0")
        if len(set(self.compute_capabilities)) != len(self.compute_capabilities):
            raise ConfigError(f"computeCapability names one twice: {', '.join(self.compute_capabilities)}")

    def as_json(self) -> dict[str, Any]:
        """Return the options that shape a plan, for its sidecar."""
        return {
            "optimization_level": self.optimization_level,
            "workspace_mib": self.workspace_mib,
            "plugin_libraries": [path.name for path in self.plugin_libraries],
        }


# -- bindings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What builds: ``binding`` is None for ONNX Runtime."""

    name: str
    binding: Any = None

    @property
    def title(self) -> str:
        """Name and version, for messages."""
        return "ONNX Runtime" if self.binding is None else title_of(self.binding)


def choose_backend(name: str | None = None) -> Backend:
    """Return the named backend, or the first of :data:`BACKENDS` that is installed and loads.

    Raises
    ------
    ConfigError
        The name is unknown.
    EngineError
        The named backend is not installed, or does not load.
    """
    if name is not None:
        if name not in BACKENDS:
            raise ConfigError(f"unknown backend {name!r}; {did_you_mean(name, BACKENDS)}")
        return Backend(name=name, binding=None if name == "onnxruntime" else load_binding(name))
    for candidate in _EXTRAS:
        if importlib.util.find_spec(candidate) is not None:
            try:
                return Backend(name=candidate, binding=load_binding(candidate))
            except EngineError as error:
                logger.warning("backend %s is passed over: %s", candidate, error)
    return Backend(name="onnxruntime")


def load_binding(name: str) -> Any:
    """Import ``tensorrt`` or ``tensorrt_rtx``; an EngineError says how to install it.

    Parameters
    ----------
    name : str
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # its package runs loaders of its own, which raise what they like
        raise EngineError(
            f"{_TITLES[name]} cannot be imported ({type(error).__name__}: {error}); install it with "
            f'pip install "trt_cpspec[{_EXTRAS[name]}]"'
        ) from error


def flavour_of(trt: Any) -> str:
    """Return ``tensorrt`` or ``tensorrt_rtx``."""
    return "tensorrt_rtx" if "rtx" in trt.__name__ else "tensorrt"


def title_of(trt: Any) -> str:
    """Return a binding's name and version, for messages."""
    return f"{_TITLES[flavour_of(trt)]} {trt.__version__}"


def strongly_typed(trt: Any) -> bool:
    """Return whether networks take the graph's types as they are (TensorRT 9 and later, TensorRT-RTX)."""
    members = trt.NetworkDefinitionCreationFlag.__members__
    return "STRONGLY_TYPED" in members or "FP16" not in trt.BuilderFlag.__members__


def check_precision(trt: Any, precision: str) -> None:
    """Refuse a precision that a version cannot compute.

    Raises
    ------
    EngineError
        ``bf16`` without that type, or without strongly typed networks to carry it.
    """
    if precision == "bf16" and not ("BF16" in trt.DataType.__members__ and strongly_typed(trt)):
        raise EngineError(f"precision bf16 is not possible: {title_of(trt)} has no BF16; give fp16 or fp32")


# -- graphs -----------------------------------------------------------------------------------------------------------

_PRECISIONS = ((TensorProto.BFLOAT16, "bf16"), (TensorProto.FLOAT16, "fp16"))
_FLOATS = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}


class OnnxGraph:
    """The structure of an ONNX file, without its weights.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    inputs : list of GraphInput
    outputs : tuple of str

    Raises
    ------
    EngineError
        The file is missing, or no ONNX graph.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise EngineError(f"{path} is missing: export the model to ONNX, or build from the checkpoint")
        try:
            self._model = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # protobuf's own types
            raise EngineError(f"{path} is no ONNX graph: {error}") from error
        check_files(path, self._model)
        graph = self._model.graph
        if not graph.input or not graph.output:
            raise EngineError(f"{path} is no ONNX graph: it has no inputs or no outputs")
        stored = {item.name for item in graph.initializer}
        self.inputs = [_graph_input(item) for item in graph.input if item.name not in stored]
        self.outputs = tuple(item.name for item in graph.output)

    @property
    def precision(self) -> str:
        """The narrowest float type the graph computes with: ``bf16``, ``fp16`` or ``fp32``."""
        graph = self._model.graph
        used = {item.data_type for item in graph.initializer}
        used |= {item.type.tensor_type.elem_type for item in (*graph.input, *graph.output)}
        used |= {a.i for node in graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
        return next((name for kind, name in _PRECISIONS if kind in used), "fp32")

    def operators(self) -> dict[str, tuple[int, str]]:
        """Return how often each operator occurs and the name of its first node."""
        nodes = self._model.graph.node
        counts = Counter(node.op_type for node in nodes)
        first = {node.op_type: node.name for node in reversed(nodes)}
        return {kind: (count, first[kind]) for kind, count in counts.items()}

    def float_types(self) -> dict[str, str]:
        """Return the float type of each value by name; integers and booleans are left out."""
        try:
            graph = onnx.shape_inference.infer_shapes(self._model).graph
        except Exception as error:  # its own type, and protobuf's
            raise EngineError(f"{self.path}: the types of its values cannot be inferred: {error}") from error
        types = {
            item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.value_info, *graph.output)
        }
        types |= {item.name: item.data_type for item in graph.initializer}
        return {name: _FLOATS[kind] for name, kind in types.items() if kind in _FLOATS}


def _graph_input(item: Any) -> GraphInput:
    dims = item.type.tensor_type.shape.dim
    shape = tuple(int(dim.dim_value) if dim.HasField("dim_value") else DYNAMIC for dim in dims)
    return GraphInput(item.name, shape)


# -- building ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A built engine.

    Attributes
    ----------
    content : bytes-like
    profiles : dict of str to Profile
        As the builder's own profile objects state them.
    record : dict
        Flavour, version, typing, precision, compute capabilities and options, for the sidecar.
    """

    content: Any
    profiles: dict[str, Profile]
    record: dict[str, Any]


def expected_record(trt: Any, precision: str, options: EngineOptions) -> dict[str, Any]:
    """Return what a plan's sidecar says of how it is built; equal records mean equal builds."""
    return {
        "flavour": flavour_of(trt),
        "tensorrt_version": str(trt.__version__),
        "precision": precision,
        "strongly_typed": strongly_typed(trt),
        "compute_capabilities": _target_capabilities(trt, options),
        "options": options.as_json(),
    }


def build_plan(
    trt: Any,
    graph: OnnxGraph,
    profiles: Mapping[str, Profile],
    options: EngineOptions,
    *,
    report: Report = _silent,
) -> Plan:
    """Build an engine.

    Parameters
    ----------
    trt : module
    graph : OnnxGraph
    profiles : mapping of str to Profile
        In the order of their indices.
    options : EngineOptions
    report : callable
        See :data:`Report`.

    Raises
    ------
    EngineError
        The version lacks an option or the precision, cannot read the graph (custom operators are named), or cannot
        build it. What TensorRT said is part of the message.
    """
    check_precision(trt, graph.precision)
    load_plugins(trt, options.plugin_libraries)
    record = expected_record(trt, graph.precision, options)
    log = _log_of(trt)
    log.lines.clear()
    builder = _make_builder(trt, log)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    report("reading the graph", 0.0)
    network, parser = _parse(trt, builder, log, graph)
    found = _add_profiles(trt, builder, network, config, profiles)
    cache = _set_timing_cache(config, options.timing_cache)
    content = None
    for constraints, level in _attempts(trt, config, graph, options):
        log.lines.clear()
        _set_types(trt, network, config, graph, constraints)
        if level is not None:
            config.builder_optimization_level = level
        content = _serialize(trt, builder, network, config, report)
        if content is not None:
            record |= {"constraints": constraints, "relaxed_optimization_level": level}
            break
        logger.warning("TensorRT builds nothing with the type constraints %r%s", constraints, _quoted(log))
    if content is None:
        raise EngineError(f"{title_of(trt)} cannot build the engine{_quoted(log)}")
    del parser  # the network refers to its weights until here
    if cache is not None:
        write_file(cache, bytes(config.get_timing_cache().serialize()))
    report("built", 1.0)
    return Plan(content=content, profiles=found, record=record)


def load_plugins(trt: Any, libraries: Sequence[Path]) -> None:
    """Load shared libraries that register custom operators.

    Raises
    ------
    EngineError
        A library is missing or does not load; the message is the loader's.
    """
    for path in libraries:
        if not path.is_file():
            raise EngineError(f"pluginLibrary {path} does not exist")
        try:
            handle = ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise EngineError(f"pluginLibrary {path} cannot be loaded: {error}") from error
        registry = trt.get_plugin_registry()
        # Older libraries register themselves when they are loaded; newer ones export their creators.
        if hasattr(registry, "load_library") and any(hasattr(handle, name) for name in _CREATORS):
            registry.load_library(str(path.resolve()))


_CREATORS = ("getCreators", "getPluginCreators")


def _make_builder(trt: Any, log: Any) -> Any:
    try:
        return trt.Builder(log)
    except TypeError as error:  # pybind's, for a null pointer
        hint = "" if flavour_of(trt) == "tensorrt_rtx" else "; TensorRT builds on a machine with an NVIDIA GPU only"
        raise EngineError(f"{title_of(trt)} cannot create a builder{hint}{_quoted(log)}") from error


def _parse(trt: Any, builder: Any, log: Any, graph: OnnxGraph) -> tuple[Any, Any]:
    flags = trt.NetworkDefinitionCreationFlag.__members__
    wanted = "STRONGLY_TYPED" if strongly_typed(trt) else "EXPLICIT_BATCH"
    network = builder.create_network(1 << int(flags[wanted]) if wanted in flags else 0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph.path.resolve())):
        errors = [_first_line(parser.get_error(index).desc()) for index in range(parser.num_errors)]
        raise EngineError(f"{title_of(trt)} cannot read {graph.path}: {_parse_fault(trt, parser, graph, errors)}")
    return network, parser


def _parse_fault(trt: Any, parser: Any, graph: OnnxGraph, errors: Sequence[str]) -> str:
    known = _plugin_names(trt)
    unsupported = [
        f"{kind} ({count} node(s), first {name!r})"
        for kind, (count, name) in graph.operators().items()
        if not parser.supports_operator(kind) and kind not in known
    ]
    if unsupported:
        return (
            f"unsupported operators: {', '.join(unsupported)}; name the library that has them with --pluginLibrary "
            f"FILE (Edge-LLM's is libNvInfer_edgellm_plugin.so)"
        )
    return "; ".join(errors) or "the parser gives no reason"


def _plugin_names(trt: Any) -> set[str]:
    registry = trt.get_plugin_registry()
    creators = getattr(registry, "all_creators", None) or getattr(registry, "plugin_creator_list", [])
    return {creator.name for creator in creators}


def _configure(trt: Any, config: Any, options: EngineOptions) -> None:
    flags = trt.BuilderFlag.__members__
    if "TF32" in flags:  # FP32 means FP32
        config.clear_flag(flags["TF32"])
    _share_profiles(trt, config)
    _exclude_libraries(trt, config)
    if options.optimization_level is not None:
        if not hasattr(config, "builder_optimization_level"):
            raise EngineError(f"{title_of(trt)} has no builderOptimizationLevel; leave it out")
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.timing_cache is not None and flavour_of(trt) == "tensorrt_rtx":
        raise EngineError(f"{title_of(trt)} keeps no timing cache; leave timingCache out")
    for index, name in enumerate(_capability_names(trt, options)):
        if index == 0:
            config.num_compute_capabilities = len(options.compute_capabilities)
        if not config.set_compute_capability(trt.ComputeCapability.__members__[name], index):
            raise EngineError(f"{title_of(trt)} refuses the compute capability {options.compute_capabilities[index]}")


def _share_profiles(trt: Any, config: Any) -> None:
    """Let several execution contexts use one profile, which is a preview in 8.6 and the rule from 10 on."""
    feature = getattr(getattr(trt, "PreviewFeature", None), "PROFILE_SHARING_0806", None)
    if feature is not None:
        config.set_preview_feature(feature, True)


def _exclude_libraries(trt: Any, config: Any) -> None:
    """Keep tactics of cuBLAS and cuDNN out where a version has them: plans then need TensorRT alone."""
    sources = getattr(trt, "TacticSource", None)
    members = sources.__members__ if sources is not None else {}
    if "CUBLAS" in members or "CUDNN" in members:
        own = [name for name in ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS") if name in members]
        config.set_tactic_sources(sum(1 << int(members[name]) for name in own))


def _capability_names(trt: Any, options: EngineOptions) -> list[str]:
    """Return the binding's names of the wanted compute capabilities."""
    if not options.compute_capabilities:
        return []
    if flavour_of(trt) != "tensorrt_rtx" or not hasattr(trt, "ComputeCapability"):
        raise EngineError(
            f"computeCapability is for TensorRT-RTX only: {title_of(trt)} builds for the GPU of this machine"
        )
    names = [f"SM{value.replace('.', '')}" for value in options.compute_capabilities]
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    for name, value in zip(names, options.compute_capabilities, strict=True):
        if name not in known:
            allowed = ", ".join(f"{sm[2:-1]}.{sm[-1]}" for sm in known)
            raise EngineError(f"{title_of(trt)} does not build for compute capability {value}; allowed: {allowed}")
    return names


def _target_capabilities(trt: Any, options: EngineOptions) -> list[str]:
    """Return the compute capabilities of a plan; empty is TensorRT-RTX's default set."""
    _capability_names(trt, options)
    if flavour_of(trt) == "tensorrt_rtx":
        return sorted(options.compute_capabilities, key=lambda value: tuple(map(int, value.split("."))))
    found = device_capability()
    return [found] if found else []


def device_capability() -> str | None:
    """Return the compute capability of the first GPU, as ``9.0``, or None where there is no driver or no GPU."""
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")
        device, numbers = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            return None
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        for number, attribute in zip(numbers, (75, 76), strict=True):
            if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
                return None
        return f"{numbers[0].value}.{numbers[1].value}"
    return None


def _add_profiles(
    trt: Any, builder: Any, network: Any, config: Any, profiles: Mapping[str, Profile]
) -> dict[str, Profile]:
    """Give the builder every profile and return what its own objects then say."""
    names = [network.get_input(index).name for index in range(network.num_inputs)]
    for index in range(network.num_inputs):
        if network.get_input(index).is_shape_tensor:
            raise EngineError(
                f"input {names[index]} is a shape tensor: its values, which no profile here bounds, count"
            )
    found: dict[str, Profile] = {}
    for label, profile in profiles.items():
        made = builder.create_optimization_profile()
        for name in names:
            if name not in profile:
                raise EngineError(f"profile {label} lacks input {name}")
            made.set_shape(name, profile[name].min, profile[name].opt, profile[name].max)
        found[label] = {name: ShapeRange(*(tuple(shape) for shape in made.get_shape(name))) for name in names}
        if config.add_optimization_profile(made) < 0 or found[label] != {name: profile[name] for name in names}:
            raise EngineError(f"{title_of(trt)} refuses profile {label}{_quoted(_log_of(trt))}")
    return found


def _set_timing_cache(config: Any, path: Path | None) -> Path | None:
    if path is None:
        return None
    content = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        raise EngineError(f"timingCache {path} does not fit this TensorRT and GPU: delete it, or name another file")
    return path


def _serialize(trt: Any, builder: Any, network: Any, config: Any, report: Report) -> Any:
    monitor = _watch(trt, config, report)
    if monitor is None:
        report("building (this version tells no progress)", None)
    content = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.failure is not None:
        raise monitor.failure
    return content


# -- types, where networks are not strongly typed ---------------------------------------------------------------------


_CONSTRAINTS = ("obey", "prefer", "islands")
"""How layers are held to the graph's types where networks are not strongly typed, tried in this order.

``obey``: every layer, or no engine. ``prefer``: every layer, where TensorRT has an implementation for it. ``islands``:
only the arithmetic that is FP32 in the graph, and the rest as TensorRT likes. TensorRT 8.6 finds no implementation of
some fused regions under the first.
"""


def _attempts(trt: Any, config: Any, graph: OnnxGraph, options: EngineOptions) -> list[tuple[str, int | None]]:
    """Return the constraints, and optimisation levels other than the option's, to try in turn.

    TensorRT 8.6.0 on an H200 builds no decoder above level 0 whose FP32 parts are held to FP32 without TF32, FP32
    graphs of the released size included: its fuser finds no fallback kernel there.
    """
    if strongly_typed(trt):
        return [("typed", None)]
    strict = "typed" if graph.precision == "fp32" else _CONSTRAINTS[0]
    if options.optimization_level is not None or not hasattr(config, "builder_optimization_level"):
        return [(strict, None), *((name, None) for name in _CONSTRAINTS[1:] if strict != "typed")]
    return [(strict, None), (strict, 0), *((name, 0) for name in _CONSTRAINTS[1:] if strict != "typed")]


def _set_types(trt: Any, network: Any, config: Any, graph: OnnxGraph, constraints: str) -> None:
    """Constrain layers to the graph's types, where the version has no strongly typed networks."""
    if constraints == "typed":
        return
    flags = trt.BuilderFlag.__members__
    obey, prefer = flags["OBEY_PRECISION_CONSTRAINTS"], flags["PREFER_PRECISION_CONSTRAINTS"]
    config.set_flag(flags["FP16"])
    config.clear_flag(prefer if constraints == "obey" else obey)
    config.set_flag(obey if constraints == "obey" else prefer)
    data_types = {"fp32": trt.DataType.FLOAT, "fp16": trt.DataType.HALF}
    for layer, outputs in layer_types(network, graph.float_types()):
        kinds = {kind for kind in outputs if kind is not None}
        if _type_name(layer) in _UNCONSTRAINED or not kinds:
            continue
        if constraints == "islands" and (_type_name(layer) in _MOVERS or kinds != {"fp32"}):
            layer.reset_precision()
            for index in range(len(outputs)):
                layer.reset_output_type(index)
            continue
        layer.precision = data_types["fp16" if kinds == {"fp16"} else "fp32"]
        for index, kind in enumerate(outputs):
            if kind is not None:
                layer.set_output_type(index, data_types[kind])


_UNCONSTRAINED = frozenset({"CONSTANT", "SHAPE", "CAST", "IDENTITY", "PLUGIN", "PLUGIN_V2", "PLUGIN_V3"})
"""Layers whose types are their own."""

_MOVERS = frozenset({"CONCATENATION", "GATHER", "SCATTER", "SELECT", "SHUFFLE", "SLICE", "SQUEEZE", "UNSQUEEZE"})
"""Layers that move values and compute nothing."""

_CARRIERS = frozenset(
    {
        *("ACTIVATION", "CONCATENATION", "CONVOLUTION", "DECONVOLUTION", "ELEMENTWISE", "GATHER", "MATRIX_MULTIPLY"),
        *("NORMALIZATION", "PADDING", "POOLING", "REDUCE", "SCALE", "SCATTER", "SELECT", "SHUFFLE", "SLICE", "SOFTMAX"),
        *("SQUEEZE", "UNARY", "UNSQUEEZE"),
    }
)
"""Layers whose unnamed float output has the type of their first float input."""


def layer_types(network: Any, named: Mapping[str, str]) -> list[tuple[Any, list[str | None]]]:
    """Return each layer with the float types of its outputs, None for other types.

    The parser keeps a graph's names for the values of its nodes and makes nameless ones on the way to them (a
    broadcast, a scalar); those follow their inputs.

    Parameters
    ----------
    network : INetworkDefinition
    named : mapping of str to str
        See :meth:`OnnxGraph.float_types`.
    """
    types = dict(named)
    result = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        outputs = []
        for position in range(layer.num_outputs):
            name = layer.get_output(position).name
            kind = types.get(name) or _carried(layer, position, types)
            if kind is not None:
                types[name] = kind
            outputs.append(kind)
        result.append((layer, outputs))
    return result


def _carried(layer: Any, position: int, types: Mapping[str, str]) -> str | None:
    kind = _type_name(layer)
    if kind == "CONSTANT":
        return {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}.get(layer.get_output(position).dtype.name)
    if kind not in _CARRIERS or layer.get_output(position).dtype.name in ("BOOL", "INT32", "INT64"):
        return None
    inputs = (layer.get_input(index) for index in range(layer.num_inputs))
    return next((types[item.name] for item in inputs if item is not None and item.name in types), None)


def _type_name(layer: Any) -> str:
    return str(layer.type.name)


# -- what TensorRT says -----------------------------------------------------------------------------------------------


def _watch(trt: Any, config: Any, report: Report) -> Any:
    """Attach a progress monitor where the version has them."""
    if not hasattr(trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None
    monitor = _monitor_class(trt)(report)
    config.progress_monitor = monitor
    return monitor


def _monitor_class(trt: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Feeds a callback; an exception in it (Ctrl-C is one) cancels the build and is raised afterwards."""

        def __init__(self, report: Report) -> None:
            trt.IProgressMonitor.__init__(self)
            self._progress = ProgressTree(report)
            self.failure: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._guard(self._progress.start, phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._guard(self._progress.step, phase_name, step)
            return self.failure is None

        def phase_finish(self, phase_name: str) -> None:
            self._guard(self._progress.finish, phase_name)

        def _guard(self, function: Callable[..., None], *args: Any) -> None:
            if self.failure is None:
                try:
                    function(*args)
                except BaseException as error:
                    self.failure = error

    return Monitor


class ProgressTree:
    """Turns TensorRT's nested phases into one number that never falls.

    Parameters
    ----------
    report : callable
        See :data:`Report`.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._open: dict[str, tuple[str | None, int, int]] = {}
        self._best = 0.0

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Begin a phase of so many steps, inside a step of its parent."""
        self._open[phase] = (parent, max(steps, 1), 0)
        self._tell(phase)

    def step(self, phase: str, step: int) -> None:
        """Complete step number ``step``, counted from 0."""
        if phase in self._open:
            parent, steps, _ = self._open[phase]
            self._open[phase] = (parent, steps, min(step + 1, steps))
            self._tell(phase)

    def finish(self, phase: str) -> None:
        """End a phase."""
        self._open.pop(phase, None)

    def _tell(self, phase: str) -> None:
        share, name = 0.0, phase
        for _ in range(len(self._open)):  # a phase that were its own parent would turn for ever
            parent, steps, done = self._open[name]
            share = min((done + share) / steps, 1.0)
            if parent is None or parent not in self._open:
                break
            name = parent
        self._best = max(self._best, share)
        self._report(phase, self._best)


_LOGS: dict[str, Any] = {}


def _log_of(trt: Any) -> Any:
    """Return the one log of a binding: TensorRT keeps the first that it is given for the life of the process."""
    if trt.__name__ not in _LOGS:
        _LOGS[trt.__name__] = _log_class(trt)()
    return _LOGS[trt.__name__]


def _log_class(trt: Any) -> Any:
    serious = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)

    class Log(trt.ILogger):  # type: ignore[misc]
        """Passes messages on to :mod:`logging` and keeps the errors for messages of our own."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in serious:
                self.lines.append(_first_line(message))
            logger.debug("%s: %s", severity, message)

    return Log


def _quoted(log: Any) -> str:
    """Return what TensorRT complained of, as the tail of a message."""
    return f": {'; '.join(log.lines[:5])}" if log.lines else ""


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
