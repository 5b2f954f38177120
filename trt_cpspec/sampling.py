"""The sampling law, its random numbers, and the accept step of exact speculative sampling.

This module is what runs on a CPU and the oracle of the CUDA kernels. A *law* is a float64 vector of V
probabilities that sum to 1. *Target* is the law that autoregressive decoding samples from, *draft* the law from
which a proposal was drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .config import SamplingParams
from .errors import NumericsError

Law = NDArray[np.float64]
Logits = NDArray[np.floating]

# In the order of the products: word 2's multiplier first.
_PHILOX_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)
_PHILOX_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


class Use(IntEnum):
    """What a random number is for; each use has a counter stream of its own."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TEXT = 4


def philox(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply Philox4x32-10 to counters.

    Parameters
    ----------
    key : int
        64 bits; the low word is the first key word.
    counters : ndarray, shape [n, 4], uint64 holding 32-bit words

    Returns
    -------
    ndarray, shape [n, 4], uint64 holding 32-bit words

    Notes
    -----
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    # Words 0 and 2 are multiplied, 1 and 3 are mixed in: two rows of each, so that a round is five operations.
    multiplied, mixed = counters.T[0::2], counters.T[1::2]
    for round_key in _round_keys(key):
        products = multiplied[::-1] * _PHILOX_MULTIPLIERS
        multiplied = products >> _WORD_BITS
        multiplied ^= mixed
        multiplied ^= round_key
        mixed = products & _LOW_WORD
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]], axis=1)


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> NDArray[np.uint64]:
    """Return the keys of the ten rounds, ``[10, 2, 1]``."""
    words = np.array([key & 0xFFFFFFFF, key >> 32], np.uint64)
    steps = np.arange(10, dtype=np.uint64)[:, None] * np.array(_PHILOX_INCREMENTS, np.uint64)
    return ((words + steps) & _LOW_WORD)[:, :, None]


