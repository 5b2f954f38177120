"""The Thinker: a conversation's prompt to the tokens of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .config import FinishReason, SamplingParams, Section, ThinkerSpec
from .errors import CpSpecError, EngineError, NumericsError, out_of_memory
from .runtime import Decoder, Runtime
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
    ids : list of int
        The tokens so far; the one that ends the answer is among them.
    finish_reason : {"eos", "length"} or None
        None while it goes on.
    error : CpSpecError or None
        What ended it instead.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: CpSpecError | None = None

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
        session: Decoder,
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
        live = list(answers)
        started = time.perf_counter()
        try:
            hidden = self.prefill([self.embed(answer.prompt_ids) for answer in live])
            timed("thinker_prefill", started)
            while kept := self._sample(live, hidden):
                started = time.perf_counter()
                live = [live[place] for place in kept]
                if len(kept) < len(self):
                    self.keep_rows(np.array(kept))
                hidden = self.step(self.embed([answer.ids[-1] for answer in live]))
                timed("thinker_generation", started)
                if stepped is not None:
                    stepped()
        except (EngineError, MemoryError) as error:  # of the answers that were going on nothing can be said
            for answer in live:
                if answer.goes_on:
                    answer.error = error if isinstance(error, EngineError) else out_of_memory(error)

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
