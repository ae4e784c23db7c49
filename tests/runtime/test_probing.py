"""When probes are due, and the small estimators beside them."""

from __future__ import annotations

import numpy as np
import pytest

from draftline.runtime.candidate_supply import CandidateSupply
from draftline.runtime.draft_cost import DraftCost
from draftline.runtime.probing import ProbeTimer


def steps_until_due(timer: ProbeTimer, cost: float) -> int:
    return next(step for step in range(1, 1000) if timer.is_due(cost))


def test_failures_make_probes_rarer_up_to_a_limit() -> None:
    timer, waits = ProbeTimer(), []
    for _ in range(6):
        waits.append(steps_until_due(timer, 0.1))
        timer.settle(-0.1)
    assert waits == [9, 17, 33, 65, 65, 65]


def test_successes_bring_them_close_and_a_reset_begins_anew() -> None:
    timer = ProbeTimer()
    for _ in range(3):
        timer.settle(0.5)
    assert steps_until_due(timer, 0.1) == 1
    timer.reset()
    assert steps_until_due(timer, 0.1) == 9


def test_one_success_among_failures_counts_for_less() -> None:
    timer = ProbeTimer()
    for gain in (-0.9, -0.9, -0.9, 0.1):
        timer.settle(gain)
    assert steps_until_due(timer, 0.1) == 33


def test_what_costs_too_much_is_rarer_still() -> None:
    timer = ProbeTimer()
    assert timer.num_affordable(0.05) > timer.num_affordable(0.5) == 1
    assert steps_until_due(timer, 3.0) == 201


def test_draft_cost_is_told_apart_from_what_is_spent_anyway() -> None:
    cost = DraftCost()
    assert cost.per_depth_ms(4) == cost.fixed_ms(4) == 0.0
    cost.observe(4, 0, 2.0)
    for _ in range(3):
        cost.observe(4, 5, 12.0)
    assert cost.fixed_ms(5) == 2.0  # 4..7 sequences are one class
    assert cost.per_depth_ms(7) == pytest.approx(2.0)
    assert cost.per_depth_ms(1) == pytest.approx(2.0)  # the nearest that is known
    cost.observe(1, 5, 7.0)
    assert cost.per_depth_ms(1) == pytest.approx(1.0)
    assert cost.per_depth_ms(16) == pytest.approx(2.0)


def test_supply_counts_candidates_by_quality_and_depth() -> None:
    supply = CandidateSupply(2)
    supply.observe(np.array([0.9, 0.8, 0.1, 0.4]), np.array([1, 1, 1, 2]), 2, 2, 1)
    nodes, tokens = supply.totals()
    assert supply.is_known
    assert nodes[:, -1].tolist() == [1.5, 2.0]
    assert tokens[:, -1] == pytest.approx([0.9, 1.1])
    assert nodes[0, 0] == 1.0  # the two likely ones share the first bin
    assert tokens[0, 0] == pytest.approx(0.85)


def test_depths_that_were_not_drafted_keep_what_was_known_of_them() -> None:
    supply = CandidateSupply(2)
    supply.observe(np.array([0.9]), np.array([1]), 1, 1, 1)
    assert not supply.is_known
    supply.observe(np.array([0.9, 0.5]), np.array([1, 2]), 1, 2, 1)
    for _ in range(50):
        supply.observe(np.array([0.01]), np.array([1]), 1, 1, 1)
    tokens = supply.totals()[1]
    assert tokens[0, -1] == pytest.approx(0.01, abs=0.01)
    assert tokens[1, -1] - tokens[0, -1] == pytest.approx(0.5)
