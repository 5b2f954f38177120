"""From requests to speech: the outer loop around Talker, CodePredictor and Code2Wav."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .codec import Code2Wav
from .config import (
    AUTO,
    SPECIAL_CODES,
    TRIAL_TEXT,
    FinishReason,
    Mode,
    SamplingParams,
    TalkerSpec,
    Window,
    checked_mode,
    with_overrides,
)
from .errors import ConfigError, CpSpecError, EngineError, NumericsError, as_engine_error, did_you_mean, out_of_memory
from .frame import CpSpecStats
from .guards import check_waveform, cut_warning, frame_limit, speech_warnings
from .inspection import check_component
from .predictor import CodePredictor
from .requests import Request, VoiceOptions, make_request
from .runtime import checked_executor, open_runtime
from .sampling import PhiloxNoise, Use
from .streaming import CHUNK_FRAMES, AudioStream, ChunkMaker, checked_chunk_frames
from .talker import Prompt, Talker, assemble_prompt, talker_law
from .text import TextTokenizer
from .turns import Turn

logger = logging.getLogger(__name__)

Float32 = NDArray[np.float32]
FrameProgress = Callable[[int], None]
VerifySize = int | Literal["auto"]
Runs = tuple[int, float, float, float]
"""Of runs: their number, and in milliseconds their total, the shortest and the longest."""

P = TypeVar("P", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """What a request was really sampled with."""

    talker: SamplingParams
    subtalker: SamplingParams
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """Return it in the keys of the input JSON."""
        return {
            "talker_temperature": self.talker.temperature,
            "talker_top_k": self.talker.top_k,
            "talker_top_p": self.talker.top_p,
            "repetition_penalty": self.talker.repetition_penalty,
            "subtalker_temperature": self.subtalker.temperature,
            "subtalker_top_k": self.subtalker.top_k,
            "subtalker_top_p": self.subtalker.top_p,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One spoken text.

    Attributes
    ----------
    waveform : ndarray, shape [n], float32
        In [-1, 1]; 1,920 samples a frame for the released codec.
    sample_rate : int
        Hz.
    codes : ndarray, shape [F, G], int32
    finish_reason : {"eos", "length"}
    max_frames : int
        Frames that it might have had.
    stats : CpSpecStats
    sampling : ResolvedSampling
    speaker : str or None
    language : str
    warnings : tuple of str
        What was asked and not done, and what is suspicious of the speech (see :mod:`~trt_cpspec.guards`).
    time_to_first_audio_ms : float or None
        Of a stream: the host's time from the beginning of the request's work to its first chunk. Else None.
    """

    waveform: Float32
    sample_rate: int
    codes: NDArray[np.int32]
    finish_reason: FinishReason
    max_frames: int
    stats: CpSpecStats
    sampling: ResolvedSampling
    speaker: str | None
    language: str
    warnings: tuple[str, ...]
    time_to_first_audio_ms: float | None = None

    @property
    def duration_ms(self) -> float:
        """Length of the waveform."""
        return 1000 * len(self.waveform) / self.sample_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """Something to speak that is known to fit the engine.

    ``if_cut`` is what to warn of where the end of speech does not come, None where the request set the length itself.
    """

    prompt: Prompt
    sampling: ResolvedSampling
    max_frames: int
    speaker: str | None
    language: str = "auto"
    warnings: tuple[str, ...] = ()
    if_cut: str | None = None


Trial = Callable[[int, int], Utterance]
"""Makes something to speak for a measurement: of a seed, and of the most frames that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(Utterance):
    """A request that is known to fit the engine: names resolved, text tokenized, defaults filled in."""

    instruct: str | None
    non_streaming_mode: bool


class TrailingText(Protocol):
    """A text that is still being written while its beginning is spoken."""

    def trailing_id(self, frame: int) -> int:
        """Return the token that joins the Talker's input after a frame, once it is written."""
        ...

    def limited(self) -> Utterance:
        """Return the utterance with the limits that follow from what is written so far."""
        ...

    def complete(self) -> None:
        """Wait until all is written."""
        ...


