"""The rules of sampling: reproducible random numbers, and the oracle of the sampler that lives in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniform(seed: ArrayLike, positions: ArrayLike) -> NDArray[np.float32]:
    """Draw the random number of each position: a pure function of (seed, position), whatever else is in the batch.

    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a counter: the seed is hashed to a starting state and
    the position says how many increments to take, so that neighbouring seeds give unrelated streams.

    Shapes: ``seed`` in [0, 2**64) and ``positions`` >= 0 broadcast against each other; the result has their shape.
    Position = number of tokens before the one that is drawn, prompt included.

    Numerics: the top 24 bits of the hash over 2**24: every value is exact in float32 and lies in [0, 1).

    >>> uniform(7, [0, 1]).tolist() == [float(uniform(7, 0)), float(uniform(7, 1))]
    True
    """
    seeds = np.atleast_1d(np.asarray(seed, dtype=np.uint64))
    counters = np.atleast_1d(np.asarray(positions, dtype=np.uint64))
    return draw(stream(seeds), counters).reshape(np.broadcast_shapes(np.shape(seed), np.shape(positions)))


def stream(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash seeds to the starting states of their streams, of the same shape (one dimension at least)."""
    return _mix(seeds + _GOLDEN)


def draw(streams: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Do what ``uniform`` does, of arrays, and of seeds whose ``stream`` is known: less than half of the work."""
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def kept_probabilities(logits: ArrayLike, temperature: float, top_k: int, top_p: float) -> NDArray[np.float64]:
    """Compute the distribution that is drawn from: temperature, then top-k, softmax, top-p; not renormalised.

    Source: the order of TensorRT-LLM's and Hugging Face's samplers; top-p after Holtzman et al., 2020.

    Shapes: ``logits [V]`` -> ``[V] float64``, where dropped tokens are 0. ``temperature`` > 0; ``top_k`` 0 = off;
    ``top_p`` 1 = off.

    Numerics: float64. Ties are never split: every token equal to the k-th largest logit stays, and a token stays while
    the mass *strictly above* its own probability is below ``top_p`` (so the most probable tokens always stay). A set
    so defined does not depend on how a sort orders equal values.

    >>> kept_probabilities(np.log([0.5, 0.25, 0.25]), 1.0, 0, 0.6).tolist()
    [0.5, 0.25, 0.25]
    >>> kept_probabilities(np.log([0.5, 0.25, 0.25]), 1.0, 0, 0.5).tolist()
    [0.5, 0.0, 0.0]
    """
    scaled: NDArray[np.float64] = np.asarray(logits, dtype=np.float64) / temperature
    if 0 < top_k < scaled.size:
        scaled = np.where(scaled >= np.partition(scaled, -top_k)[-top_k], scaled, -np.inf)
    weights: NDArray[np.float64] = np.exp(scaled - scaled.max())
    probabilities: NDArray[np.float64] = weights / weights.sum()
    if top_p < 1.0:
        values, group, counts = np.unique(-probabilities, return_inverse=True, return_counts=True)
        mass = np.cumsum(-values * counts)
        mass_above = np.concatenate(([0.0], mass[:-1]))
        probabilities[mass_above[group] >= top_p] = 0.0
    return probabilities


def sample_reference(logits: ArrayLike, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """Draw one token: the oracle of the sampler at the end of the target's graph.

    Shapes: ``logits [V]`` finite or -inf (at least one finite); ``uniform`` in [0, 1).

    Numerics: float64. ``temperature`` 0 takes the largest logit, the lowest id among equals, and ignores the rest.
    Otherwise inverse transform in token-id order over ``kept_probabilities``: the first token whose cumulative mass
    exceeds ``uniform`` times the kept mass; a token of zero mass is never drawn. A float32 sampler may differ where
    ``uniform`` lies within its rounding (about 1e-6) of a boundary.

    >>> sample_reference(np.log([0.5, 0.25, 0.25]), 1.0, 0, 1.0, 0.6)
    1
    >>> sample_reference([1.0, 3.0, 3.0], 0.0, 0, 1.0, 0.9)
    1
    """
    if temperature == 0.0:
        return int(np.argmax(np.asarray(logits)))
    cumulative = np.cumsum(kept_probabilities(logits, temperature, top_k, top_p))
    return int(np.argmax(cumulative > uniform * cumulative[-1]))


def log_probs_of(logits: NDArray[np.float32], token_ids: ArrayLike) -> NDArray[np.float32]:
    """Compute the log-probability of one token per row, under the softmax of the row's logits.

    Shapes: ``logits [R, V]`` finite or -inf (at least one finite in a row); ``token_ids [R]`` -> ``[R] float32``.

    Numerics: each row less its largest logit, summed in float64, so no logit overflows and the result is right to
    float32's rounding. A row's result does not depend on the other rows.

    >>> log_probs_of(np.log(np.array([[0.5, 0.25, 0.25]], np.float32)), [1]).round(4).tolist() == [np.float32(-1.3863)]
    True
    """
    # Row by row: the temporaries of a vocabulary stay in the cache, those of a step would not.
    log_probs = np.empty(len(logits), np.float32)
    for index, (row, token_id) in enumerate(zip(logits, np.asarray(token_ids).tolist(), strict=True)):
        largest = row.max()
        log_probs[index] = float(row[token_id] - largest) - np.log(np.exp(row - largest).sum(dtype=np.float64))
    return log_probs
