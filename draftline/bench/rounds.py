"""Interleaved rounds: every system does every workload once per round, so that a slow minute hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftline.bench.systems import System
from draftline.bench.workloads import Unit, Workload

SETTLE_SECONDS = 0.2  # worker threads of the system before spin for a moment


@dataclass(frozen=True)
class Measurement:
    """One number per round."""

    system: str
    workload: str
    unit: Unit
    values: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """``values`` are ``system``'s numbers divided by ``reference``'s, round by round; ``goal`` None = none is set.

    ``at_most``: the ratio may not be above the goal; otherwise not below it.
    """

    workload: str
    system: str
    reference: str
    values: tuple[float, ...]
    goal: float | None
    at_most: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether the median reaches the goal; None without a goal."""
        if self.goal is None:
            return None
        median = statistics.median(self.values)
        return median <= self.goal if self.at_most else median >= self.goal


def measure_rounds(
    systems: Sequence[System],
    workloads: Sequence[Workload],
    num_rounds: int,
    say: Callable[[str], None],
    *,
    learns: bool = False,
) -> list[Measurement]:
    """Return one measurement per system and workload, after a round that is not counted.

    The order of the systems turns from round to round. The round that is not counted is short, unless a system
    ``learns`` in it.
    """
    values: dict[tuple[str, int], list[float]] = {
        (system.name, place): [] for place in range(len(workloads)) for system in systems
    }
    for number in range(-1, num_rounds):
        for place, workload in enumerate(workloads):
            is_short = number < 0 and not learns
            num_tokens = min(workload.num_tokens, 4 + workload.num_prompts) if is_short else workload.num_tokens
            turn = number % len(systems)
            for system in [*systems[turn:], *systems[:turn]]:
                time.sleep(SETTLE_SECONDS)
                value = workload.evaluate(system.answer(workload.prompts(number + 1), num_tokens))
                if number >= 0:
                    values[system.name, place].append(value)
                    say(f"round {number + 1}/{num_rounds} {workload.name}: {system.name} {value:.1f} {workload.unit}")
    return [
        Measurement(name, workloads[place].name, workloads[place].unit, tuple(numbers))
        for (name, place), numbers in values.items()
    ]


def compute_ratio(
    measurements: Sequence[Measurement],
    workload: str,
    system: str,
    reference: str,
    goal: float | None = None,
    *,
    at_most: bool = False,
) -> Ratio:
    """Divide two systems' numbers of one workload, round by round."""
    found = {measurement.system: measurement for measurement in measurements if measurement.workload == workload}
    pairs = zip(found[system].values, found[reference].values, strict=True)
    return Ratio(workload, system, reference, tuple(one / other for one, other in pairs), goal, at_most)
