"""Counts add up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runtime.speculation_numbers import (
    NO_SPECULATION,
    SpeculationCounters,
    SpeculationNumbers,
    sum_numbers,
)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    counts = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
    return [(drafted, verified, accepted) for accepted, verified, drafted in map(sorted, draw(st.lists(counts)))]


def count(some: list[tuple[int, int, int]]) -> SpeculationNumbers:
    counters = SpeculationCounters()
    for drafted, verified, accepted in some:
        counters.add_step(drafted, verified, accepted)
        counters.add_emitted(accepted + 1)
        counters.add_draft_forward(2)
        counters.add_target_forward()
    return counters.numbers()


@given(steps())
def test_counts_agree_with_each_other(some: list[tuple[int, int, int]]) -> None:
    numbers = count(some)
    accepted = [step[2] for step in some]
    assert numbers.num_steps == numbers.num_bonus_tokens == sum(numbers.histogram) == len(some)
    assert numbers.num_accepted_tokens == sum(place * share for place, share in enumerate(numbers.histogram))
    assert numbers.num_emitted_tokens == sum(accepted) + len(some)
    assert numbers.num_draft_forwards == 2 * numbers.num_target_forwards == 2 * len(some)
    if some:
        assert numbers.acceptance_length == pytest.approx(1 + sum(accepted) / len(some))
        assert numbers.acceptance_length == pytest.approx(1 + sum(numbers.acceptance_rate_at))
    rates = (1.0, *numbers.acceptance_rate_at)
    assert all(deeper <= rate for rate, deeper in itertools.pairwise(rates))
    for depth, rate in enumerate(numbers.acceptance_rate_at, start=1):
        assert rate == sum(one >= depth for one in accepted) / len(some)


@given(st.lists(steps(), max_size=4))
def test_a_sum_is_what_one_counter_would_have_counted(parts: list[list[tuple[int, int, int]]]) -> None:
    assert sum_numbers(map(count, parts)) == count([step for part in parts for step in part])


def test_nothing_happened() -> None:
    assert SpeculationCounters().numbers() == sum_numbers([]) == NO_SPECULATION
    assert NO_SPECULATION.acceptance_length == NO_SPECULATION.acceptance_rate == 0.0
    assert NO_SPECULATION.acceptance_rate_at == ()


def test_more_cannot_be_accepted_than_was_verified() -> None:
    with pytest.raises(AssertionError):
        SpeculationCounters().add_step(3, 1, 2)
