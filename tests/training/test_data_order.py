"""Which sequences are trained on, and in which batches."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draftline.training.data_order
from draftline.training.data_order import make_batches, split_sequences

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=300).map(np.array)


def test_examples() -> None:
    assert doctest.testmod(draftline.training.data_order).failed == 0


@given(LENGTHS, st.integers(1, 120), st.integers(0, 3), st.integers(0, 3))
def test_every_sequence_is_in_one_batch_within_the_budget(
    lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int
) -> None:
    batches = make_batches(np.arange(len(lengths)), lengths, batch_tokens, seed, epoch)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= batch_tokens


def test_batches_waste_little_and_differ_by_epoch_and_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(20, 500, 2000)
    sequences = np.arange(2000)
    orders = [make_batches(sequences, lengths, 2048, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for batches in orders:
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        assert padded < 1.05 * lengths.sum()
    texts = [str([batch.tolist() for batch in batches]) for batches in orders]
    assert (texts[0] == texts[3], len(set(texts))) == (True, 3)


def test_a_prompt_is_held_back_with_all_its_answers_whatever_comes_after() -> None:
    names = [f"own/{number}{repeat}" for repeat in ("", "#2", "#3") for number in range(500)]
    starts = 4 * np.arange(len(names) + 1)
    training, held_back = split_sequences(names, np.ones(starts[-1], bool), starts, 0.1, 0)
    prompts = [{names[number].partition("#")[0] for number in side} for side in (training, held_back)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[1]) == pytest.approx(50, abs=20)
    first, _ = split_sequences(names[:500], np.ones(2000, bool), starts[:501], 0.1, 0)
    assert first.tolist() == [number for number in training if number < 500]


def test_a_sequence_without_anything_to_predict_is_left_out() -> None:
    is_answer = np.array([0, 1, 0, 0, 0, 1, 1], bool)
    training, held_back = split_sequences(["a", "b", "c"], is_answer, np.array([0, 3, 6, 7]), 0.5, 0)
    assert [*training, *held_back] == [1]