@dataclass(slots=True)
class StageTimes:
    """Wall-clock times of the runs of each stage, and of streams to their first audio, whatever their number.

    Attributes
    ----------
    stages : dict of str to Runs
    first_audio : Runs or None
        Of the streams; None before the first.
    """

    stages: dict[str, Runs] = field(default_factory=dict)
    first_audio: Runs | None = None

    def timed(self, stage: str, started: float) -> None:
        """Add a run that began at ``time.perf_counter() == started``."""
        self.stages[stage] = _added(self.stages.get(stage), 1000 * (time.perf_counter() - started))

    def heard(self, first_audio_ms: float) -> None:
        """Add a stream, by the time to its first audio."""
        self.first_audio = _added(self.first_audio, first_audio_ms)

    def as_profile(self) -> dict[str, Any]:
        """Return the profile object: for each stage its runs and their wall-clock times, and those of streams."""
        profile: dict[str, Any] = {
            "stages": [
                {
                    "stage_id": stage,
                    "total_runs": runs,
                    "total_time_ms": total,
                    "average_time_per_run_ms": total / runs,
                    "min_ms": least,
                    "max_ms": most,
                }
                for stage, (runs, total, least, most) in dict(self.stages).items()
            ]
        }
        if self.first_audio is not None:
            count, total, least, most = self.first_audio
            extremes = {"min_ms": least, "max_ms": most}
            profile["time_to_first_audio"] = {"count": count, "average_ms": total / count, **extremes}
        return profile


def _added(runs: Runs | None, took: float) -> Runs:
    """Return runs with one more of them."""
    count, total, least, most = runs if runs is not None else (0, 0.0, took, took)
    return count + 1, total + took, min(least, took), max(most, took)


