"""Isotonic regression: the nearest sequence that never decreases."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fit_isotonic(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit the non-decreasing sequence of least weighted squared error.

    Source: Barlow et al., Statistical Inference under Order Restrictions (1972): the fit at i is the greatest over
    j <= i of the least over k >= i of the weighted mean of ``values[j .. k]``.

    Shapes: ``values``, ``weights [..., K]`` float64, weights positive -> ``[..., K]``. The work is quadratic in K.

    >>> fit_isotonic(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    if bool((values[..., 1:] >= values[..., :-1]).all()):
        return values
    size = values.shape[-1]
    ends = np.zeros((2, *values.shape[:-1], size + 1))
    np.cumsum(weights * values, axis=-1, out=ends[0, ..., 1:])
    np.cumsum(weights, axis=-1, out=ends[1, ..., 1:])
    sums, masses = ends[..., None, 1:] - ends[..., :-1, None]  # [..., j, k]: over values[j .. k]
    upper = np.tri(size, dtype=np.bool_).T
    means = np.divide(sums, masses, out=np.full(sums.shape, np.inf), where=upper)
    least = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    greatest = np.maximum.accumulate(np.where(upper, least, -np.inf), axis=-2)
    fitted = np.diagonal(greatest, axis1=-2, axis2=-1)
    return np.maximum.accumulate(fitted, axis=-1)  # sums differ in their last bits within a level
