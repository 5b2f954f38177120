"""A batch of sequences on one decoder: prefill, step, drop rows. Talker and Thinker are such batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .runtime import PromptDecoder
from .session import PassExtras

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExtras:
    """What the rows of one prompt bring beyond their embeddings.

    Attributes
    ----------
    rotary : ndarray, shape [R, 3], int64, or None
        Time, height and width of each row; None is its place, three times.
    deepstack : ndarray, shape [R, D * H], float32, or None
        None is zero.
    """

    rotary: NDArray[np.int64] | None = None
    deepstack: Float32 | None = None


class SequenceBatch:
    """The sequences that a decoder holds. One batch at a time; not safe for several threads.

    Parameters
    ----------
    session : PromptDecoder
    hidden_size : int
        H, of the decoder.
    """

    def __init__(self, session: PromptDecoder, hidden_size: int) -> None:
        self._session = session
        self._hidden_size = hidden_size
        self._positions = np.zeros(0, np.int64)
        self._ahead = np.zeros(0, np.int64)
        """By how much the rotary position of each row's next token differs from its slot."""

    def __len__(self) -> int:
        """Return the number of rows in the batch."""
        return len(self._positions)

    @property
    def run_seconds(self) -> float:
        """Seconds spent inside the engine so far."""
        return self._session.run_seconds

    def prefill(
        self, rows: Sequence[Float32], extras: Sequence[RowExtras | None] = (), *, accepted: Float32 | None = None
    ) -> Float32:
        """Start a batch of sequences.

        Parameters
        ----------
        rows : sequence of ndarray, shape [R_b, H], float32
            The embedded prompt of each row of the batch.
        extras : sequence of RowExtras or None
            One for each row of the batch, or none at all: prompts of text.
        accepted : ndarray, shape [B, longest R, H], float32, or None
            Receives the Thinker's ``accept_hidden_states``.

        Returns
        -------
        ndarray, shape [B, H], float32
            Last hidden state of each row, after the final norm.
        """
        lengths = np.array([len(prompt) for prompt in rows])
        offsets = np.arange(lengths.max())
        embeds = np.zeros((len(rows), lengths.max(), self._hidden_size), np.float32)
        for index, prompt in enumerate(rows):
            embeds[index, : len(prompt)] = prompt
        self._session.start(len(rows), int(lengths.max()) + 1)
        self._session.clear()  # a request that failed may have left a NaN behind the rows of this one
        positions = np.where(offsets < lengths[:, None], offsets, -1)
        self._ahead = np.zeros(len(rows), np.int64)
        if any(extra is not None for extra in extras) or accepted is not None:
            hidden = self._session.forward(embeds, positions, self._pass_extras(positions, extras, accepted))
        else:
            hidden = self._session.forward(embeds, positions)
        self._positions = lengths
        last: Float32 = hidden[np.arange(len(rows)), lengths - 1]
        return last

    def _pass_extras(
        self, positions: NDArray[np.int64], extras: Sequence[RowExtras | None], accepted: Float32 | None
    ) -> PassExtras:
        """Bring the extras of the prompts to one shape, and note where each goes on."""
        rotary = deepstack = None
        for place, extra in enumerate(extras):
            if extra is not None and extra.rotary is not None:
                rotary = np.repeat(positions[..., None], 3, axis=2) if rotary is None else rotary
                rotary[place, : len(extra.rotary)] = extra.rotary
                self._ahead[place] = extra.rotary.max() + 1 - len(extra.rotary)
            if extra is not None and extra.deepstack is not None:
                shape = (*positions.shape, extra.deepstack.shape[1])
                deepstack = np.zeros(shape, np.float32) if deepstack is None else deepstack
                deepstack[place, : len(extra.deepstack)] = extra.deepstack
        return PassExtras(rotary=rotary, deepstack=deepstack, accepted=accepted)

    def step(self, embeds: Float32) -> Float32:
        """Advance every row of the batch by one position, ``[B, H]`` to ``[B, H]``."""
        positions = self._positions[:, None]
        if self._ahead.any():
            rotary = np.repeat((positions + self._ahead[:, None])[..., None], 3, axis=2)
            hidden = self._session.forward(embeds[:, None], positions, PassExtras(rotary=rotary))
        else:
            hidden = self._session.forward(embeds[:, None], positions)
        hidden = hidden[:, 0].copy()
        self._positions = self._positions + 1
        return hidden

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows of the batch and drop the others."""
        self._session.keep_rows(rows)
        self._positions, self._ahead = self._positions[rows], self._ahead[rows]
