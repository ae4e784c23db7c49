"""Perplexity of a text, and how far two networks' distributions are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RANDOM = 1 / 16  # of the vocabulary: models that have learned a language stay far below such a perplexity


@dataclass(frozen=True)
class Float32Comparison:
    """The network in float32, and how the engine's differs from it.

    ``nll_increase``: of the engine over it, in nats per token. ``same_greedy_tokens``: the share of positions, 0..1,
    where both find the same token the most probable. ``kl_divergence``: of the engine's distributions from those in
    float32, in nats, the mean over positions.
    """

    nll: float
    perplexity: float
    nll_increase: float
    same_greedy_tokens: float
    kl_divergence: float


@dataclass(frozen=True)
class PerplexityReport:
    """Of ``num_tokens`` tokens of ``draftline.stages.perplexity_text``, each predicted from those before it.

    ``nll``: the engine's network's negative log-likelihood in nats per token; ``perplexity`` is its exponential.
    ``looks_random``: whether it does little better than guessing. ``float32``: None for an engine that rounds nothing.
    """

    num_tokens: int
    nll: float
    perplexity: float
    looks_random: bool
    float32: Float32Comparison | None


class RowScores(NamedTuple):
    """Of T positions: ``[T] float64`` each, ``same_greedy`` is bool."""

    nll: NDArray[np.float64]
    float32_nll: NDArray[np.float64]
    same_greedy: NDArray[np.bool_]
    kl_divergence: NDArray[np.float64]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-probabilities ``[T, V] float32`` of ``logits [T, V]``; sums are float64."""
    log_probs: NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
    totals = np.exp(log_probs).sum(axis=1, keepdims=True, dtype=np.float64)
    log_probs -= np.log(totals).astype(np.float32)
    return log_probs


def score_rows(
    log_probs: NDArray[np.float32], float32_log_probs: NDArray[np.float32], next_ids: NDArray[np.int64]
) -> RowScores:
    """Compare two networks' log-probabilities ``[T, V] float32`` of T positions followed by ``next_ids [T] int64``.

    >>> even, sure = np.log(np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32))
    >>> [round(float(column[0]), 4) for column in score_rows(even, sure, np.array([1]))]
    [0.6931, 0.2877, 0.0, 0.1308]
    """
    rows = np.arange(len(next_ids))
    divergence = np.sum(np.exp(float32_log_probs) * (float32_log_probs - log_probs), axis=1, dtype=np.float64)
    return RowScores(
        -log_probs[rows, next_ids].astype(np.float64),
        -float32_log_probs[rows, next_ids].astype(np.float64),
        log_probs.argmax(axis=1) == float32_log_probs.argmax(axis=1),
        divergence,
    )


def summarise_scores(scores: Sequence[RowScores], vocab_size: int, *, rounds: bool) -> PerplexityReport:
    """Average over all positions; rounded to what two machines agree about. ``rounds``: whether the engine does."""
    nll, float32_nll, same_greedy, divergence = (np.concatenate(column) for column in zip(*scores, strict=True))
    mean, float32_mean = float(nll.mean()), float(float32_nll.mean())
    comparison = Float32Comparison(
        nll=round(float32_mean, 4),
        perplexity=_perplexity(float32_mean),
        nll_increase=round(mean - float32_mean, 4),
        same_greedy_tokens=round(float(same_greedy.mean()), 4),
        kl_divergence=round(max(0.0, float(divergence.mean())), 5),
    )
    return PerplexityReport(
        num_tokens=len(nll),
        nll=round(mean, 4),
        perplexity=_perplexity(mean),
        looks_random=mean > math.log(RANDOM * vocab_size),
        float32=comparison if rounds else None,
    )


def describe_report(report: PerplexityReport, precision: str) -> Iterator[str]:
    """Yield the lines that whoever runs the pipeline reads."""
    line = f"perplexity {report.perplexity:.4g} in {precision}"
    if report.float32:
        increase = report.perplexity / report.float32.perplexity - 1
        line += f", {report.float32.perplexity:.4g} in float32 ({increase:+.1%})"
        line += f"; the same greedy token at {report.float32.same_greedy_tokens:.1%} of {report.num_tokens} positions"
    yield line
    if report.looks_random:
        yield "so high a perplexity is that of damaged weights, or of a model that knows no English"


def _perplexity(nll: float) -> float:
    return round(math.exp(min(nll, 700.0)), 3)