class SpeechModel:
    """Talker, CodePredictor and codec: what speaks a prompt, be it a text's or a Thinker's answer's.

    Safe for use from several threads: batches and streams are spoken one after the other, and who comes meanwhile waits
    (the terms are those of :mod:`~trt_cpspec.turns`). The lock is the CodePredictor's, which may be used by itself
    beside it. Threads that are to speak at the same time need a model each.

    Attributes
    ----------
    lock : ModelLock
        Held while a batch or a stream is spoken.
    """

    def __init__(self, talker: Talker, predictor: CodePredictor, codec: Code2Wav) -> None:
        self.talker = talker
        self.predictor = predictor
        self.codec = codec
        self.times = StageTimes()
        self.lock = predictor.lock
        self._turn = Turn(self.lock)
        self._fastest: dict[tuple[Mode, int], dict[str, Any]] = {}
        groups = (talker.spec.num_code_groups, predictor.num_code_groups, codec.config.num_quantizers)
        codebooks = (talker.spec.decoder.vocab_size - SPECIAL_CODES, predictor.codebook_size)
        if len(set(groups)) > 1 or max(codebooks) > codec.config.codebook_size:
            raise ConfigError(
                f"talker, code_predictor and code2wav come from different checkpoints: they have {groups} code groups, "
                f"and the first two emit codes below {codebooks}, the codec knows {codec.config.codebook_size}"
            )
        if talker.spec.is_omni != codec.config.is_omni:
            raise ConfigError("talker and code2wav come from different checkpoints: one of them is of a Qwen3-Omni")

    @property
    def max_batch_size(self) -> int:
        """Rows that one batch may have."""
        return min(self.talker.spec.limits.max_batch_size, self.predictor.spec.limits.max_batch_size)

    def window(self, verify_size: int) -> Window:
        """Return the verification window of a requested size (see :meth:`CodePredictor.window`)."""
        return self.predictor.window(verify_size)

    def measure_verify_size(self, trial: Trial, mode: Mode, batch: int) -> dict[str, Any]:
        """Measure every window on a few frames of speech, once a mode and batch size, and choose.

        Parameters
        ----------
        trial : callable
            What is spoken.
        mode : {"rejection", "coupled"}
        batch : int
            Rows of a frame.

        Returns
        -------
        dict
            ``verify_size``, 0 where speculation does not pay; ``frame_ms`` of each window; ``reason`` in words.
        """
        from .bench import choose_verify_size  # noqa: PLC0415  it measures what is defined here
        from .contexts import spoken_contexts  # noqa: PLC0415

        key = (checked_mode(mode), batch)
        with self._turn:
            if key not in self._fastest:
                contexts, params = spoken_contexts(self, trial, count=6), self.talker.spec.defaults.subtalker
                choice = choose_verify_size(self.predictor, contexts, mode=key[0], batch=batch, params=params)
                logger.info("verify size: %s", choice["reason"])
                self._fastest[key] = choice
        return self._fastest[key]

    def run_batch(
        self,
        batch: Sequence[Utterance],
        *,
        window: Window,
        mode: Mode,
        progress: FrameProgress | None = None,
    ) -> list[Speech | CpSpecError]:
        """Speak a batch. A request that fails is an exception in its place; the others are not disturbed.

        Parameters
        ----------
        batch : sequence of Utterance
            At most :attr:`max_batch_size`.
        window : Window
            From :meth:`CodePredictor.window`.
        mode : {"rejection", "coupled"}
        progress : callable or None
        """
        if len(batch) > self.max_batch_size:
            raise ConfigError(f"a batch of {len(batch)} exceeds the engine's max_batch_size {self.max_batch_size}")
        rows = [_Row(request, CpSpecStats(window, mode, self.talker.spec.num_code_groups)) for request in batch]
        with self._turn:
            try:
                for spoken in self._generate(rows, window, mode):
                    if progress is not None:
                        progress(spoken)
            except (EngineError, MemoryError) as error:  # of the rows that were being spoken nothing can be said
                for row in rows:
                    if row.finish_reason is None and row.error is None:
                        row.error = as_engine_error(error)
            return [self._finished(row) for row in rows]

    def check_streaming(self, chunk_frames: int) -> None:
        """Refuse chunks that cannot be made.

        Raises
        ------
        ConfigError
            ``chunk_frames`` is no number of at least 1.
        EngineError
            The codec's engine was built before streaming.
        """
        checked_chunk_frames(chunk_frames)
        self.codec.stream()

    def chunks(
        self,
        request: Utterance,
        *,
        window: Window,
        mode: Mode,
        chunk_frames: int,
        progress: FrameProgress,
        text: TrailingText | None = None,
        started: float | None = None,
    ) -> Generator[Float32, None, Speech]:
        """Speak one utterance in chunks; :class:`~trt_cpspec.streaming.AudioStream` runs what this returns.

        Parameters
        ----------
        request : Utterance
        window : Window
            From :meth:`CodePredictor.window`.
        mode : {"rejection", "coupled"}
        chunk_frames : int
            Frames of a chunk, checked; the last one may be shorter.
        progress : callable
            Called with 1 behind each frame, and with 0 while the model is busy. What it raises ends the speech.
        text : TrailingText or None
            Where the text is still being written.
        started : float or None
            ``time.perf_counter()`` when the work on the request began; None is now.

        Yields
        ------
        ndarray, shape [n], float32
            The next samples, before the Talker's step that follows their last frame. Put together they are the
            speech's waveform. A waveform that is constant is never given out.

        Returns
        -------
        Speech

        Raises
        ------
        NumericsError, EngineError
            The speech failed, after none or some of its chunks.
        """
        with self._turn.waiting(lambda: progress(0)):
            started = time.perf_counter() if started is None else started
            row = _Row(request, CpSpecStats(window, mode, self.talker.spec.num_code_groups), text=text)
            first_audio_ms = None
            # Closed here, by the thread that opened it: an error that is kept keeps what it passed through.
            with closing(ChunkMaker(self.codec, chunk_frames, self.times.timed)) as maker:
                for last in self._last(row, window, mode, progress):
                    samples = maker.take(row.frames, last=last)
                    if not len(samples):
                        continue
                    if first_audio_ms is None:
                        first_audio_ms = 1000 * (time.perf_counter() - started)
                        self.times.heard(first_audio_ms)
                    yield samples
            if text is not None:
                text.complete()
                row.request = text.limited()
            return self._speech(row, maker.waveform(), first_audio_ms)

    def _last(self, row: _Row, window: Window, mode: Mode, progress: FrameProgress) -> Iterator[bool]:
        """Generate one row; yield False behind each frame, and True behind the last one."""
        for spoken in self._generate([row], window, mode):
            progress(spoken)
            yield False
        if row.error is not None:
            raise row.error
        yield True

    def _generate(self, rows: Sequence[_Row], window: Window, mode: Mode) -> Iterator[int]:
        """Run Talker and CodePredictor until every row has an end or an error.

        Yields the number of rows that got a frame, before the Talker's next step.
        """
        started = time.perf_counter()
        live = list(rows)
        hidden = self.talker.prefill_prompts([row.request.prompt for row in live])
        self.times.timed("talker_prefill", started)
        while live := self._sample_first_codes(live, hidden):
            kept = np.array([row.place for row in live])
            hidden = hidden[kept]
            live, embedded = self._decode_frame(live, hidden, window, mode)
            if not live:
                return
            yield len(live)
            trailing = self._trailing(live)
            started = time.perf_counter()
            kept = kept[[row.place for row in live]]
            if len(kept) < len(self.talker):
                self.talker.keep_rows(kept)
            hidden = self.talker.step(embedded + trailing)
            self.times.timed("talker_generation", started)

    def _sample_first_codes(self, live: Sequence[_Row], hidden: Float32) -> list[_Row]:
        """Sample code 0 of each row and return the rows that go on; ``row.place`` is where they stood."""
        going: list[_Row] = []
        for place, row in enumerate(live):
            row.place = place
            try:
                row.sample_first_code(self.talker, hidden[place])
            except NumericsError as error:
                row.error = error
            if row.finish_reason is None and row.error is None:
                going.append(row)
        return going

    def _decode_frame(
        self, live: list[_Row], hidden: Float32, window: Window, mode: Mode
    ) -> tuple[list[_Row], Float32]:
        """Decode the residual codes of each row; return the rows that go on and their embedded frames ``[B, H]``.

        A row whose logits fail is dropped and the frame decoded again: random numbers are a pure function of their
        address, so the others get the codes they would have got.
        """
        for place, row in enumerate(live):
            row.place = place
        while live:
            started = time.perf_counter()
            try:
                result = self.predictor.decode_frame(
                    hidden[[row.place for row in live]],
                    np.array([row.code0 for row in live], np.int32),
                    params=[row.request.sampling.subtalker for row in live],
                    seeds=[row.request.sampling.seed for row in live],
                    frames=[len(row.frames) for row in live],
                    verify_size=window.requested,
                    mode=mode,
                )
            except NumericsError as error:
                failed = live.pop(error.row)
                failed.error = NumericsError(f"frame {len(failed.frames)}: {error}")
                continue
            self.times.timed("codepredictor_generation", started)
            for row, codes, rounds in zip(live, result.codes, result.rounds, strict=True):
                row.frames.append(codes)
                row.stats.add_frame(rounds)
            return live, result.embedded if result.embedded is not None else self.predictor.embed_frame(result.codes)
        return [], np.zeros((0, self.talker.spec.decoder.hidden_size), np.float32)

    def _trailing(self, live: Sequence[_Row]) -> Float32:
        """Return the text side of the Talker's next inputs, ``[B, H]``."""
        return self.talker.embed_text(np.array([row.trailing_id(self.talker.spec) for row in live]))

    def _finished(self, row: _Row) -> Speech | CpSpecError:
        if row.error is not None:
            return row.error
        started = time.perf_counter()
        try:
            waveform = self.codec.decode(self._codes(row))
            check_waveform(waveform)
        except CpSpecError as error:
            return error
        except MemoryError as error:
            return out_of_memory(error)
        self.times.timed("code2wav", started)
        return self._speech(row, waveform)

    def _codes(self, row: _Row) -> NDArray[np.int32]:
        return np.array(row.frames, np.int32).reshape(-1, self.talker.spec.num_code_groups)

    def _speech(self, row: _Row, waveform: Float32, first_audio_ms: float | None = None) -> Speech:
        assert row.finish_reason is not None
        codes = self._codes(row)
        return Speech(
            waveform=waveform,
            sample_rate=self.codec.sample_rate,
            codes=codes,
            finish_reason=row.finish_reason,
            max_frames=row.request.max_frames,
            stats=row.stats,
            sampling=row.request.sampling,
            speaker=row.request.speaker,
            language=row.request.language,
            warnings=row.request.warnings
            + speech_warnings(
                codes,
                waveform,
                self.codec.sample_rate,
                if_cut=row.request.if_cut if row.finish_reason == "length" else None,
            ),
            time_to_first_audio_ms=first_audio_ms,
        )


