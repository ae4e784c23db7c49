"""Rotary position tables: cosines and sines of every position, with the scaling rules of published checkpoints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import BuildError


def build_rotary_tables(
    rotary_size: int,
    base: float,
    scaling: dict[str, Any] | None,
    max_position_embeddings: int,
    num_positions: int,
    max_seq_len: int | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Build the cosine and sine tables of positions 0 .. num_positions - 1, for heads that turn ``rotary_size``
    elements.

    Source: RoPE (arXiv 2104.09864) in the half-split convention of Hugging Face; ``linear`` position interpolation
    (arXiv 2306.15595), ``dynamic`` NTK, ``llama3`` (Llama 3.1's frequency bands), ``yarn`` (arXiv 2309.00071),
    ``longrope`` (arXiv 2402.13753). ``dynamic`` depends on the length of the text: the row of position p uses the base
    of a text of p + 1 tokens, which is what token-by-token decoding in ``transformers`` gives and does not depend on
    how a prompt is cut into chunks. ``longrope`` has factors for texts within the original length and others for longer
    ones, and keys once cached cannot change theirs: ``max_seq_len``, the engine's limit (None: the number of
    positions), chooses for all texts.

    Shapes: two arrays ``[num_positions, rotary_size / 2] float32``; angles are computed in float64.
    Raises: BuildError for a ``rope_type`` not listed above.

    >>> cosines, sines = build_rotary_tables(4, 10000.0, None, 16, 2)
    >>> cosines.astype(np.float64).round(3).tolist(), sines.astype(np.float64).round(3).tolist()
    ([[1.0, 1.0], [0.54, 1.0]], [[0.0, 0.0], [0.841, 0.01]])
    """
    exponents = np.arange(0, rotary_size, 2, dtype=np.float64) / rotary_size
    frequencies = base**-exponents
    positions = np.arange(num_positions, dtype=np.float64)[:, None]
    magnitude = 1.0
    rope_type = scaling["rope_type"] if scaling else "default"
    if rope_type == "default":
        angles = positions * frequencies
    elif rope_type == "linear":
        assert scaling
        angles = positions * (frequencies / scaling["factor"])
    elif rope_type == "dynamic":
        assert scaling
        angles = positions * _dynamic_frequencies(
            positions, base, rotary_size, exponents, scaling["factor"], max_position_embeddings
        )
    elif rope_type == "llama3":
        assert scaling
        angles = positions * _llama3_frequencies(frequencies, scaling)
    elif rope_type == "yarn":
        assert scaling
        frequencies, magnitude = _yarn_frequencies(frequencies, base, rotary_size, scaling, max_position_embeddings)
        angles = positions * frequencies
    elif rope_type == "longrope":
        assert scaling
        is_long = (max_seq_len or num_positions) > scaling["original_max_position_embeddings"]
        angles = positions * (frequencies / scaling["long_factor" if is_long else "short_factor"])
        magnitude = _longrope_magnitude(scaling, max_position_embeddings)
    else:
        raise BuildError(
            "rotary_scaling.rope_type",
            "must be default, linear, dynamic, llama3, yarn or longrope",
            rope_type,
            "use a checkpoint with one of these",
        )
    return (np.cos(angles) * magnitude).astype(np.float32), (np.sin(angles) * magnitude).astype(np.float32)


def _dynamic_frequencies(
    positions: NDArray[np.float64],
    base: float,
    head_size: int,
    exponents: NDArray[np.float64],
    factor: float,
    max_position_embeddings: int,
) -> NDArray[np.float64]:
    lengths = np.maximum(positions + 1, max_position_embeddings)
    stretch = factor * lengths / max_position_embeddings - (factor - 1)
    frequencies: NDArray[np.float64] = (base * stretch ** (head_size / (head_size - 2))) ** -exponents
    return frequencies


def _llama3_frequencies(frequencies: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    smooth = (1 - blend) * frequencies / factor + blend * frequencies
    long_waves = wavelengths > original / low
    short_waves = wavelengths < original / high
    return np.where(long_waves, frequencies / factor, np.where(short_waves, frequencies, smooth))


def _longrope_magnitude(scaling: dict[str, Any], max_position_embeddings: int) -> float:
    """Return what cosines and sines are multiplied by: of texts of any length, as in ``transformers``."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_frequencies(
    frequencies: NDArray[np.float64],
    base: float,
    head_size: int,
    scaling: dict[str, Any],
    max_position_embeddings: int,
) -> tuple[NDArray[np.float64], float]:
    original = scaling.get("original_max_position_embeddings") or max_position_embeddings
    factor = scaling["factor"]

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
        else:
            attention_factor = magnitude(factor)

    def dimension_of(rotations: float) -> float:
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    interpolate = np.clip((np.arange(head_size // 2) - low) / width, 0, 1)
    blended = frequencies / factor * interpolate + frequencies * (1 - interpolate)
    return blended, float(attention_factor)
