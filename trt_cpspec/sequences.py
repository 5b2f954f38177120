"""A batch of sequences on one decoder: prefill, step, drop rows. Talker and Thinker are such batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .runtime import Decoder

Float32 = NDArray[np.float32]


class SequenceBatch:
    """The sequences that a decoder holds. One batch at a time; not safe for several threads.

    Parameters
    ----------
    session : Decoder
    hidden_size : int
        H, of the decoder.
    """

    def __init__(self, session: Decoder, hidden_size: int) -> None:
        self._session = session
        self._hidden_size = hidden_size
        self._positions = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of rows in the batch."""
        return len(self._positions)

    @property
    def run_seconds(self) -> float:
        """Seconds spent inside the engine so far."""
        return self._session.run_seconds

    def prefill(self, rows: Sequence[Float32]) -> Float32:
        """Start a batch of sequences.

        Parameters
        ----------
        rows : sequence of ndarray, shape [R_b, H], float32
            The embedded prompt of each row of the batch.

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
        hidden = self._session.forward(embeds, np.where(offsets < lengths[:, None], offsets, -1))
        self._positions = lengths
        last: Float32 = hidden[np.arange(len(rows)), lengths - 1]
        return last

    def step(self, embeds: Float32) -> Float32:
        """Advance every row of the batch by one position, ``[B, H]`` to ``[B, H]``."""
        hidden = self._session.forward(embeds[:, None], self._positions[:, None])[:, 0].copy()
        self._positions = self._positions + 1
        return hidden

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows of the batch and drop the others."""
        self._session.keep_rows(rows)
        self._positions = self._positions[rows]
