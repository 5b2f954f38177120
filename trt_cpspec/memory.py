"""How much memory engines take, before any of it is taken: from their config.json and the sizes of their files.

Weights and KV caches are exact. The workspace is an estimate from the widths of the layers: what a plan really asks for
is known when it is opened, and compared with the free memory of the device then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .codec import CHUNK_FRAMES, LEFT_CONTEXT_FRAMES, CodecConfig
from .config import CodePredictorSpec, DecoderSpec, EngineLimits, Section, TalkerSpec, ThinkerSpec, checked_verify_size
from .encoders import AUDIO_TYPE, VISION_TYPE
from .errors import ConfigError
from .inspection import component_folders, component_kind
from .runtime import plan_sizes
from .session import PREFILL_CHUNK, SCRATCH_SLOTS, bucket_for
from .tensorfile import GRAPH_DATA_FILE

_FLOAT_BYTES = 4
_LIVE_STAGES = 3
"""Arrays of a stage of the codec that live at the same time: what comes in, what goes out, and one between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one component takes, in bytes.

    Attributes
    ----------
    folder : str
    place : {"GPU", "CPU"}
        Where it runs: on a GPU where it has a plan.
    weights_bytes : int
        The plan, or the graph's weights as they are computed with, and the tables beside them.
    kv_cache_bytes : int
        Of every row, at the longest; of the codec, what an utterance carries from call to call, before and behind one.
    workspace_bytes : int
        Of one pass: activations, inputs and outputs. An estimate.
    """

    folder: str
    place: str
    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes


def memory_needed(engine_dir: Path, *, batch: int | None = None, verify_size: int | None = None) -> list[Need]:
    """Return what each component of an engine folder takes.

    Parameters
    ----------
    engine_dir : Path
    batch : int or None
        Rows that are spoken together; None is 1.
    verify_size : int or None
        Positions of a verify pass, 0 for none; None is the widest of the engine.

    Raises
    ------
    ConfigError, EngineError
        A folder is no engine, or the batch is larger than it takes.
    """
    if verify_size is not None:
        checked_verify_size(verify_size)
    readers = {
        "talker": _talker,
        "thinker": _thinker,
        "code predictor": _predictor,
        "codec decoder": _codec,
        AUDIO_TYPE: _audio_encoder,
        VISION_TYPE: _vision_encoder,
    }
    needs = []
    for folder in component_folders(engine_dir):
        section = Section.from_file(folder / "config.json")
        kind = component_kind(section)
        reader = readers.get(str(section.values.get("model_type")) if kind == "encoder" else kind)
        if reader is not None:
            name = folder.resolve().name if folder == engine_dir else str(folder.relative_to(engine_dir))
            needs.append(reader(folder, name, section, batch or 1, verify_size))
    if not needs:
        raise ConfigError(f"{engine_dir} holds no component that takes memory: build one with cpspec-build")
    return needs


def describe_memory(needs: Sequence[Need]) -> dict[str, Any]:
    """Return the needs and their totals for each place, as JSON has them."""
    entries = [asdict(need) | {"total_bytes": need.total_bytes} for need in needs]
    places = dict.fromkeys(need.place for need in needs)
    totals = {place: sum(need.total_bytes for need in needs if need.place == place) for place in places}
    return {"components": entries, "total_bytes": totals}


def format_memory(needs: Sequence[Need]) -> str:
    """Return the needs as a table, with a total for each place."""
    head = ("component", "place", "weights", "KV cache", "workspace", "total")
    rows = [head, *(_row(need.folder, need.place, [need]) for need in needs)]
    for place in dict.fromkeys(need.place for need in needs):
        rows.append(_row("total", place, [need for need in needs if need.place == place]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(name: str, place: str, needs: Sequence[Need]) -> tuple[str, ...]:
    parts = ("weights_bytes", "kv_cache_bytes", "workspace_bytes", "total_bytes")
    return (name, place, *(megabytes(sum(getattr(need, part) for need in needs)) for part in parts))


def megabytes(nbytes: int) -> str:
    """Return a size for a message, in MB of a million bytes."""
    return f"{nbytes / 1e6:,.1f} MB"


def _talker(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    spec = TalkerSpec.from_section(section)
    return _decoder(folder, name, section, spec.decoder, spec.limits, batch)


def _thinker(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    spec = ThinkerSpec.from_section(section)
    return _decoder(folder, name, section, spec.decoder, spec.limits, batch)


def _predictor(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    spec = CodePredictorSpec.from_section(section)
    _check_batch(folder, batch, spec.limits)
    on_gpu, d = _on_gpu(folder), spec.decoder
    width = spec.max_verify_size if verify_size is None else max(verify_size, 1)
    slots = bucket_for(
        spec.num_code_groups + spec.max_verify_size + SCRATCH_SLOTS, spec.limits.max_kv_cache_capacity + SCRATCH_SLOTS
    )
    # Of a frame on the device: the logits of a pass, and the laws of targets and drafts.
    laws = 3 * batch * width * d.vocab_size * _FLOAT_BYTES
    depths = spec.num_code_groups - 1
    heads = _size(folder / "lm_heads.safetensors") if on_gpu else depths * d.vocab_size * d.hidden_size * _FLOAT_BYTES
    # A GPU has the Talker's embedding beside it; on a CPU it is the Talker's own, mapped once.
    tables = (
        heads + _size(folder / "codec_embeddings.safetensors") + _size(folder / "small_to_mtp_projection.safetensors")
    )
    tables += _size(folder.parent / "talker" / "embedding.safetensors") if on_gpu else 0
    return Need(
        folder=name,
        place=_place(folder),
        weights_bytes=_weights(folder, section) + tables,
        kv_cache_bytes=_cache(d, batch, slots),
        workspace_bytes=_pass(d, batch, max(width, 2), slots) + (laws if on_gpu else 0),
    )


def _decoder(folder: Path, name: str, section: Section, spec: DecoderSpec, limits: EngineLimits, batch: int) -> Need:
    _check_batch(folder, batch, limits)
    on_gpu, slots = _on_gpu(folder), limits.max_kv_cache_capacity + SCRATCH_SLOTS
    tables = sum(_size(path) for path in folder.glob("*.safetensors")) if not on_gpu else 0
    # A plan's workspace is that of the largest pass which it admits.
    rows = limits.max_batch_size if on_gpu else batch
    return Need(
        folder=name,
        place=_place(folder),
        weights_bytes=_weights(folder, section) + tables,
        kv_cache_bytes=_cache(spec, batch, slots),
        workspace_bytes=_pass(spec, rows, min(limits.max_input_len, PREFILL_CHUNK), slots),
    )


def _codec(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    config, codec = CodecConfig.from_section(section), section.section("code2wav_config")
    frames = config.max_code_len if _on_gpu(folder) else CHUNK_FRAMES + LEFT_CONTEXT_FRAMES
    length = min(frames, config.max_code_len)
    channels = codec.integer("decoder_dim", minimum=1)
    largest = 0
    for rate in codec.integers("upsampling_ratios"):
        length *= rate
    for rate in codec.integers("upsample_rates"):
        length, channels = length * rate, max(channels // 2, 1)
        largest = max(largest, length * channels)
    return Need(
        folder=name,
        place=_place(folder),
        weights_bytes=_weights(folder, section),
        kv_cache_bytes=2 * _FLOAT_BYTES * (section.integer("state_values", minimum=0) if config.carries_state else 0),
        workspace_bytes=_LIVE_STAGES * largest * _FLOAT_BYTES,
    )


def _audio_encoder(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    sizes, windows = (
        section.section("audio_config"),
        section.section("builder_config").integer("max_windows", minimum=1),
    )
    width, bins, channels = (
        sizes.integer(key, minimum=1) for key in ("d_model", "num_mel_bins", "downsample_hidden_size")
    )
    chunks, frames = section.integer("window_chunks", minimum=1), section.integer("chunk_frames", minimum=1)
    length = chunks * section.integer("chunk_rows", minimum=1)
    layer = _layer(
        windows * length,
        length,
        width=width,
        attention=3 * width,
        inner=sizes.integer("encoder_ffn_dim", minimum=1),
        heads=sizes.integer("encoder_attention_heads", minimum=1),
    )
    # The first convolution halves both sides.
    convolved = _LIVE_STAGES * windows * chunks * channels * (bins + 1) // 2 * (frames + 1) // 2 * _FLOAT_BYTES
    return _encoder(folder, name, section, max(layer, convolved))


def _vision_encoder(folder: Path, name: str, section: Section, batch: int, verify_size: int | None) -> Need:
    sizes, patches = (
        section.section("vision_config"),
        section.section("builder_config").integer("max_patches", minimum=1),
    )
    width = sizes.integer("hidden_size", minimum=1)
    layer = _layer(
        patches,
        patches,
        width=width,
        attention=3 * width,
        inner=sizes.integer("intermediate_size", minimum=1),
        heads=sizes.integer("num_heads", minimum=1),
    )
    return _encoder(folder, name, section, layer)


def _encoder(folder: Path, name: str, section: Section, workspace: int) -> Need:
    return Need(
        folder=name,
        place=_place(folder),
        weights_bytes=_weights(folder, section),
        kv_cache_bytes=0,
        workspace_bytes=workspace,
    )


def _check_batch(folder: Path, batch: int, limits: EngineLimits) -> None:
    if not 1 <= batch <= limits.max_batch_size:
        raise ConfigError(f"{folder} takes batches of 1 to {limits.max_batch_size} (max_batch_size), not {batch}")


def _cache(spec: DecoderSpec, batch: int, slots: int) -> int:
    """Return the bytes of keys and values, which are FP32."""
    return 2 * spec.num_hidden_layers * batch * spec.num_key_value_heads * slots * spec.head_dim * _FLOAT_BYTES


def _pass(spec: DecoderSpec, batch: int, length: int, slots: int) -> int:
    """Estimate what one pass takes."""
    return _layer(
        batch * length,
        slots,
        width=spec.hidden_size,
        attention=(spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim,
        inner=spec.intermediate_size,
        heads=spec.num_attention_heads,
    )


def _layer(rows: int, keys: int, *, width: int, attention: int, inner: int, heads: int) -> int:
    """Estimate what a layer takes: its widest arrays, and the scores of its attention twice."""
    return rows * (4 * width + attention + 3 * inner + 2 * heads * keys) * _FLOAT_BYTES


def _weights(folder: Path, section: Section) -> int:
    """Return the bytes of the weights: of the plan, or of the graph, whose 16-bit weights a CPU widens."""
    if _on_gpu(folder):
        return plan_sizes([folder])[folder]
    stored = _size(folder / GRAPH_DATA_FILE)
    return stored if section.values.get("precision") in (None, "fp32") else 2 * stored


def _on_gpu(folder: Path) -> bool:
    return bool(plan_sizes([folder])[folder])


def _place(folder: Path) -> str:
    return "GPU" if _on_gpu(folder) else "CPU"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
