"""When to try again what did not seem to pay."""

from __future__ import annotations

_FIRST_INTERVAL = 8
_MAX_INTERVAL = 64
_SHARE = 0.015  # of the time, that probes may take where nothing comes of them


class ProbeTimer:
    """Count steps between probes: more after each that failed, 8, 16, 32, 64; fewer at once when they succeed.

    Costs are in units of the step that a probe takes the place of. What costs more than its share even at the longest
    interval is probed more rarely.
    """

    def __init__(self) -> None:
        self._interval = _FIRST_INTERVAL
        self._num_steps = 0
        self._mean_gain = 0.0

    def num_affordable(self, cost: float) -> int:
        """Return how many forwards of this cost a probe may have at the longest interval; at least one."""
        return max(int(_SHARE * _MAX_INTERVAL / max(cost, 1e-6)), 1)

    def is_due(self, cost: float) -> bool:
        """Count a step; True where it shall be a probe, which costs ``cost``."""
        self._num_steps += 1
        rarest = cost / _SHARE
        if self._num_steps <= (rarest if rarest > _MAX_INTERVAL else self._interval):
            return False
        self._num_steps = 0
        return True

    def settle(self, gain: float) -> None:
        """Take note of what the last probe gained over the step it replaced; negative = lost.

        One success among failures says little where a probe costs much: the mean of the last ones decides.
        """
        self._mean_gain = (self._mean_gain + gain) / 2
        if self._mean_gain > 0:
            self._interval //= 4
        elif gain > 0:
            self._interval //= 2
        else:
            self._interval = min(max(2 * self._interval, 1), _MAX_INTERVAL)

    def reset(self) -> None:
        """Begin anew: what was probed for is being done."""
        self._interval = _FIRST_INTERVAL
        self._num_steps = 0