class Qwen3TTS(SpeechModel):
    """Qwen3-TTS on engines that ``cpspec-build`` wrote. Make one with :meth:`from_engine_dir`.

    Safe for use from several threads, on the terms of :class:`SpeechModel`.
    """

    def __init__(self, talker: Talker, predictor: CodePredictor, codec: Code2Wav, tokenizer: TextTokenizer) -> None:
        super().__init__(talker, predictor, codec)
        self.tokenizer = tokenizer

    @classmethod
    def from_engine_dir(
        cls,
        engine_dir: Path | str | None = None,
        *,
        talker_dir: Path | str | None = None,
        code2wav_dir: Path | str | None = None,
        tokenizer_dir: Path | str | None = None,
        device: str = "auto",
        threads: int | None = None,
        executor: str = "auto",
    ) -> Qwen3TTS:
        """Load the engines of a checkpoint.

        Parameters
        ----------
        engine_dir : path
            Holds ``talker``, ``code_predictor`` and ``code2wav``.
        talker_dir : path or None
            In place of ``engine_dir``: its siblings are the other two.
        code2wav_dir, tokenizer_dir : path or None
            None is the sibling ``code2wav``, and the Talker's folder.
        device : {"auto", "cpu", "cuda"}
            ``auto`` is CUDA where every folder has a plan and a device is there.
        threads : int or None
            Threads of one pass on the CPU; None takes all cores.
        executor : {"auto", "fused", "engine"}
            What runs the CodePredictor (see :meth:`CodePredictor.from_engine_dir`).

        Raises
        ------
        ConfigError, EngineError
            A folder or file is missing, damaged, or does not fit the others.
        """
        if (engine_dir is None) == (talker_dir is None):
            raise ConfigError("give either the engine folder or the talker folder")
        talker_path = Path(talker_dir) if talker_dir is not None else Path(str(engine_dir)) / "talker"
        check_component(talker_path, "talker")
        predictor_path = talker_path.parent / "code_predictor"
        codec_path = Path(code2wav_dir) if code2wav_dir else talker_path.parent / "code2wav"
        runtime = open_runtime(
            device,
            [talker_path, predictor_path, codec_path],
            threads=threads,
            code_predictor=predictor_path,
            executor=checked_executor(executor),
        )
        return cls(
            Talker.from_engine_dir(talker_path, runtime=runtime),
            CodePredictor.from_engine_dir(predictor_path, talker_dir=talker_path, runtime=runtime, executor=executor),
            Code2Wav.from_engine_dir(codec_path, runtime=runtime),
            TextTokenizer.from_dir(Path(tokenizer_dir) if tokenizer_dir else talker_path),
        )

    @overload
    def synthesize(self, text: str, **options: Any) -> Speech: ...

    @overload
    def synthesize(self, text: Sequence[str], **options: Any) -> list[Speech]: ...

    def synthesize(
        self,
        text: str | Sequence[str],
        *,
        verify_size: VerifySize = 0,
        mode: Mode = "rejection",
        progress: FrameProgress | None = None,
        **options: Any,
    ) -> Speech | list[Speech]:
        """Speak a text, or a list of texts as batches.

        Parameters
        ----------
        text : str or sequence of str
        verify_size : int or "auto"
            0 decodes autoregressively; 2 to 8 verifies that many positions in a pass; ``auto`` is what
            :meth:`fastest_verify_size` finds.
        mode : {"rejection", "coupled"}
        progress : callable or None
            Called with the number of frames that each step of a batch added.
        **options
            Fields of :class:`~trt_cpspec.requests.Request`: ``speaker``, ``language``, ``instruct``, ``seed``,
            ``non_streaming_mode``, ``max_audio_length`` (frames), ``talker_temperature``, ``subtalker_top_k``, ...

        Returns
        -------
        Speech, or a list of them in the order of the texts

        Raises
        ------
        ConfigError
            An option or a text that cannot be used; nothing has been computed then.
        NumericsError, EngineError
            The model failed on a request.
        """
        if not isinstance(text, (str, Sequence)):
            raise ConfigError(f"text must be a string or a list of strings, it is {text!r:.80}")
        texts = [text] if isinstance(text, str) else list(text)
        requests = [make_request(item, options) for item in texts]
        prepared = [self.prepare(request) for request in requests]
        speeches = run_all(self, prepared, verify_size=verify_size, mode=mode, progress=progress)
        return speeches[0] if isinstance(text, str) else speeches

    def synthesize_stream(
        self,
        text: str,
        *,
        chunk_frames: int = CHUNK_FRAMES,
        verify_size: VerifySize = 0,
        mode: Mode = "rejection",
        progress: FrameProgress | None = None,
        **options: Any,
    ) -> AudioStream[Speech]:
        """Speak a text in chunks that come as they are made.

        Parameters
        ----------
        text : str
        chunk_frames : int
            Frames of a chunk, of 80 ms; the last one may be shorter.
        verify_size, mode, progress, **options
            As of :meth:`synthesize`. ``progress`` is called by a thread of the stream.

        Returns
        -------
        AudioStream of Speech
            The chunks put together are the waveform that :meth:`synthesize` gives.

        Raises
        ------
        ConfigError
            An option or a text that cannot be used; nothing has been computed then.
        EngineError
            The codec's engine was built before streaming.
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be a string, one stream speaks one text; it is {text!r:.80}")
        prepared = self.prepare(make_request(text, options))
        return stream_one(
            self, prepared, chunk_frames=chunk_frames, verify_size=verify_size, mode=mode, progress=progress
        )

    def stream(
        self,
        request: PreparedRequest,
        *,
        window: Window,
        mode: Mode,
        chunk_frames: int,
        progress: FrameProgress | None = None,
    ) -> AudioStream[Speech]:
        """Speak a prepared request in chunks (see :meth:`synthesize_stream`, and :meth:`run_batch` for the rest)."""
        self.check_streaming(chunk_frames)
        chunks = partial(self.chunks, request, window=window, mode=mode, chunk_frames=chunk_frames)
        return AudioStream(chunks, self.codec.sample_rate, progress, check=self._turn.check_outside)

    def fastest_verify_size(self, mode: Mode = "rejection", *, batch: int = 1) -> dict[str, Any]:
        """Measure every window, once a mode and batch size, and choose (see :meth:`measure_verify_size`)."""
        return self.measure_verify_size(self.saying(), mode, batch)

    def saying(self, text: str = TRIAL_TEXT) -> Trial:
        """Return what says a text for a measurement."""
        return lambda seed, frames: self.prepare(make_request(text, {"seed": seed, "max_audio_length": frames}))

    def prepare(self, request: Request, *, default_seed: int | None = None) -> PreparedRequest:
        """Check a request against the checkpoint and the engine, and fill in what it leaves open.

        Parameters
        ----------
        request : Request
        default_seed : int or None
            For a request without a seed; None draws one.

        Raises
        ------
        ConfigError
            An unknown speaker or language (with suggestions), or a text that does not fit the engine.
        """
        spec = self.talker.spec
        warnings = list(request.warnings)
        speaker, language = resolve_speaker(spec, request.speaker), _resolve_language(spec, request.language)
        tokens = len(self.tokenizer.text_ids(request.text))  # refuses what cannot be spoken
        if request.instruct is not None:
            self.tokenizer.check_text(request.instruct, "instruct")
        instruct_ids = self._instruct_ids(request.instruct, warnings)
        layout = request.non_streaming_mode if request.non_streaming_mode is not None else True
        prompt = assemble_prompt(
            spec,
            self.tokenizer.assistant_ids(request.text),
            instruct_ids=instruct_ids,
            speaker=speaker,
            language=language,
            non_streaming_mode=layout,
        )
        largest = int(max(prompt.text_ids.max(), prompt.trailing_text_ids.max()))
        if largest >= spec.text_vocab_size:
            raise ConfigError(
                f"the tokenizer gives the token {largest}, the Talker knows {spec.text_vocab_size}: they are of "
                f"different checkpoints"
            )
        max_frames, if_cut = resolve_max_frames(spec, len(prompt.text_ids), tokens, request.max_audio_length, warnings)
        return PreparedRequest(
            prompt=prompt,
            sampling=resolve_sampling(spec, request, default_seed),
            max_frames=max_frames,
            if_cut=if_cut,
            instruct=request.instruct if instruct_ids else None,
            non_streaming_mode=layout,
            speaker=speaker,
            language=language,
            warnings=tuple(warnings),
        )

    def _instruct_ids(self, instruct: str | None, warnings: list[str]) -> list[int]:
        """Tokenize an instruct, or drop it for the small custom voice models, which were not trained for one."""
        spec = self.talker.spec
        if instruct is None:
            return []
        # The reference tests for a substring of "0b6" (qwen_tts 0.1.1).
        if spec.tts_model_type == "custom_voice" and spec.tts_model_size in "0b6":
            warnings.append(
                f"instruct is ignored: a custom voice model of size {spec.tts_model_size} was not trained for it"
            )
            return []
        return self.tokenizer.instruct_ids(instruct)


@dataclass(slots=True)
class _Row:
    """One request while it is being spoken."""

    request: Utterance
    stats: CpSpecStats
    seen: list[int] = field(default_factory=list)
    frames: list[NDArray[np.int32]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: CpSpecError | None = None
    place: int = 0
    code0: int = 0
    text: TrailingText | None = None

    def sample_first_code(self, talker: Talker, hidden: Float32) -> None:
        """Sample the next code 0; the end of speech, or one code beyond the last frame, finishes the row."""
        frame, sampling = len(self.frames), self.request.sampling
        try:
            target = talker_law(talker.spec, talker.logits(hidden), self.seen, sampling.talker)
        except NumericsError as error:
            raise NumericsError(f"frame {frame}, depth 0: {error}") from error
        self.code0 = PhiloxNoise(sampling.seed, frame).pick(target, 0, Use.TARGET)
        self.seen.append(self.code0)
        if self.code0 == talker.spec.ids.codec_eos_token_id:
            self.finish_reason = "eos"
        elif frame == self.request.max_frames:
            self.finish_reason = "length"

    def trailing_id(self, spec: TalkerSpec) -> int:
        """Return the text token that joins the input after the last frame."""
        trailing, index = self.request.prompt.trailing_text_ids, len(self.frames) - 1
        if self.text is not None:
            token = self.text.trailing_id(index)
            self.request = self.text.limited()
            return token
        return int(trailing[index]) if index < len(trailing) else spec.ids.tts_pad_token_id


def resolve_speaker(spec: TalkerSpec, speaker: str | None) -> str | None:
    """Return a known speaker's lower-case name; without one, a custom voice model or Qwen3-Omni takes its first."""
    if speaker is None:
        return next(iter(spec.speakers), None) if spec.tts_model_type == "custom_voice" or spec.is_omni else None
    if not spec.speakers:
        raise ConfigError(f"speaker {speaker!r}: a {spec.tts_model_type} checkpoint has no speakers; use instruct")
    if speaker.lower() not in spec.speakers:
        raise ConfigError(f"unknown speaker {speaker!r}; {did_you_mean(speaker, spec.speakers)}")
    return speaker.lower()


