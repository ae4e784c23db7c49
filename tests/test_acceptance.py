from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import draftline.acceptance
from draftline.acceptance import accept_exact, accept_typical, acceptable_nodes, is_typical
from draftline.draft_trees import DraftTrees, empty_trees
from draftline.sampling import kept_probabilities, sample_reference, uniform
from draftline.speculation import Acceptance
from tests.reference_loop import plain_loop, reference_loop

TYPICAL = Acceptance("typical", epsilon=0.09, alpha=0.3)


def trees_of(sequences: list[list[tuple[int, int]]], roots: list[int]) -> DraftTrees:
    """Pack (parent, token) of draft nodes, one list per sequence."""
    trees = empty_trees(len(sequences), 1 + max(map(len, sequences)))
    trees.token_ids[:, 0], trees.log_probs[:, 0] = roots, 0.0
    for row, nodes in enumerate(sequences):
        trees.num_nodes[row] = 1 + len(nodes)
        for node, (parent, token) in enumerate(nodes, 1):
            trees.parents[row, node], trees.token_ids[row, node] = parent, token
            trees.log_probs[row, node], trees.sources[row, node] = -0.5, 0
    return trees


@st.composite
def tries(draw: st.DrawFn, num_tokens: int = 3) -> list[tuple[int, int]]:
    """Nodes (parent, token) of one tree whose siblings differ."""
    nodes: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(0, 30))):
        nodes.setdefault((draw(st.integers(0, len(nodes))), draw(st.integers(0, num_tokens - 1))))
    return list(nodes)