def uniforms(seed: int, frame: int, depth: int, use: Use, indices: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the uniform numbers in (0, 1) that belong to an address.

    Parameters
    ----------
    seed : int
        Of the request, 64 bits.
    frame, depth : int
        Depth 0 is the Talker's code.
    use : Use
    indices : ndarray, shape [n], integer
        Codes, or 0 for a single number.

    Returns
    -------
    ndarray, shape [n], float64
        Multiples of 2**-24, offset by half of one.
    """
    counters = np.empty((len(indices), 4), np.uint64)
    counters[:, 0], counters[:, 1], counters[:, 2] = frame, depth, int(use)
    counters[:, 3] = indices >> 2
    words = philox(seed, counters)[np.arange(len(indices)), indices & 3]
    numbers: NDArray[np.float64] = ((words >> np.uint64(8)).astype(np.float64) + 0.5) * 2.0**-24
    return numbers


def penalised(logits: Logits, seen: Sequence[int], penalty: float) -> NDArray[np.float64]:
    """Apply Hugging Face's repetition penalty: each id in ``seen`` once, dividing positive logits.

    Parameters
    ----------
    logits : ndarray, shape [V]
    seen : sequence of int
        Ids generated so far; duplicates count once.
    penalty : float

    Returns
    -------
    ndarray, shape [V], float64
    """
    out = np.array(logits, np.float64)
    if penalty != 1 and len(seen):
        ids = np.unique(np.asarray(seen, np.int64))
        values = out[ids]
        out[ids] = np.where(values < 0, values * penalty, values / penalty)
    return out


def law(logits: Logits, params: SamplingParams) -> Law:
    """Return the law that a row of logits describes: temperature, then top-k, then top-p, then softmax.

    Parameters
    ----------
    logits : ndarray, shape [V], floating
        ``-inf`` forbids a code.
    params : SamplingParams
        Its repetition penalty is not applied here (see :func:`penalised`).

    Returns
    -------
    ndarray, shape [V], float64

    Raises
    ------
    NumericsError
        A NaN, a ``+inf``, or nothing finite.

    Notes
    -----
    Order and meaning are those of ``transformers``' processors. At the k-th largest value, and at the boundary of
    top-p, equal logits keep the lower index (the reference keeps all that tie at k). Sums are float64, and so is the
    comparison of the running sum with ``1 - top_p``.
    """
    largest = logits.max()
    if not np.isfinite(largest):
        raise NumericsError(f"the logits hold {largest}: they describe no law")
    out = np.zeros(len(logits), np.float64)
    if params.temperature == 0:
        out[int(np.argmax(logits))] = 1.0
        return out
    kept = _largest(logits, params.top_k)
    weights = np.exp((logits[kept].astype(np.float64) - float(largest)) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1:
        nucleus = _nucleus(weights, logits[kept], params.top_p)
        kept, weights = kept[nucleus], weights[nucleus] / weights[nucleus].sum()
    out[kept] = weights
    return out


def _largest(logits: Logits, top_k: int) -> NDArray[np.intp]:
    """Return the indices, ascending, of the ``top_k`` largest logits; ties keep the lower index."""
    if not 0 < top_k < len(logits):
        return np.arange(len(logits))
    boundary = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
    above = logits > boundary
    ties = np.flatnonzero(logits == boundary)[: top_k - int(above.sum())]
    above[ties] = True
    return np.flatnonzero(above)


def _nucleus(weights: Law, logits: Logits, top_p: float) -> NDArray[np.intp]:
    """Return which entries stay: from the smallest up, one goes while the sum with it is at most ``1 - top_p``."""
    # In the order of the logits, not of the weights: float64 gives logits 1e-16 apart one weight. A stable sort of the
    # reversed row puts the higher index first among equals, so the lower one is kept.
    ascending = len(logits) - 1 - np.argsort(logits[::-1], kind="stable")
    stays = np.cumsum(weights[ascending]) > 1 - top_p
    stays[-1] = True
    return np.sort(ascending[stays])


def accept_probability(target: Law, draft: Law, code: int) -> float:
    """Return ``min(1, target / draft)`` of a code that was drawn from ``draft``."""
    return min(1.0, float(target[code]) / float(draft[code]))


def residual_law(target: Law, draft: Law) -> Law:
    """Return the law of the code that replaces a rejected one: the positive part of ``target - draft``.

    Where rounding leaves no mass (the two laws are equal) it is the target law.
    """
    excess = np.maximum(target - draft, 0.0)
    mass = excess.sum()
    return excess / mass if mass > 0 else target


class Noise(Protocol):
    """The randomness of one row in one frame. Tests put an enumerator in its place."""

    def pick(self, law: Law, depth: int, use: Use) -> int:
        """Draw a code from a law."""
        ...

    def accept(self, probability: float, depth: int) -> bool:
        """Decide an event of this probability."""
        ...


@dataclass(frozen=True, slots=True)
class PhiloxNoise:
    """Numbers that are a pure function of the request's seed, the frame, the depth and the use.

    Philox4x32-10 with the seed as key and the counter (frame, depth, use, index >> 2); lane ``index & 3`` of its
    output, where ``index`` is the code.
    """

    seed: int
    frame: int

    def pick(self, law: Law, depth: int, use: Use) -> int:
        """Draw a code by Gumbel-max over the codes that can occur; a tie takes the lower one."""
        codes = np.flatnonzero(law)
        if len(codes) == 1:
            return int(codes[0])
        noise = -np.log(-np.log(uniforms(self.seed, self.frame, depth, use, codes)))
        return int(codes[np.argmax(np.log(law[codes]) + noise)])

    def accept(self, probability: float, depth: int) -> bool:
        """Compare one uniform number; probability 0 is never accepted, 1 always."""
        return bool(uniforms(self.seed, self.frame, depth, Use.ACCEPT, np.zeros(1, np.int64))[0] < probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The drafts of one row in one round.

    Attributes
    ----------
    first_depth : int
        Depth of the first of them.
    codes : list of int
        n codes.
    laws : list of ndarray, shape [V], float64
        The law that each was drawn from.
    """

    first_depth: int
    codes: list[int]
    laws: list[Law]


def accept_by_rejection(targets: Iterable[Law], proposal: Proposal, noise: Noise) -> list[int]:
    """Walk the drafts and return the codes to commit, 1 to n + 1 of them.

    Parameters
    ----------
    targets : iterable of ndarray, shape [V], float64
        n + 1 laws; the last is the bonus row's. None is asked for behind the first rejection.
    proposal : Proposal
    noise : Noise

    Notes
    -----
    Accept a draft with probability ``min(1, target / draft)``; the first rejection commits a draw from the residual
    law, and no rejection a draw from the bonus row. Leviathan et al., "Fast inference from transformers via
    speculative decoding", 2023.
    """
    committed: list[int] = []
    laws = iter(targets)
    for code, draft in zip(proposal.codes, proposal.laws, strict=True):
        target, depth = _next(laws), proposal.first_depth + len(committed)
        if not noise.accept(accept_probability(target, draft, code), depth):
            return [*committed, noise.pick(residual_law(target, draft), depth, Use.RESIDUAL)]
        committed.append(code)
    return [*committed, noise.pick(_next(laws), proposal.first_depth + len(committed), Use.TARGET)]


def _next(laws: Iterator[Law]) -> Law:
    for target in laws:
        return target
    raise ValueError("n drafts need n + 1 target laws, fewer were given")


def accept_coupled(targets: Iterable[Law], proposal: Proposal, noise: Noise) -> list[int]:
    """Commit what autoregressive decoding would draw, as far as the drafts foresaw it, and one code more.

    Parameters and return value are those of :func:`accept_by_rejection`. The drafts must have been drawn with the
    target's own numbers (``Use.TARGET``), which makes them likely, but not certain, to agree.
    """
    committed: list[int] = []
    laws = iter(targets)
    for code in [*proposal.codes, None]:
        committed.append(noise.pick(_next(laws), proposal.first_depth + len(committed), Use.TARGET))
        if committed[-1] != code:
            break
    return committed
