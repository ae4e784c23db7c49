"""What drafting costs, by depth and by the number of sequences, as measured in the steps themselves."""

from __future__ import annotations

_RATE = 0.2
_MAX_SURPRISE = 3.0  # a measurement beyond so many times the estimate counts as one of so many


class DraftCost:
    """``fixed + depth * per_depth`` milliseconds, per power of two of the number of sequences.

    ``fixed`` is what steps without drafting spend on drafters as well: heads follow the committed tokens even then.
    """

    def __init__(self) -> None:
        self._fixed_ms: dict[int, float] = {}
        self._per_depth_ms: dict[int, float] = {}

    def observe(self, num_sequences: int, depth: int, milliseconds: float) -> None:
        """Learn that a step that drafted ``depth`` deep (0 = did not draft) spent so much on drafters."""
        size_class = num_sequences.bit_length()
        if depth == 0:
            _follow(self._fixed_ms, size_class, milliseconds)
        else:
            per_depth = max(milliseconds - _nearest(self._fixed_ms, size_class), 0.0) / depth
            _follow(self._per_depth_ms, size_class, per_depth)

    def fixed_ms(self, num_sequences: int) -> float:
        return _nearest(self._fixed_ms, num_sequences.bit_length())

    def per_depth_ms(self, num_sequences: int) -> float:
        return _nearest(self._per_depth_ms, num_sequences.bit_length())


def _nearest(estimates: dict[int, float], size_class: int) -> float:
    """The estimate of this class, or of the nearest one known, or 0: before anything is known, drafting is tried."""
    if size_class in estimates or not estimates:
        return estimates.get(size_class, 0.0)
    return estimates[min(estimates, key=lambda known: (abs(known - size_class), known))]


def _follow(estimates: dict[int, float], size_class: int, value: float) -> None:
    known = estimates.get(size_class)
    if known is None:
        estimates[size_class] = value
    else:
        estimates[size_class] = known + _RATE * (min(value, _MAX_SURPRISE * max(known, 1e-3)) - known)