def paths_of(nodes: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in nodes:
        paths.append((*paths[parent], token))
    return paths


@settings(deadline=None)
@given(st.lists(tries(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_exact_acceptance_is_a_walk(sequences: list[list[tuple[int, int]]], seed: int) -> None:
    trees = trees_of(sequences, [9] * len(sequences))
    sampled = np.random.default_rng(seed).integers(0, 3, size=trees.parents.shape, dtype=np.int32)
    accepted = accept_exact(trees, sampled)
    assert accepted.paths.shape[1] == accepted.num_accepted_tokens.max() + 1
    assert accepted.bonus_ids.dtype == np.int32
    for row, nodes in enumerate(sequences):
        walk = [0]
        while (child := (walk[-1], int(sampled[row, walk[-1]]))) in nodes:
            walk.append(1 + nodes.index(child))
        assert accepted.paths[row].tolist() == walk + [-1] * (accepted.paths.shape[1] - len(walk))
        assert accepted.num_accepted_tokens[row] == len(walk) - 1
        assert accepted.bonus_ids[row] == sampled[row, walk[-1]]


def test_what_was_drawn_in_padding_is_not_looked_at() -> None:
    trees = trees_of([[(0, 1), (1, 2)], []], [9, 9])
    accepted = accept_exact(trees, np.array([[1, 2, 3], [5, -1, -1]], np.int32))
    assert accepted.paths.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert accepted.bonus_ids.tolist() == [3, 5]


# A target over three tokens whose distribution depends on the last two.
TARGET = np.log(np.random.default_rng(3).dirichlet([2.0, 2.0, 2.0], size=(4, 4))).astype(np.float32)


def drawn_by_target(text: list[int], seed: int, temperature: float) -> int:
    logits = TARGET[text[-2], text[-1]]
    return sample_reference(logits, temperature, 0, 1.0, float(uniform(seed, len(text))))


@settings(deadline=None, max_examples=60)
@given(st.lists(tries(), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.0, 0.7, 1.2]))
def test_the_text_does_not_depend_on_the_trees(
    trees: list[list[tuple[int, int]]], seed: int, temperature: float
) -> None:
    """The batched walk, the plain loop with drafts and the plain loop without write the same text."""
    prompt = [3, 3]

    def target(text: list[int]) -> int:
        return drawn_by_target(text, seed, temperature)

    answer = plain_loop(prompt, target, 12).token_ids
    oracle = reference_loop(prompt, target, lambda text: paths_of(trees[len(text) % len(trees)]), 12)
    assert oracle.token_ids == answer
    text = [*prompt, target(prompt)]
    for step in oracle.steps:
        nodes = trees[len(text) % len(trees)]
        sampled = np.array([[target([*text, *path]) for path in paths_of(nodes)]], np.int32)
        accepted = accept_exact(trees_of([nodes], text[-1:]), sampled)
        run = [paths_of(nodes)[node][-1] for node in accepted.paths[0, 1:].tolist()]
        assert run == step.accepted
        assert accepted.bonus_ids[0] == step.bonus_token
        text += [*run, int(accepted.bonus_ids[0])]
    assert text[2 : 2 + 12] == answer


def test_the_joint_distribution_is_the_targets() -> None:
    """Chi-square of three tokens over 4,000 seeds against enumeration, tree and chain mixed in one batch."""
    temperature, num_seeds = 1.2, 4000
    tree = [(0, 0), (0, 2), (1, 1), (1, 0), (2, 0), (3, 2), (5, 0)]
    chain = [(0, 1), (1, 0), (2, 2)]
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, num_seeds, 1000):
        seeds = list(range(start, start + 1000))
        texts: list[list[int]] = [[3, 3] for _ in seeds]
        while min(map(len, texts)) < 5:
            sequences = [tree if seed % 2 else chain for seed in seeds]
            batch = trees_of(sequences, [text[-1] for text in texts])
            sampled = sampled_by_target(sequences, texts, np.array(seeds), temperature)
            accepted = accept_exact(batch, sampled)
            for row, text in enumerate(texts):
                path = accepted.paths[row, 1 : 1 + accepted.num_accepted_tokens[row]]
                text += [*batch.token_ids[row, path].tolist(), int(accepted.bonus_ids[row])]
        for text in texts:
            counts[tuple(text[2:5])] = counts.get(tuple(text[2:5]), 0) + 1
    statistic = 0.0
    for first in range(3):
        for second in range(3):
            for third in range(3):
                probability = math.prod(
                    kept_probabilities(TARGET[before], temperature, 0, 1.0)[token]
                    for before, token in (((3, 3), first), ((3, first), second), ((first, second), third))
                )
                expected = probability * num_seeds
                statistic += (counts.get((first, second, third), 0) - expected) ** 2 / expected
    assert statistic < 54.1, "26 degrees of freedom, 0.1 %"


def sampled_by_target(
    sequences: list[list[tuple[int, int]]], texts: list[list[int]], seeds: NDArray[np.int64], temperature: float
) -> NDArray[np.int32]:
    """Draw after every node of a batch at once: inverse transform, as ``sample_reference`` does it."""
    width = 1 + max(map(len, sequences))
    before = np.zeros((len(texts), width, 2), dtype=np.int64)
    positions = np.zeros((len(texts), width), dtype=np.int64)
    for row, text in enumerate(texts):
        for node, path in enumerate(paths_of(sequences[row])):
            before[row, node] = [*text, *path][-2:]
            positions[row, node] = len(text) + len(path)
    mass = np.cumsum(np.exp(TARGET.astype(np.float64) / temperature), axis=-1)[before[..., 0], before[..., 1]]
    random = uniform(seeds[:, None], positions)
    return (mass > random[..., None] * mass[..., -1:]).argmax(axis=-1).astype(np.int32)


@settings(deadline=None)
@given(st.lists(tries(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_typical_acceptance_takes_the_longest_acceptable_path(
    sequences: list[list[tuple[int, int]]], seed: int
) -> None:
    trees = trees_of(sequences, [9] * len(sequences))
    generator = np.random.default_rng(seed)
    acceptable = generator.random(trees.parents.shape) < 0.6
    sampled = generator.integers(0, 3, size=trees.parents.shape, dtype=np.int32)
    accepted = accept_typical(trees, sampled, acceptable)
    for row, nodes in enumerate(sequences):
        walks = [[0]]
        for node, (parent, _) in enumerate(nodes, 1):
            walks.append([*walks[parent], node])
        walks = [walk for walk in walks if acceptable[row, walk[1:]].all()]
        longest = max(walks, key=len)  # the first of equals
        assert accepted.paths[row].tolist() == longest + [-1] * (accepted.paths.shape[1] - len(longest))
        assert accepted.num_accepted_tokens[row] == len(longest) - 1
        assert accepted.bonus_ids[row] == sampled[row, longest[-1]]


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 2.0]))
def test_typical_tokens_are_those_of_the_paper(seed: int, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(3, 6)).astype(np.float32)
    rows, tokens = np.divmod(np.arange(18), 6)
    typical = is_typical(logits, np.full(3, temperature, np.float32), rows, tokens.astype(np.int32), TYPICAL)
    for row, token, answer in zip(rows.tolist(), tokens.tolist(), typical.tolist(), strict=True):
        weights = [math.exp(float(logit) / float(np.float32(temperature))) for logit in logits[row]]
        probabilities = [weight / sum(weights) for weight in weights]
        entropy = -sum(p * math.log(p) for p in probabilities)
        threshold = min(0.09, 0.3 * math.exp(-entropy))
        if not math.isclose(probabilities[token], threshold, rel_tol=1e-4):
            assert answer == (probabilities[token] > threshold)


def test_a_flat_distribution_lowers_the_bar() -> None:
    flat = np.zeros((1, 100), np.float32)  # p = 0.01 each; exp(-H) = 0.01
    one, zero = np.ones(1, np.float32), np.zeros(1, np.int64)
    assert is_typical(flat, one, zero, np.zeros(1, np.int32), TYPICAL).all()
    assert not is_typical(flat, one, zero, np.zeros(1, np.int32), Acceptance("typical", 0.09, 1.5)).any()


@pytest.mark.parametrize("impossible", [-np.inf, -3.0e38])
def test_a_banned_token_is_never_typical(impossible: float) -> None:
    logits = np.array([[0.0, impossible]], np.float32)
    rows, one = np.zeros(2, np.int64), np.ones(1, np.float32)
    assert is_typical(logits, one, rows, np.array([0, 1], np.int32), TYPICAL).tolist() == [True, False]


def test_temperature_0_is_exact_among_typical_neighbours() -> None:
    # Every logit is equal: all tokens are typical, but a greedy sequence takes only what the target drew.
    trees = trees_of([[(0, 1), (1, 2)], [(0, 1), (1, 2)], []], [9, 9, 9])
    logits = np.zeros((int(trees.num_nodes.sum()), 4), np.float32)
    sampled = np.array([[1, 0, 0], [1, 0, 0], [3, 0, 0]], np.int32)
    temperature = np.array([0.0, 1.0, 1.0], np.float32)
    acceptable = acceptable_nodes(trees, logits, sampled, temperature, TYPICAL)
    assert acceptable.tolist() == [[False, True, False], [False, True, True], [False, False, False]]
    accepted = accept_typical(trees, sampled, acceptable)
    assert accepted.num_accepted_tokens.tolist() == [1, 2, 0]
    assert accepted.bonus_ids.tolist() == [0, 0, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_roots_and_padding_are_not_acceptable(temperature: float) -> None:
    trees = trees_of([[(0, 1), (1, 1)], []], [9, 9])
    sampled = np.array([[9, 9, 9], [9, -1, -1]], np.int32)  # every token of a root or of padding
    acceptable = acceptable_nodes(
        trees, np.zeros((4, 10), np.float32), sampled, np.full(2, temperature, np.float32), TYPICAL
    )
    assert acceptable.tolist() == [[False, temperature > 0, temperature > 0], [False, False, False]]


def test_a_node_is_tested_against_the_row_of_its_parent() -> None:
    trees = trees_of([[(0, 0)], [(0, 1), (0, 2), (2, 3)]], [9, 9])
    logits = np.full((6, 4), -20.0, np.float32)
    logits[0, 0] = logits[2, 2] = logits[4, 3] = 0.0  # rows: sequence 0 has 0-1, sequence 1 has 2-5
    sampled = np.zeros(trees.parents.shape, np.int32)
    acceptable = acceptable_nodes(trees, logits, sampled, np.ones(2, np.float32), TYPICAL)
    assert acceptable.tolist() == [[False, True, False, False], [False, False, True, True]]


def test_a_step_may_decode_nothing() -> None:
    trees, none = empty_trees(0, 1), np.zeros((0, 1), np.int32)
    for accepted in (accept_exact(trees, none), accept_typical(trees, none, np.zeros((0, 1), np.bool_))):
        assert accepted.paths.shape == (0, 1)
        assert accepted.num_accepted_tokens.shape == accepted.bonus_ids.shape == (0,)


def test_the_oracle_ends_at_every_offset_of_a_run() -> None:
    def target(text: list[int]) -> int:
        return text[-1] + 1

    def propose(text: list[int]) -> list[list[int]]:
        return [[text[-1] + 1, text[-1] + 2, text[-1] + 3], [text[-1] + 1, 99]]

    for length in range(1, 12):
        by_budget = reference_loop([0], target, propose, length)
        assert (by_budget.token_ids, by_budget.finish_reason) == (list(range(1, length + 1)), "max_tokens")
        by_end = reference_loop([0], target, propose, 50, {length + 1})
        assert (by_end.token_ids, by_end.finish_reason) == (list(range(1, length + 1)), "end_id")
    whole = reference_loop([0], target, propose, 9)
    assert [step.emitted for step in whole.steps] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert [(step.num_drafted, step.accepted, step.bonus_token) for step in whole.steps] == [
        (4, [2, 3, 4], 5),
        (4, [6, 7, 8], 9),
    ]


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.acceptance).failed == 0
