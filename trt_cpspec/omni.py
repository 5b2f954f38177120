"""From conversations to spoken answers: the Thinker, then what speaks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from .errors import ConfigError, CpSpecError, SpeechError
from .frame import CpSpecStats
from .inspection import check_component
from .pipeline import (
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
)
from .predictor import CodePredictor
from .requests import ChatRequest, make_chat
from .runtime import checked_executor, open_runtime
from .talker import Prompt, Talker, assemble_answer_prompt
from .thinker import Answer, Thinker
from .turns import Turn

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
    params : SamplingParams
        The Thinker's.
    seed : int
    max_tokens : int
    voice : Utterance or None
        How the answer will be spoken. Its prompt holds one token in the answer's place, which has yet to come.
    warnings : tuple of str
        What was asked and will not be done.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    voice: Utterance | None
    warnings: tuple[str, ...]

    @property
    def sampling(self) -> dict[str, Any]:
        """What the request is sampled with, in the keys of the input JSON."""
        thinker = {name: getattr(self.params, name) for name in ("temperature", "top_k", "top_p")}
        return thinker | (self.voice.sampling.as_dict() if self.voice is not None else {"seed": self.seed})


class Qwen3Omni:
    """Qwen3-Omni on engines that ``cpspec-build`` wrote. Make one with :meth:`from_engine_dir`.

    Safe for use from several threads: batches are answered and spoken one after the other (see
    :class:`~trt_cpspec.pipeline.SpeechModel`, whose lock it shares).
    """

    def __init__(self, thinker: Thinker, tokenizer: ChatTokenizer, voice: SpeechModel | None) -> None:
        self.thinker = thinker
        self.tokenizer = tokenizer
        self.voice = voice
        self.times = voice.times if voice is not None else StageTimes()
        self._turn = Turn(voice.lock if voice is not None else threading.RLock())

    @classmethod
    def from_engine_dir(
        cls,
        engine_dir: Path | str | None = None,
        *,
        thinker_dir: Path | str | None = None,
        talker_dir: Path | str | None = None,
        code2wav_dir: Path | str | None = None,
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
            Holds ``thinker``, ``talker``, ``code_predictor`` and ``multimodal/code2wav``.
        thinker_dir : path or None
            In place of ``engine_dir``, whose place its parent takes.
        talker_dir : path or None
            None is the sibling of the Thinker; ``code_predictor`` is the Talker's.
        code2wav_dir, tokenizer_dir : path or None
            None is ``multimodal/code2wav`` beside the Talker, and the Thinker's folder.
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
        return cls(
            Thinker.from_engine_dir(thinker_path, runtime=runtime),
            ChatTokenizer.from_dir(Path(tokenizer_dir) if tokenizer_dir is not None else thinker_path),
            voice,
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
            Each a list of messages (``role``: system, user or assistant; ``content``), or a text, which is a user's.
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
            A conversation that the template or the engine cannot take, or an unknown speaker (with suggestions).
        """
        warnings: list[str] = []
        prompt = self.tokenizer.render(request.messages)
        prompt_ids = tuple(self.tokenizer.encode(prompt))
        max_tokens = self._max_tokens(prompt_ids, request.max_generate_length, warnings)
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
        answers = [
            Answer(prompt_ids=chat.prompt_ids, params=chat.params, seed=chat.seed, max_tokens=chat.max_tokens)
            for chat in batch
        ]
        with self._turn:
            self.thinker.generate(answers, self.times.timed, (lambda: progress(0)) if progress is not None else None)
            if self.voice is None:
                return [self._result(answer, None) for answer in answers]
            speeches = self._speak(self.voice, batch, answers, window, mode, progress)
        return [self._result(answer, speech) for answer, speech in zip(answers, speeches, strict=True)]

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
            if answer.error is not None or chat.voice is None or chat.voice.speaker is None:
                continue
            prompt = self._prompt(voice, chat.prompt_ids, answer.spoken_ids, chat.voice.speaker)
            if prompt is None:
                speeches[place] = _silence(
                    voice, chat.voice, CpSpecStats(window, mode, voice.predictor.num_code_groups)
                )
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
        assert answer.finish_reason is not None
        text, token_ids = self.tokenizer.decode(answer.ids), tuple(answer.ids)
        if isinstance(speech, CpSpecError):
            # A new error for each answer: one failure may have ended several.
            failed = SpeechError(str(speech), text=text, token_ids=token_ids)
            failed.__cause__ = speech
            return failed
        return Reply(text=text, token_ids=token_ids, finish_reason=answer.finish_reason, speech=speech)

    def _prompt(
        self, voice: SpeechModel, prompt_ids: Sequence[int], answer_ids: Sequence[int], speaker: str
    ) -> Prompt | None:
        return assemble_answer_prompt(voice.talker.spec, self.thinker.spec.roles, prompt_ids, answer_ids, speaker)

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

    def _max_tokens(self, prompt_ids: Sequence[int], asked: int | None, warnings: list[str]) -> int:
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
                f"the conversation takes {rows} tokens, the Thinker's max_input_len is {limits.max_input_len}; shorten "
                f"it, or build with a larger --maxInputLen"
            )
        room = limits.max_kv_cache_capacity - rows + 1  # the last token is not fed
        if asked is not None and asked > room:
            warnings.append(
                f"max_generate_length {asked} is limited to {room} tokens by the Thinker's max_kv_cache_capacity "
                f"{limits.max_kv_cache_capacity}"
            )
        return min(asked if asked is not None else DEFAULT_MAX_TOKENS, room)


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