def _resolve_language(spec: TalkerSpec, language: str | None) -> str:
    known = ["auto", *(name for name in spec.languages if "dialect" not in name)]
    if language is None:
        return "auto"
    if language.lower() not in known:
        raise ConfigError(f"unknown language {language!r}; {did_you_mean(language, known)}")
    return language.lower()


def resolve_sampling(spec: TalkerSpec, request: VoiceOptions, default_seed: int | None) -> ResolvedSampling:
    """Return what a request is spoken with; without any seed, one is drawn."""
    seed = request.seed if request.seed is not None else default_seed
    return ResolvedSampling(
        talker=with_overrides(
            spec.defaults.talker,
            temperature=request.talker_temperature,
            top_k=request.talker_top_k,
            top_p=request.talker_top_p,
            repetition_penalty=request.repetition_penalty,
        ),
        subtalker=with_overrides(
            spec.defaults.subtalker,
            temperature=request.subtalker_temperature,
            top_k=request.subtalker_top_k,
            top_p=request.subtalker_top_p,
        ),
        # 32 bits: a seed that every JSON reader can hold.
        seed=seed if seed is not None else secrets.randbits(32),
    )


def resolve_max_frames(
    spec: TalkerSpec,
    rows: int,
    tokens: int,
    asked: int | None,
    warnings: list[str],
    *,
    shorten: str = "shorten the text, give non_streaming_mode false",
) -> tuple[int, str | None]:
    """Return how many frames may be spoken behind a prefill of ``rows``, and what to warn of where they are all used.

    Without a length that was ``asked`` for, a text of so many ``tokens`` has its limit; nothing is said of speech that
    reaches a length that was. A warning is added where the engine has no room for that.

    Raises
    ------
    ConfigError
        The prefill does not fit the engine; ``shorten`` is what can be done about it.
    """
    limits = spec.limits
    if rows > limits.max_input_len:
        raise ConfigError(
            f"the text takes {rows} rows, the engine's max_input_len is {limits.max_input_len}; {shorten}, or build "
            f"with a larger --maxInputLen"
        )
    room = limits.max_kv_cache_capacity - rows
    if asked is None:
        return min(frame_limit(tokens), room), cut_warning(tokens, room)
    if asked > room:
        warnings.append(
            f"max_audio_length {asked} is limited to {room} frames by the engine's max_kv_cache_capacity "
            f"{limits.max_kv_cache_capacity}"
        )
    return min(asked, room), None


