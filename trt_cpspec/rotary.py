"""The rotary embedding's angles: one rule for the graphs that are written and the kernel that needs no graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rotary_frequencies(head_dim: int, theta: float) -> NDArray[np.float32]:
    """Return by how much each pair of a head's channels turns from one position to the next, ``[headDim / 2]``.

    In float32 throughout, as the reference computes them.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: NDArray[Any] = 1.0 / np.power(np.float32(theta), exponents)
    return frequencies.astype(np.float32)
