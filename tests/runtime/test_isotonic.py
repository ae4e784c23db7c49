"""Isotonic regression against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runtime.isotonic import fit_isotonic

POINTS = st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), min_size=1, max_size=12)


def pool_adjacent_violators(values: list[float], weights: list[float]) -> list[float]:
    levels: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        levels.append((value, weight, 1))
        while len(levels) > 1 and levels[-2][0] >= levels[-1][0]:
            (value1, weight1, size1), (value2, weight2, size2) = levels[-2:]
            total = weight1 + weight2
            levels[-2:] = [((value1 * weight1 + value2 * weight2) / total, total, size1 + size2)]
    return [value for value, _, size in levels for _ in range(size)]


@given(POINTS)
def test_equals_pooling_adjacent_violators(points: list[tuple[float, float]]) -> None:
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    fitted = fit_isotonic(np.array(values), np.array(weights))
    assert fitted.tolist() == pytest.approx(pool_adjacent_violators(values, weights), abs=1e-9)
    assert bool(np.all(np.diff(fitted) >= 0))


@given(POINTS)
def test_rows_are_fitted_apart(points: list[tuple[float, float]]) -> None:
    values, weights = np.array(points).T
    both = fit_isotonic(np.stack([values, values[::-1]]), np.stack([weights, weights[::-1]]))
    assert both[0] == pytest.approx(fit_isotonic(values, weights))
    assert both[1] == pytest.approx(fit_isotonic(values[::-1], weights[::-1]))