class BatchModel(Protocol[P, R_co]):
    """What runs prepared requests in batches: :class:`Qwen3TTS`, and :class:`~trt_cpspec.omni.Qwen3Omni`."""

    @property
    def max_batch_size(self) -> int:
        """Rows that one batch may have."""
        ...

    def window(self, verify_size: int) -> Window:
        """Return the verification window of a requested size."""
        ...

    def fastest_verify_size(self, mode: Mode, *, batch: int) -> dict[str, Any]:
        """Measure and choose a verify size."""
        ...

    def run_batch(
        self, batch: Sequence[P], *, window: Window, mode: Mode, progress: FrameProgress | None
    ) -> Sequence[R_co | CpSpecError]:
        """Run a batch; a request that fails is an exception in its place."""
        ...

    def stream(
        self, request: P, /, *, window: Window, mode: Mode, chunk_frames: int, progress: FrameProgress | None
    ) -> AudioStream[R_co]:
        """Run one request in chunks."""
        ...


def run_all(
    model: BatchModel[P, R],
    prepared: Sequence[P],
    *,
    verify_size: VerifySize,
    mode: Mode,
    progress: FrameProgress | None,
) -> list[R]:
    """Run prepared requests, as batches; the first that fails raises its error."""
    checked, size = checked_mode(mode), model.max_batch_size
    rows = max(1, min(size, len(prepared)))
    chosen = model.fastest_verify_size(checked, batch=rows)["verify_size"] if verify_size == AUTO else verify_size
    window = model.window(chosen)
    results: list[R] = []
    for start in range(0, len(prepared), size):
        for result in model.run_batch(prepared[start : start + size], window=window, mode=checked, progress=progress):
            if isinstance(result, CpSpecError):
                raise result
            results.append(result)
    return results


def stream_one(
    model: BatchModel[P, R],
    prepared: P,
    *,
    chunk_frames: int,
    verify_size: VerifySize,
    mode: Mode,
    progress: FrameProgress | None,
) -> AudioStream[R]:
    """Run a prepared request in chunks."""
    checked = checked_mode(mode)
    chosen = model.fastest_verify_size(checked, batch=1)["verify_size"] if verify_size == AUTO else verify_size
    window = model.window(chosen)
    return model.stream(prepared, window=window, mode=checked, chunk_frames=chunk_frames, progress=progress)
