"""From residual codes to a waveform: the codec decoder (code2wav), in chunks as the reference runs it.

An utterance may come whole or piece by piece: either way the graph's state is carried through a chunk of the reference
and begins anew where the next one does, so the waveforms differ by no more than the order of a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import MAX_CODE_GROUPS, MAX_SAMPLE_RATE, Section
from .errors import ConfigError, EngineError
from .runtime import CodecGraph, Runtime, StaticGraph

OMNI_TYPE = "qwen3_omni_code2wav"
MODEL_TYPES = ("qwen3_tts_code2wav", OMNI_TYPE)
CHUNK_FRAMES = 300
LEFT_CONTEXT_FRAMES = 25
"""The reference's ``chunked_decode(chunk_size=300, left_context_size=25)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """What the runtime must know of a codec graph.

    Attributes
    ----------
    num_quantizers : int
        Codes of a frame, ``G``.
    codebook_size : int
        Every code is below it.
    sample_rate : int
        Hertz.
    samples_per_frame : int
    max_code_len : int
        Frames that one call of the graph takes at most, context included.
    is_omni : bool
        It is a Qwen3-Omni's, not a Qwen3-TTS's.
    samples_trimmed : int
        Samples that a chunk is short of ``samples_per_frame`` a frame: the decoder of Qwen3-Omni trims its transposed
        convolutions on both sides.
    carries_state : bool
        A call goes on where the one before it ended. A graph of an earlier builder does not; it decodes, and cannot
        stream.
    """

    num_quantizers: int
    codebook_size: int
    sample_rate: int
    samples_per_frame: int
    max_code_len: int
    is_omni: bool = False
    samples_trimmed: int = 0
    carries_state: bool = False

    @classmethod
    def from_section(cls, section: Section) -> CodecConfig:
        """Read an engine folder's ``config.json``; a missing or contradictory key is a ConfigError that names it."""
        if section.text("model_type") not in MODEL_TYPES:
            raise ConfigError(
                f"{section.where}: model_type is {section.text('model_type')!r}, only {' and '.join(MODEL_TYPES)} are "
                f"supported"
            )
        codec = section.section("code2wav_config")
        factors = codec.integers("upsample_rates") + codec.integers("upsampling_ratios")
        if not factors or min(factors) < 1 or math.prod(factors) > MAX_SAMPLE_RATE:
            raise ConfigError(
                f"{codec.where}: upsample_rates and upsampling_ratios must be positive and their product, the samples "
                f"of a frame, at most {MAX_SAMPLE_RATE}"
            )
        section.require("samples_per_frame", math.prod(factors))
        return cls(
            num_quantizers=codec.integer("num_quantizers", minimum=1, maximum=MAX_CODE_GROUPS),
            codebook_size=codec.integer("codebook_size", minimum=1),
            sample_rate=section.integer("sample_rate", minimum=1, maximum=MAX_SAMPLE_RATE),
            samples_per_frame=section.integer("samples_per_frame", minimum=1),
            max_code_len=section.section("builder_config").integer("max_code_len", minimum=1),
            is_omni=section.text("model_type") == OMNI_TYPE,
            samples_trimmed=section.integer("samples_trimmed", minimum=0) if section.has("samples_trimmed") else 0,
            carries_state=section.boolean("carries_state") if section.has("carries_state") else False,
        )


