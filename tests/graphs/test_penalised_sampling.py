"""Penalties, bans and bias under speculation: the texts are those of plain decoding, and their law is the target's.

The target is a table of logits by the last token, so that every probability can be enumerated.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.acceptance import accept_exact
from draftline.draft_trees import DraftTrees
from draftline.graphs.operators import SamplingOperators
from draftline.logit_edits import NO_EDITS, edit_logits_reference
from draftline.logit_rules import LogitRules, build_edits
from draftline.sampling import kept_probabilities, uniform
from draftline.tree import position_offsets
from tests.graphs.test_sampler import Rule, both_forms, sample

VOCAB_SIZE, NUM_DRAWN, NUM_TEXTS = 4, 3, 1200
TEMPERATURE, TOP_K, TOP_P = 0.8, 0, 0.97
PROMPT = [2, 1]
LOGITS = (np.random.default_rng(4).standard_normal((VOCAB_SIZE, VOCAB_SIZE)) * 0.8).astype(np.float32)
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.4}
BANS = {"min_tokens": 2, "end_ids": (3,), "bad_words": ((0, 1), (2, 2, 2)), "logit_bias": ((0, 0.7),)}
SHAPES = {"plain": [-1], "chain": [-1, 0, 1, 2], "tree": [-1, 0, 0, 0, 1, 1, 2, 4, 4]}


@lru_cache
def drawn_texts(operators: SamplingOperators, shape: str, with_bans: bool) -> NDArray[np.int64]:
    """Draw the first tokens of one answer per seed, ``[NUM_TEXTS, NUM_DRAWN]``, in steps of trees of one shape."""
    parents = np.array(SHAPES[shape], np.int32)
    depths = position_offsets(parents)
    # Siblings are different tokens: that of a node is its parent's plus its place among its siblings, and a shift.
    places = [int(np.count_nonzero(parents[:node] == parents[node])) for node in range(len(parents))]
    parameters = PENALTIES | (BANS if with_bans else {})
    rules = [LogitRules(PROMPT, **parameters) for _ in range(NUM_TEXTS)]  # type: ignore[arg-type]
    texts = [list(PROMPT) for _ in range(NUM_TEXTS)]
    seeds = np.arange(NUM_TEXTS)
    while active := [seed for seed in seeds if len(texts[seed]) < len(PROMPT) + NUM_DRAWN]:
        token_ids = np.empty((len(active), len(parents)), np.int32)
        token_ids[:, 0] = [texts[seed][-1] for seed in active]
        for node in range(1, len(parents)):
            token_ids[:, node] = (token_ids[:, parents[node]] + places[node]) % VOCAB_SIZE
        trees = DraftTrees(
            parents=np.tile(parents, (len(active), 1)),
            token_ids=token_ids,
            log_probs=np.zeros(token_ids.shape, np.float32),
            sources=np.zeros(token_ids.shape, np.int8),
            num_nodes=np.full(len(active), len(parents)),
        )
        positions = np.array([len(texts[seed]) for seed in active])[:, None] + depths
        numbers = uniform(np.array(active)[:, None], positions).ravel().tolist()
        edits = build_edits([rules[seed] for seed in active], trees) or NO_EDITS
        sampling = [Rule(TEMPERATURE, TOP_K, TOP_P, number) for number in numbers]
        sampled = sample(operators, LOGITS[token_ids.ravel()], sampling, edits=edits)
        accepted = accept_exact(trees, np.array(sampled, np.int32).reshape(token_ids.shape))
        for row, seed in enumerate(active):
            path = accepted.paths[row, 1 : accepted.num_accepted_tokens[row] + 1]
            new = [*token_ids[row, path].tolist(), int(accepted.bonus_ids[row])]
            rules[seed].append(new)
            texts[seed] += new
    return np.array([text[len(PROMPT) :][:NUM_DRAWN] for text in texts])


@both_forms
@pytest.mark.parametrize("with_bans", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_same_seed_gives_the_same_text(operators: SamplingOperators, shape: str, with_bans: bool) -> None:
    np.testing.assert_array_equal(drawn_texts(operators, shape, with_bans), drawn_texts(operators, "plain", with_bans))


@both_forms
@pytest.mark.parametrize("with_bans", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_joint_distribution_is_the_targets(operators: SamplingOperators, shape: str, with_bans: bool) -> None:
    """Chi-squared over all texts of three tokens, at the 99.9 % point; what has no probability never occurs."""
    parameters = PENALTIES | (BANS if with_bans else {})
    expected = np.ones((VOCAB_SIZE,) * NUM_DRAWN)
    for drawn in itertools.product(range(VOCAB_SIZE), repeat=NUM_DRAWN):
        for count, token_id in enumerate(drawn):
            text = [*PROMPT, *drawn[:count]]
            edited = edit_logits_reference(LOGITS[text[-1]], text, len(PROMPT), **parameters)  # type: ignore[arg-type]
            kept = kept_probabilities(edited, TEMPERATURE, TOP_K, TOP_P)
            expected[drawn] *= kept[token_id] / kept.sum()
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(drawn_texts(operators, shape, with_bans).T), 1)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert np.count_nonzero(~possible) >= (20 if with_bans else 0)
    mean = NUM_TEXTS * expected[possible]
    degrees = mean.size - 1
    statistic = ((counts[possible] - mean) ** 2 / mean).sum()
    assert statistic < degrees + 3.3 * (2 * degrees) ** 0.5 + 4
