"""The price of a large tree among small ones."""

from __future__ import annotations

import numpy as np
import pytest

from draftline.runtime.uneven_cost import UnevenCost


def price(cost: UnevenCost, num_sequences: int, largest_tree: int) -> float:
    return float(cost.at(num_sequences, np.array([largest_tree]))[0])


def test_nothing_costs_more_before_it_was_seen() -> None:
    assert UnevenCost().at(16, np.array([[1, 2], [11, 5000]])).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_large_trees_cost_what_they_were_seen_to_cost() -> None:
    cost = UnevenCost()
    for _ in range(60):
        cost.observe(16, 2, 1.0)
        cost.observe(17, 11, 32.0)  # 16 .. 31 sequences and 9 .. 16 nodes are one class each
    assert price(cost, 16, 1) == 0.0
    assert price(cost, 16, 2) == pytest.approx(1.0, abs=0.2)
    assert price(cost, 16, 5) == pytest.approx(1.0, abs=0.5)  # never seen: as the next smaller ones
    assert price(cost, 31, 16) == pytest.approx(32.0, abs=1.0)
    assert price(cost, 16, 5000) == pytest.approx(32.0, abs=3.0)
    assert price(cost, 8, 11) == 0.0


def test_one_sequence_and_plain_steps_teach_nothing() -> None:
    cost = UnevenCost()
    for _ in range(9):
        cost.observe(1, 11, 50.0)
        cost.observe(16, 1, 50.0)
    assert price(cost, 1, 11) == price(cost, 16, 11) == 0.0


def test_what_no_longer_holds_is_forgotten_and_is_never_a_gain() -> None:
    cost = UnevenCost()
    for beyond_ms in (30.0, -30.0):
        for _ in range(80):
            cost.observe(4, 8, beyond_ms)
        assert price(cost, 4, 8) == pytest.approx(max(beyond_ms, 0.0), abs=1.0)
