"""From conversations to spoken answers: the Thinker, then what speaks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .chat import ChatTokenizer
from .codec import Code2Wav
from .config import (
    TRIAL_TEXT,
    FinishReason,
    Mode,
    SamplingParams,
    TalkerSpec,
    Window,
    checked_verify_size,
    with_overrides,
)
from .encoders import AUDIO_FOLDER, VISION_FOLDER, Encoders
from .errors import ConfigError, CpSpecError, EngineError, SpeechError, as_engine_error, out_of_memory
from .frame import CpSpecStats
from .inspection import check_component
from .multimodal import Media, encode_media, expanded, read_media, rotary_positions
from .pipeline import (
    Float32,
    FrameProgress,
    Speech,
    SpeechModel,
    StageTimes,
    Trial,
    Utterance,
    VerifySize,
    resolve_max_frames,
    resolve_sampling,
    resolve_speaker,
    run_all,
    stream_one,
)
from .predictor import CodePredictor
from .requests import ChatRequest, make_chat
from .runtime import checked_executor, open_runtime
from .streaming import CHUNK_FRAMES, PREFILL_THRESHOLD, AudioStream
from .talker import ANSWER_ROWS, Prompt, PromptMedia, Talker, assemble_answer_prompt
from .thinker import Answer, Thinker
from .turns import ModelLock, Turn

DEFAULT_PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)
DEFAULT_MAX_TOKENS = 256
"""What Edge-LLM's input format says of a request without these keys (Hugging Face's ``generate`` takes the argmax)."""

Conversation = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
        The token that ended the answer is among them.
    finish_reason : {"eos", "length"}
        Of the text; ``speech.finish_reason`` is that of the sound.
    speech : Speech or None
        None for a model without the engines of speech.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    speech: Speech | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A conversation that is known to fit the engines.

    Attributes
    ----------
    prompt : str
        As the chat template renders it.
    prompt_ids : tuple of int
        With a token for each row of a clip or an image.
    params : SamplingParams
        The Thinker's.
    seed : int
    max_tokens : int
    voice : Utterance or None
        How the answer will be spoken. Its prompt holds one token in the answer's place, which has yet to come.
    warnings : tuple of str
        What was asked and will not be done.
    media : Media or None
        The audio and the images of the conversation.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    voice: Utterance | None
    warnings: tuple[str, ...]
    media: Media | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """What the request is sampled with, in the keys of the input JSON."""
        thinker = {name: getattr(self.params, name) for name in ("temperature", "top_k", "top_p")}
        return thinker | (self.voice.sampling.as_dict() if self.voice is not None else {"seed": self.seed})


class Qwen3Omni:
    """Qwen3-Omni on engines that ``cpspec-build`` wrote. Make one with :meth:`from_engine_dir`.

    Safe for use from several threads: batches and streams are answered and spoken one after the other (see
    :class:`~trt_cpspec.pipeline.SpeechModel`, whose lock it shares).
    """

    def __init__(
        self,
        thinker: Thinker,
        tokenizer: ChatTokenizer,
        voice: SpeechModel | None,
        encoders: Encoders | None = None,
    ) -> None:
        self.thinker = thinker
        self.encoders = encoders
        self.tokenizer = tokenizer
        self.voice = voice
        self.times = voice.times if voice is not None else StageTimes()
        self._turn = Turn(voice.lock if voice is not None else encoders.lock if encoders is not None else ModelLock())

    @classmethod
    def from_engine_dir(
        cls,
        engine_dir: Path | str | None = None,
        *,
        thinker_dir: Path | str | None = None,
        talker_dir: Path | str | None = None,
        code2wav_dir: Path | str | None = None,
        multimodal_dir: Path | str | None = None,
        tokenizer_dir: Path | str | None = None,
        audio: bool = True,
        device: str = "auto",
        threads: int | None = None,
        executor: str = "auto",
    ) -> Qwen3Omni:
        """Load the engines of a checkpoint.

        Parameters
        ----------
        engine_dir : path
            Holds ``thinker``, ``talker``, ``code_predictor`` and ``multimodal/code2wav``; and ``multimodal/audio`` and
            ``multimodal/visual``, each of which is opened for the first conversation that needs it.
        thinker_dir : path or None
            In place of ``engine_dir``, whose place its parent takes.
        talker_dir : path or None
            None is the sibling of the Thinker; ``code_predictor`` is the Talker's.
        code2wav_dir, tokenizer_dir : path or None
            None is ``multimodal/code2wav`` beside the Talker, and the Thinker's folder.
        multimodal_dir : path or None
            Holds the encoders; None is ``multimodal`` beside the Thinker.
        audio : bool
            False loads the Thinker alone: answers are text.
        device, threads, executor
            As of :meth:`Qwen3TTS.from_engine_dir`.

        Raises
        ------
        ConfigError, EngineError
            A folder or file is missing, damaged, or does not fit the others.
        """
        if (engine_dir is None) == (thinker_dir is None):
            raise ConfigError("give either the engine folder or the thinker folder")
        thinker_path = Path(thinker_dir) if thinker_dir is not None else Path(str(engine_dir)) / "thinker"
        check_component(thinker_path, "thinker")
        folders, predictor_path = [thinker_path], None
        if audio:
            talker_path = Path(talker_dir) if talker_dir is not None else thinker_path.parent / "talker"
            check_component(talker_path, "talker")
            beside = talker_path.parent
            codec_path = Path(code2wav_dir) if code2wav_dir is not None else beside / "multimodal" / "code2wav"
            check_component(codec_path, "code2wav")
            predictor_path = beside / "code_predictor"
            folders += [talker_path, predictor_path, codec_path]
        multimodal = Path(multimodal_dir) if multimodal_dir is not None else thinker_path.parent / "multimodal"
        encoders = [multimodal / name for name in (AUDIO_FOLDER, VISION_FOLDER)]
        folders += [folder for folder in encoders if (folder / "config.json").is_file()]
        checked_executor(executor)
        runtime = open_runtime(device, folders, threads=threads, code_predictor=predictor_path, executor=executor)
        voice = None
        if predictor_path is not None:
            voice = SpeechModel(
                Talker.from_engine_dir(talker_path, thinker_dir=thinker_path, runtime=runtime),
                CodePredictor.from_engine_dir(
                    predictor_path, talker_dir=talker_path, runtime=runtime, executor=executor
                ),
                Code2Wav.from_engine_dir(codec_path, runtime=runtime),
            )
        thinker = Thinker.from_engine_dir(thinker_path, runtime=runtime)
        return cls(
            thinker,
            ChatTokenizer.from_dir(Path(tokenizer_dir) if tokenizer_dir is not None else thinker_path),
            voice,
            Encoders(
                lock=voice.lock if voice is not None else ModelLock(),
                folder=multimodal,
                runtime=runtime,
                hidden_size=thinker.spec.decoder.hidden_size,
                num_deepstack_features=thinker.spec.num_deepstack_features,
            ),
        )

    def respond(self, conversation: Conversation, **options: Any) -> Reply:
        """Answer one conversation; parameters and errors are those of :meth:`respond_all`."""
        return self.respond_all([conversation], **options)[0]

    def respond_all(
        self,
        conversations: Sequence[Conversation],
        *,
        verify_size: VerifySize = 0,
        mode: Mode = "rejection",
        progress: FrameProgress | None = None,
        **options: Any,
    ) -> list[Reply]:
        """Answer conversations, as batches.

        Parameters
        ----------
        conversations : sequence
            Each a list of messages (``role``: system, user or assistant; ``content``: a text, or a list of parts, see
            :class:`~trt_cpspec.requests.ChatRequest`), or a text, which is a user's.
        verify_size : int or "auto"
            0 decodes autoregressively; 2 to 8 verifies that many positions in a pass of the CodePredictor; ``auto`` is
            what :meth:`fastest_verify_size` finds.
        mode : {"rejection", "coupled"}
        progress : callable or None
            Called with the number of frames that each step of a batch added: 0 for a step of the Thinker.
        **options
            Fields of :class:`~trt_cpspec.requests.ChatRequest`: ``speaker``, ``seed``, ``temperature``, ``top_k``,
            ``top_p``, ``max_generate_length`` (tokens), ``max_audio_length`` (frames), ``talker_temperature``, ...

        Raises
        ------
        ConfigError
            An option or a conversation that cannot be used; nothing has been computed then.
        NumericsError, EngineError
            The model failed on a conversation. A :class:`~trt_cpspec.errors.SpeechError` has the answer's text.
        """
        if isinstance(conversations, str):
            raise ConfigError("give a list of conversations, or one to respond()")
        prepared = [self.prepare(_chat(conversation, options)) for conversation in conversations]
        return run_all(self, prepared, verify_size=verify_size, mode=mode, progress=progress)

    def respond_stream(
        self,
        conversation: Conversation,
        *,
        chunk_frames: int = CHUNK_FRAMES,
        verify_size: VerifySize = 0,
        mode: Mode = "rejection",
        progress: FrameProgress | None = None,
        **options: Any,
    ) -> AudioStream[Reply]:
        """Answer a conversation aloud while the answer is being written, in chunks that come as they are made.

        The Talker begins behind the first tokens of the answer, and from then on the Thinker writes a token where the
        Talker needs one. Text and speech are those of :meth:`respond`.

        Parameters
        ----------
        conversation : str, or list of messages
        chunk_frames : int
            Frames of a chunk, of 80 ms; the last one may be shorter.
        verify_size, mode, progress, **options
            As of :meth:`respond_all`. ``progress`` is called by a thread of the stream.

        Returns
        -------
        AudioStream of Reply
            The chunks put together are the waveform of the reply's speech.

        Raises
        ------
        ConfigError
            An option or a conversation that cannot be used, or a model without speech; nothing has been computed then.
        EngineError
            The codec's engine was built before streaming.
        """
        prepared = self.prepare(_chat(conversation, options))
        return stream_one(
            self, prepared, chunk_frames=chunk_frames, verify_size=verify_size, mode=mode, progress=progress
        )

    def fastest_verify_size(self, mode: Mode = "rejection", *, batch: int = 1) -> dict[str, Any]:
        """Measure every window on a sentence that is spoken as an answer, and choose; without speech there is none.

        The result is that of :meth:`SpeechModel.measure_verify_size`.
        """
        if self.voice is None:
            return {"verify_size": 0, "frame_ms": {}, "reason": "speculation is off: nothing is spoken"}
        return self.voice.measure_verify_size(self.saying(self.voice), mode, batch)

    def saying(self, voice: SpeechModel, text: str = TRIAL_TEXT) -> Trial:
        """Return what says a text as if it were an answer of the Thinker, for a measurement."""

        def trial(seed: int, frames: int) -> Utterance:
            chat = self.prepare(_chat("Hello.", {"seed": seed, "max_audio_length": frames}))
            assert chat.voice is not None
            assert chat.voice.speaker is not None
            prompt = self._prompt(voice, chat.prompt_ids, self.tokenizer.encode(text), chat.voice.speaker)
            assert prompt is not None  # the text holds a token
            return replace(chat.voice, prompt=prompt)

        return trial

    @property
    def max_batch_size(self) -> int:
        """Rows that one batch may have."""
        own = self.thinker.spec.limits.max_batch_size
        return own if self.voice is None else min(own, self.voice.max_batch_size)

    def window(self, verify_size: int) -> Window:
        """Return the verification window of a requested size; without speech there is none."""
        if self.voice is None:
            checked_verify_size(verify_size)
            return Window()
        return self.voice.window(verify_size)

    def prepare(self, request: ChatRequest, *, default_seed: int | None = None) -> PreparedChat:
        """Check a request against the checkpoint and the engines, and fill in what it leaves open.

        Parameters
        ----------
        request : ChatRequest
        default_seed : int or None
            For a request without a seed; None draws one.

        Raises
        ------
        ConfigError
            A conversation that the template or the engine cannot take, an unknown speaker (with suggestions), or a
            file of audio or an image that cannot be used.
        """
        warnings: list[str] = []
        prompt = self.tokenizer.render(request.messages)
        prompt_ids = tuple(self.tokenizer.encode(prompt))
        media = read_media(request.messages, self.encoders)
        if media is not None:
            prompt_ids = tuple(expanded(prompt_ids, media, self.thinker.spec.media))
        max_tokens = self._max_tokens(prompt_ids, request.max_generate_length, warnings, media)
        seed = request.seed if request.seed is not None else default_seed
        seed = seed if seed is not None else secrets.randbits(32)
        voice = None
        if self.voice is not None:
            voice = self._prepare_voice(self.voice, request, prompt_ids, max_tokens, seed, warnings)
        return PreparedChat(
            prompt=prompt,
            prompt_ids=prompt_ids,
            params=with_overrides(
                DEFAULT_PARAMS, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p
            ),
            seed=seed,
            max_tokens=max_tokens,
            voice=voice,
            warnings=tuple(warnings),
            media=media,
        )

    def run_batch(
        self,
        batch: Sequence[PreparedChat],
        *,
        window: Window,
        mode: Mode,
        progress: FrameProgress | None = None,
    ) -> list[Reply | CpSpecError]:
        """Answer a batch of conversations on the terms of :meth:`SpeechModel.run_batch`, and speak the answers."""
        if len(batch) > self.max_batch_size:
            raise ConfigError(f"a batch of {len(batch)} exceeds the engine's max_batch_size {self.max_batch_size}")
        with self._turn:
            answers = [self._begun(chat) for chat in batch]
            self.thinker.generate(answers, self.times.timed, (lambda: progress(0)) if progress is not None else None)
            if self.voice is None:
                return [self._result(answer, None) for answer in answers]
            speeches = self._speak(self.voice, batch, answers, window, mode, progress)
        return [self._result(answer, speech) for answer, speech in zip(answers, speeches, strict=True)]

    def stream(
        self,
        request: PreparedChat,
        *,
        window: Window,
        mode: Mode,
        chunk_frames: int,
        progress: FrameProgress | None = None,
        prefill_threshold: int = PREFILL_THRESHOLD,
    ) -> AudioStream[Reply]:
        """Answer a prepared request in chunks (see :meth:`respond_stream`, and :meth:`run_batch` for the rest)."""
        voice = self.voice
        if voice is None or request.voice is None:
            raise ConfigError("a stream is one of sound, and nothing is spoken: open the model with audio=True")
        if prefill_threshold < 1:
            raise ConfigError(f"prefill_threshold is {prefill_threshold}, it must be at least 1")
        voice.check_streaming(chunk_frames)

        def chunks(*, progress: FrameProgress) -> Generator[Float32, None, Reply]:
            return self._chunks(voice, request, window, mode, chunk_frames, prefill_threshold, progress)

        return AudioStream(chunks, voice.codec.sample_rate, progress, check=self._turn.check_outside)

    def _chunks(
        self,
        voice: SpeechModel,
        chat: PreparedChat,
        window: Window,
        mode: Mode,
        chunk_frames: int,
        prefill_threshold: int,
        progress: FrameProgress,
    ) -> Generator[Float32, None, Reply]:
        """Write an answer and speak it meanwhile, on the terms of :meth:`SpeechModel.chunks`."""
        with self._turn.waiting(lambda: progress(0)):
            started = time.perf_counter()
            answer = self._begun(chat)
            text = _AnswerText(self, voice, chat, answer, progress)
            try:
                if answer.error is not None:
                    raise answer.error
                text.fed(prefill_threshold - 1)
                if text.fed(0) is None:
                    speech = self._nothing(voice, chat, window, mode)
                else:
                    speech = yield from voice.chunks(
                        text.limited(),
                        window=window,
                        mode=mode,
                        chunk_frames=chunk_frames,
                        progress=progress,
                        text=text,
                        started=started,
                    )
            except ConfigError:  # the callback's
                raise
            except (CpSpecError, MemoryError) as failure:
                error = failure if isinstance(failure, CpSpecError) else out_of_memory(failure)
                text.complete_after(error)
                result = self._result(answer, error)
                assert isinstance(result, CpSpecError)
                if result is failure:
                    raise
                raise result from error
            reply = self._result(answer, speech)
            assert isinstance(reply, Reply)
            return reply

    def _nothing(self, voice: SpeechModel, chat: PreparedChat, window: Window, mode: Mode) -> Speech:
        assert chat.voice is not None
        return _silence(voice, chat.voice, CpSpecStats(window, mode, voice.predictor.num_code_groups))

    def _begun(self, chat: PreparedChat) -> Answer:
        """Return the answer of a conversation that is to be generated, with what the encoders give for its media."""
        answer = Answer(prompt_ids=chat.prompt_ids, params=chat.params, seed=chat.seed, max_tokens=chat.max_tokens)
        if chat.media is not None and self.encoders is not None:
            ids, timed = self.thinker.spec.media, self.times.timed
            try:
                answer.media = encode_media(chat.prompt_ids, chat.media, ids, self.encoders, timed)
            except (EngineError, MemoryError) as error:
                answer.error = as_engine_error(error)
        return answer

    def _speak(
        self,
        voice: SpeechModel,
        batch: Sequence[PreparedChat],
        answers: Sequence[Answer],
        window: Window,
        mode: Mode,
        progress: FrameProgress | None,
    ) -> list[Speech | CpSpecError | None]:
        """Speak the answers of a batch; None stands for one that failed."""
        speeches: list[Speech | CpSpecError | None] = [None] * len(batch)
        spoken: dict[int, Utterance] = {}
        for place, (chat, answer) in enumerate(zip(batch, answers, strict=True)):
            if answer.error is not None or chat.voice is None:
                continue
            prompt = self._spoken_prompt(voice, chat, answer, answer.spoken_ids)
            if prompt is None:
                speeches[place] = self._nothing(voice, chat, window, mode)
            else:
                spoken[place] = _answered(chat.voice, voice.talker.spec, prompt, len(answer.spoken_ids))
        if spoken:
            results = voice.run_batch(list(spoken.values()), window=window, mode=mode, progress=progress)
            for place, result in zip(spoken, results, strict=True):
                speeches[place] = result
        return speeches

    def _result(self, answer: Answer, speech: Speech | CpSpecError | None) -> Reply | CpSpecError:
        if answer.error is not None:
            return answer.error
        text, token_ids = self.tokenizer.decode(answer.ids), tuple(answer.ids)
        if isinstance(speech, CpSpecError):
            # A new error for each answer: one failure may have ended several.
            failed = SpeechError(str(speech), text=text, token_ids=token_ids)
            failed.__cause__ = speech
            return failed
        assert answer.finish_reason is not None
        return Reply(text=text, token_ids=token_ids, finish_reason=answer.finish_reason, speech=speech)

    def _prompt(
        self, voice: SpeechModel, prompt_ids: Sequence[int], answer_ids: Sequence[int], speaker: str
    ) -> Prompt | None:
        return assemble_answer_prompt(voice.talker.spec, self.thinker.spec.roles, prompt_ids, answer_ids, speaker)

    def _spoken_prompt(
        self, voice: SpeechModel, chat: PreparedChat, answer: Answer, answer_ids: Sequence[int]
    ) -> Prompt | None:
        """Return the prompt that speaks so much of an answer, behind what is heard of audio and images."""
        assert chat.voice is not None
        assert chat.voice.speaker is not None
        prompt = self._prompt(voice, chat.prompt_ids, answer_ids, chat.voice.speaker)
        if prompt is None or chat.media is None or answer.media_hidden is None:
            return prompt
        return self._with_media(voice, prompt, chat.media, answer.media_hidden)

    def _with_media(self, voice: SpeechModel, prompt: Prompt, media: Media, hidden: Float32) -> Prompt:
        """Return a prompt that says of the rows of audio and images what the Thinker made of them.

        Only a user's messages hold them, and all of these are heard: they come in the order of the Thinker's prompt.
        """
        ids = self.thinker.spec.media
        heard = prompt.text_ids.copy()
        heard[-ANSWER_ROWS:] = voice.talker.spec.ids.tts_pad_token_id  # the answer may hold any token
        places = np.flatnonzero(np.isin(heard, (ids.audio_token_id, ids.image_token_id)))
        rotary = rotary_positions(heard.tolist(), ids.image_token_id, media.image_grids) if media.images else None
        return replace(prompt, media=PromptMedia(places=places, hidden=hidden, rotary=rotary))

    def _prepare_voice(
        self,
        voice: SpeechModel,
        request: ChatRequest,
        prompt_ids: Sequence[int],
        max_tokens: int,
        seed: int,
        warnings: list[str],
    ) -> Utterance:
        spec = voice.talker.spec
        speaker = resolve_speaker(spec, request.speaker)
        assert speaker is not None  # a Qwen3-Omni has speakers
        prompt = self._prompt(voice, prompt_ids, [spec.ids.tts_pad_token_id], speaker)
        assert prompt is not None  # it holds the token in the answer's place
        rows, asked = len(prompt.text_ids), request.max_audio_length
        max_frames, if_cut = resolve_max_frames(
            spec, rows, max_tokens, asked, warnings, shorten="shorten what was said"
        )
        return Utterance(
            prompt=prompt,
            sampling=resolve_sampling(spec, request, seed),
            max_frames=max_frames,
            if_cut=if_cut,
            speaker=speaker,
        )

    def _max_tokens(
        self, prompt_ids: Sequence[int], asked: int | None, warnings: list[str], media: Media | None
    ) -> int:
        spec = self.thinker.spec
        limits, rows = spec.limits, len(prompt_ids)
        if not rows:
            raise ConfigError("the chat template makes nothing of the messages")
        if max(prompt_ids) >= spec.decoder.vocab_size:
            raise ConfigError(
                f"the tokenizer gives the token {max(prompt_ids)}, the Thinker knows {spec.decoder.vocab_size}: they "
                f"are of different checkpoints"
            )
        if rows > limits.max_input_len:
            raise ConfigError(
                f"the conversation takes {rows} tokens{_of_media(media)}, the Thinker's max_input_len is "
                f"{limits.max_input_len}; shorten it, or build with a larger --maxInputLen"
            )
        room = limits.max_kv_cache_capacity - rows + 1  # the last token is not fed
        if asked is not None and asked > room:
            warnings.append(
                f"max_generate_length {asked} is limited to {room} tokens by the Thinker's max_kv_cache_capacity "
                f"{limits.max_kv_cache_capacity}"
            )
        return min(asked if asked is not None else DEFAULT_MAX_TOKENS, room)


class _AnswerText:
    """An answer that is written as far as its speech needs it: a :class:`~trt_cpspec.pipeline.TrailingText`."""

    def __init__(
        self, model: Qwen3Omni, voice: SpeechModel, chat: PreparedChat, answer: Answer, progress: FrameProgress
    ) -> None:
        assert chat.voice is not None
        self._voice, self._chat, self._answer, self._utterance = voice, chat, answer, chat.voice
        self._prompt_of = partial(model._spoken_prompt, voice, chat, answer)
        self._prompt: Prompt | None = None
        self._steps: Iterator[None] = model.thinker.steps([answer], model.times.timed)
        self._progress = progress
        self._count = 0  # tokens that the Thinker was fed, which are those that are spoken

    def fed(self, index: int) -> int | None:
        """Return a token that is spoken, once it is written; None where the answer ends before it."""
        while self._count <= index and self._write():
            pass
        return self._answer.ids[index] if index < self._count else None

    def _write(self) -> bool:
        """Let the Thinker write and be fed a token; return False when the answer is complete."""
        if not self._answer.goes_on:
            return False
        try:
            if next(self._steps, self) is self:
                if self._answer.error is not None:
                    raise self._answer.error
                return False
            self._count += 1
            self._progress(0)
        except (EngineError, MemoryError) as error:
            self._answer.error = as_engine_error(error)
            raise
        return True

    def complete(self) -> None:
        """Let the Thinker write the rest, which the speech did not wait for."""
        while self._write():
            pass

    def complete_after(self, error: CpSpecError) -> None:
        """Complete an answer whose speech failed, as far as that goes: a limit that was met is met again."""
        if self._answer.error is None:
            with suppress(CpSpecError):
                self.complete()
            self._answer.error = None  # it is the speech that failed

    def trailing_id(self, frame: int) -> int:
        """Return the token behind a frame: the answer's, then the end of the text, then padding."""
        token = self.fed(frame + 1)
        ids = self._voice.talker.spec.ids
        if token is not None:
            return token
        return ids.tts_eos_token_id if frame + 1 == self._count else ids.tts_pad_token_id

    def limited(self) -> Utterance:
        """Return the utterance; as long as the answer goes on, it may take what the longest text may."""
        if self._prompt is None:
            first = self.fed(0)
            assert first is not None
            self._prompt = self._prompt_of([first])
            assert self._prompt is not None
        tokens = self._chat.max_tokens if self._answer.goes_on else self._count
        return _answered(self._utterance, self._voice.talker.spec, self._prompt, tokens)