class Code2Wav:
    """The codec decoder of an engine folder.

    Parameters
    ----------
    graph : CodecGraph
        ``codes [1, G, T] int32``, and ``position [1] int32`` where it carries state, to ``waveform [1, 1, samples]
        float32``.
    config : CodecConfig
    """

    def __init__(self, graph: CodecGraph, config: CodecConfig) -> None:
        self._graph = graph
        self.config = config

    @classmethod
    def from_engine_dir(cls, folder: Path, *, runtime: Runtime | None = None) -> Code2Wav:
        """Open the codec of an engine folder by its ``config.json``.

        Parameters
        ----------
        folder : Path
        runtime : Runtime or None
            Where it runs; None is the CPU.

        Raises
        ------
        ConfigError
            The config is missing, or is none of a codec.
        EngineError
            The graph is missing or cannot be loaded.
        """
        config = CodecConfig.from_section(Section.from_file(folder / "config.json"))
        graph = (runtime or Runtime()).graph(folder)
        if graph.carries_state != config.carries_state:
            raise EngineError(
                f"{folder}: the graph and config.json are of different builds (carries_state); build it again with "
                f"cpspec-build"
            )
        return cls(graph, config)

    @property
    def sample_rate(self) -> int:
        """Samples a second, in hertz."""
        return self.config.sample_rate

    @property
    def samples_per_frame(self) -> int:
        """Samples that one frame of codes becomes."""
        return self.config.samples_per_frame

    def decode(
        self, codes: NDArray[Any], *, chunk: int = CHUNK_FRAMES, left_context: int = LEFT_CONTEXT_FRAMES
    ) -> NDArray[np.float32]:
        """Decode the codes of one utterance.

        A chunk is decoded behind the ``min(left_context, start)`` frames before it, whose samples are dropped. The
        codec looks back further than that, so a chunked waveform is not quite the one of a single call; the default
        is what the reference does.

        Parameters
        ----------
        codes : ndarray, shape [F, G], any integer dtype
        chunk : int
            Frames of a chunk, at least 1.
        left_context : int
            Frames of context, at least 0.

        Returns
        -------
        ndarray, shape [F * samples_per_frame - chunks * samples_trimmed], float32
            Clipped to [-1, 1]; empty for zero frames.

        Raises
        ------
        ConfigError
            ``codes`` has another shape or dtype, or a code outside ``[0, codebook_size)``; or a chunk and its
            context exceed what the graph takes.
        EngineError
            The graph returned something that is not finite, or not of the promised shape.
        """
        return CodecStream(self, chunk, left_context).push(codes)

    def stream(self, *, chunk: int = CHUNK_FRAMES, left_context: int = LEFT_CONTEXT_FRAMES) -> CodecStream:
        """Begin an utterance whose codes come piece by piece; what comes out is what :meth:`decode` gives of them all.

        Parameters
        ----------
        chunk, left_context : int
            As of :meth:`decode`. They are no matter of the pieces, which may have any length.

        Raises
        ------
        ConfigError
            A chunk and its context exceed what the graph takes.
        EngineError
            The graph was built before it could carry its state.
        """
        if not self.config.carries_state:
            raise EngineError(
                "this codec cannot stream: its graph was built before streaming and forgets each call; build the "
                "engine folder again with cpspec-build --checkpointDir CKPT --engineDir ENG"
            )
        return CodecStream(self, chunk, left_context)

    def begin(self) -> StaticGraph:
        """Return what runs the calls of one chunk, from its first frame on."""
        return self._graph.begin() if self.config.carries_state else self._graph

    def call(self, graph: StaticGraph, frames: NDArray[np.int32], position: int) -> NDArray[np.float32]:
        """Run the graph once.

        Parameters
        ----------
        graph : StaticGraph
            From :meth:`begin`.
        frames : ndarray, shape [T, G], int32
        position : int
            Frames that it was given before.

        Returns
        -------
        ndarray, float32
            ``T * samples_per_frame`` samples, at position 0 ``samples_trimmed`` fewer. Not clipped.
        """
        feeds: dict[str, NDArray[Any]] = {"codes": np.ascontiguousarray(frames.T[None])}
        lost, rate = self.config.samples_trimmed, self.samples_per_frame
        expected = (1, 1, len(frames) * rate - lost)
        if self.config.carries_state:
            feeds["position"] = np.array([position], np.int32)
            expected = (1, 1, len(frames) * rate)
        waveform = graph.run(feeds)["waveform"]
        if waveform.shape != expected:
            raise EngineError(
                f"the codec graph returned a waveform of shape {list(waveform.shape)} for {len(frames)} frame(s), "
                f"its config promises {list(expected)}: rebuild the engine folder with cpspec-build"
            )
        # Before clipping, which would turn an infinity into a plausible sample.
        samples: NDArray[np.float32] = waveform[0, 0]
        finite = np.isfinite(samples)
        if not finite.all():
            first = position + int(np.argmin(finite)) // rate
            raise EngineError(
                f"the codec graph returned a waveform that is not finite, first in frame {first} of a chunk"
            )
        return samples[lost:] if self.config.carries_state and not position else samples

    def checked(self, codes: NDArray[Any], *, first: int = 0) -> NDArray[np.int32]:
        """Return codes as int32, or raise the ConfigError of :meth:`decode`; ``first`` is the number of the first."""
        groups, size = self.config.num_quantizers, self.config.codebook_size
        array = np.asarray(codes)
        if array.ndim != 2 or array.shape[1] != groups or not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(
                f"codes must be integers of shape [frames, {groups}], "
                f"they are {array.dtype} of shape {list(array.shape)}"
            )
        bad = np.argwhere((array < 0) | (array >= size))
        if len(bad):
            frame, depth = bad[0]
            raise ConfigError(
                f"code {array[frame, depth]} at frame {first + frame}, depth {depth} is outside the codebook, "
                f"[0, {size})"
            )
        return array.astype(np.int32)

    def check_chunk(self, chunk: int, left_context: int) -> None:
        """Refuse a chunk and a context that the graph cannot take together (see :meth:`decode`)."""
        longest = self.config.max_code_len
        if chunk < 1 or left_context < 0 or chunk + left_context > longest:
            raise ConfigError(
                f"a chunk of {chunk} frame(s) with {left_context} of left context is not possible: give at least 1 and "
                f"0, together at most {longest}, the max_code_len of the codec graph"
            )


