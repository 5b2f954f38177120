"""The Thinker: a conversation's prompt to the tokens of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .config import FinishReason, SamplingParams, Section, ThinkerSpec
from .errors import CpSpecError, EngineError, NumericsError, as_engine_error
from .multimodal import Encoded
from .runtime import PromptDecoder, Runtime
from .sampling import PhiloxNoise, Use, law
from .sequences import Float32, SequenceBatch
from .session import HeadSession
from .tensorfile import RowTable, TensorFile

Timed = Callable[[str, float], None]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer, while it is generated and after.

    Attributes
    ----------
    prompt_ids : sequence of int
    params : SamplingParams
        Its repetition penalty is not applied: the reference has none here.
    seed : int
    max_tokens : int
        At least 1.
    media : Encoded or None
        What stands in the prompt for audio and images.
    ids : list of int
        The tokens so far; the one that ends the answer is among them.
    finish_reason : {"eos", "length"} or None
        None while it goes on.
    error : CpSpecError or None
        What ended it instead.
    media_hidden : ndarray, shape [M, H], float32, or None
        What the Talker hears of the rows of media: ``accept_hidden_states`` behind the prefill.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    media: Encoded | None = None
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: CpSpecError | None = None
    media_hidden: Float32 | None = None

    @property
    def spoken_ids(self) -> list[int]:
        """The tokens that are spoken: all that the Thinker was fed.

        That leaves out the end token and, at the length limit, the last word's token, as in the reference.
        """
        return self.ids[:-1]

    @property
    def goes_on(self) -> bool:
        """Whether another token is to come."""
        return self.finish_reason is None and self.error is None


class Thinker(SequenceBatch):
    """The language model on its engine. One batch at a time; not safe for several threads.

    Make one with :meth:`from_engine_dir`.

    Attributes
    ----------
    spec : ThinkerSpec
    """

    def __init__(
        self,
        spec: ThinkerSpec,
        session: PromptDecoder,
        *,
        embedding: RowTable,
        head: Float32,
        head_session: HeadSession | None = None,
    ) -> None:
        super().__init__(session, spec.decoder.hidden_size)
        self.spec = spec
        self._embedding = embedding
        self._head = head
        self._head_session = head_session

    @classmethod
    def from_engine_dir(cls, folder: Path | str, *, runtime: Runtime | None = None) -> Thinker:
        """Load a ``thinker`` folder that ``cpspec-build`` wrote.

        Parameters
        ----------
        folder : path
        runtime : Runtime or None
            Where it runs; None is the CPU.

        Raises
        ------
        ConfigError, EngineError
            A file is missing, damaged, or contradicts ``config.json``.
        """
        folder, runtime = Path(folder), runtime or Runtime()
        spec = ThinkerSpec.from_section(Section.from_file(folder / "config.json"))
        shape = (spec.decoder.vocab_size, spec.decoder.hidden_size)
        table = TensorFile(folder / "embedding.safetensors")
        table.check("embedding", shape)
        return cls(
            spec,
            runtime.decoder(folder, spec.decoder, spec.limits.max_kv_cache_capacity),
            embedding=table.rows("embedding"),
            head=TensorFile(folder / "lm_head.safetensors").read_weight("lm_head.weight", shape),
            head_session=runtime.heads(folder),
        )

    def embed(self, ids: Sequence[int]) -> Float32:
        """Return the embeddings of tokens, ``[n]`` to ``[n, H]``."""
        return self._embedding[np.asarray(ids, np.int64)]

    def logits(self, hidden: Float32) -> Float32:
        """Apply the head to one hidden state, ``[H]`` to ``[V]``."""
        if self._head_session is not None:
            return self._head_session.apply(self._head, hidden)
        logits: Float32 = self._head @ hidden
        return logits

    def generate(
        self,
        answers: Sequence[Answer],
        timed: Timed = lambda stage, started: None,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        """Complete a batch of new answers. One that fails has its error; the others are not disturbed.

        Parameters
        ----------
        answers : sequence of Answer
        timed : callable
            Told of each stage that has run, with the time at which it began.
        stepped : callable or None
            Called behind each step; an EngineError of it fails the answers that were still going on.
        """
        try:
            for _ in self.steps(answers, timed):
                if stepped is not None:
                    stepped()
        except (EngineError, MemoryError) as error:  # of the answers that were going on nothing can be said
            for answer in answers:
                if answer.goes_on:
                    answer.error = as_engine_error(error)

    def steps(self, answers: Sequence[Answer], timed: Timed = lambda stage, started: None) -> Iterator[None]:
        """Complete a batch of new answers, and yield behind each step: each answer that goes on was fed one token more.

        Parameters
        ----------
        answers, timed
            As of :meth:`generate`.

        Raises
        ------
        EngineError
            The engine failed. Logits that describe no law end their own answer, by its ``error``.
        """
        live = [answer for answer in answers if answer.goes_on]
        if not live:
            return
        started = time.perf_counter()
        hidden = self._read(live)
        timed("thinker_prefill", started)
        while kept := self._sample(live, hidden):
            started = time.perf_counter()
            live = [live[place] for place in kept]
            if len(kept) < len(self):
                self.keep_rows(np.array(kept))
            hidden = self.step(self.embed([answer.ids[-1] for answer in live]))
            timed("thinker_generation", started)
            yield

    def _read(self, answers: Sequence[Answer]) -> Float32:
        """Prefill the prompts of answers, media and all; return the last hidden states ``[B, H]``."""
        rows = [self.embed(answer.prompt_ids) for answer in answers]
        if all(answer.media is None for answer in answers):
            return self.prefill(rows)
        for embeds, answer in zip(rows, answers, strict=True):
            if answer.media is not None:
                embeds[answer.media.places] = answer.media.embeds
        accepted = np.empty((len(rows), max(map(len, rows)), self.spec.decoder.hidden_size), np.float32)
        extras = [None if answer.media is None else answer.media.extras for answer in answers]
        hidden = self.prefill(rows, extras, accepted=accepted)
        for place, answer in enumerate(answers):
            if answer.media is not None:
                answer.media_hidden = accepted[place, answer.media.places]
        return hidden

    def _sample(self, live: Sequence[Answer], hidden: NDArray[np.float32]) -> list[int]:
        """Give each answer its next token, and return the places of those that go on."""
        for answer, state in zip(live, hidden, strict=True):
            try:
                self._extend(answer, state)
            except NumericsError as error:
                answer.error = NumericsError(f"Thinker, token {len(answer.ids)}: {error}")
        return [place for place, answer in enumerate(live) if answer.goes_on]

    def _extend(self, answer: Answer, hidden: Float32) -> None:
        target = law(self.logits(hidden), answer.params)
        answer.ids.append(PhiloxNoise(answer.seed, len(answer.ids)).pick(target, 0, Use.TEXT))
        if answer.ids[-1] in self.spec.eos_token_ids:
            answer.finish_reason = "eos"
        elif len(answer.ids) == answer.max_tokens:
            answer.finish_reason = "length"