def _of_media(media: Media | None) -> str:
    """Say how many tokens of a conversation are its media's."""
    if media is None:
        return ""
    images = sum(rows * columns for rows, columns in media.image_grids)
    return f" (audio {sum(media.clip_rows)}, images {images})"


def _answered(utterance: Utterance, spec: TalkerSpec, prompt: Prompt, tokens: int) -> Utterance:
    """Return what is to be spoken once the answer is there; without a length of its request its tokens set one."""
    if utterance.if_cut is None:
        return replace(utterance, prompt=prompt)
    max_frames, if_cut = resolve_max_frames(spec, len(prompt.text_ids), tokens, None, [])
    return replace(utterance, prompt=prompt, max_frames=max_frames, if_cut=if_cut)


def _silence(voice: SpeechModel, utterance: Utterance, stats: CpSpecStats) -> Speech:
    """Return the speech of an answer in which there is nothing to speak (the reference fails on it)."""
    return Speech(
        waveform=np.zeros(0, np.float32),
        sample_rate=voice.codec.sample_rate,
        codes=np.zeros((0, stats.num_code_groups), np.int32),
        finish_reason="eos",
        max_frames=utterance.max_frames,
        stats=stats,
        sampling=utterance.sampling,
        speaker=utterance.speaker,
        language=utterance.language,
        warnings=("the answer holds nothing to speak",),
    )


def _chat(conversation: Conversation, options: Mapping[str, Any]) -> ChatRequest:
    messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
    return make_chat(messages, options)