class CodecStream:
    """The decoding of one utterance, whose codes come piece by piece. Make one with :meth:`Code2Wav.stream`.

    Parameters
    ----------
    codec : Code2Wav
    chunk, left_context : int
        Frames; see :meth:`Code2Wav.decode`.
    """

    def __init__(self, codec: Code2Wav, chunk: int, left_context: int) -> None:
        codec.check_chunk(chunk, left_context)
        self._codec, self._chunk, self._left_context = codec, chunk, left_context
        self._recent = np.zeros((0, codec.config.num_quantizers), np.int32)
        self._graph: StaticGraph | None = None
        self._position = 0
        self.frames = 0

    def push(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """Decode the next frames.

        Parameters
        ----------
        codes : ndarray, shape [F, G], any integer dtype

        Returns
        -------
        ndarray, float32
            Clipped to [-1, 1]; ``F * samples_per_frame`` samples, and ``samples_trimmed`` fewer for each chunk that
            begins among them.

        Raises
        ------
        ConfigError, EngineError
            As of :meth:`Code2Wav.decode`.
        """
        frames, rate = self._codec.checked(codes, first=self.frames), self._codec.samples_per_frame
        waveform = np.empty(len(frames) * rate, np.float32)
        written = 0
        while len(frames):
            at = self.frames % self._chunk
            part, frames = np.split(frames, [self._chunk - at])
            samples = self._decoded(part, begins=at == 0)
            np.clip(samples, -1, 1, out=waveform[written : written + len(samples)])
            written += len(samples)
        return waveform[:written]

    def close(self) -> None:
        """Free the state; no frame can come any more."""
        self._graph = None

    def _decoded(self, part: NDArray[np.int32], *, begins: bool) -> NDArray[np.float32]:
        """Decode frames of one chunk; the first ones of a chunk behind the frames before them."""
        context = self._recent if begins else self._recent[:0]
        if begins:
            self._graph, self._position = self._codec.begin(), 0
        assert self._graph is not None
        given = np.concatenate([context, part])
        samples = self._codec.call(self._graph, given, self._position)
        self._position += len(given)
        self.frames += len(part)
        known = np.concatenate([self._recent, part])
        self._recent = known[max(len(known) - self._left_context, 0) :]
        return samples[len(context) * self._codec.samples_per_frame :]
