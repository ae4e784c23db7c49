"""The edits of trees against ``edit_logits_reference``, which knows one position at a time."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import draftline.logit_edits
from draftline.draft_trees import DraftTrees
from draftline.logit_edits import BANNED, LogitEdits, edit_logits_reference, edited_logits
from draftline.logit_rules import LogitRules, build_edits

VOCAB_SIZE = 9  # so small that words match and tokens repeat
token_ids = st.integers(0, VOCAB_SIZE - 1)
texts = st.lists(token_ids, min_size=1, max_size=12)

parameters: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -0.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.1, -0.7]),
        "min_tokens": st.integers(0, 8),
        "end_ids": st.frozensets(token_ids, max_size=3),
        "bad_words": st.lists(st.lists(token_ids, min_size=1, max_size=4).map(tuple), max_size=8),
        "logit_bias": st.lists(st.tuples(token_ids, st.sampled_from([0.0, 1.5, -2.25, 0.1])), max_size=4),
    },
)


@st.composite
def trees(draw: st.DrawFn, root: int) -> tuple[list[int], list[int]]:
    num_nodes = draw(st.integers(1, 10))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    return parents, [root, *(draw(token_ids) for _ in range(1, num_nodes))]


def padded(shapes: list[tuple[list[int], list[int]]]) -> DraftTrees:
    num_nodes = np.array([len(tokens) for _, tokens in shapes], np.int64)
    parents, tokens = np.full((2, len(shapes), num_nodes.max()), -1, np.int32)
    for row, (its_parents, its_tokens) in enumerate(shapes):
        parents[row, : len(its_parents)], tokens[row, : len(its_tokens)] = its_parents, its_tokens
    log_probs = np.zeros(parents.shape, np.float32)
    return DraftTrees(parents, tokens, log_probs, np.zeros(parents.shape, np.int8), num_nodes)


def path_tokens(parents: list[int], tokens: list[int], node: int) -> list[int]:
    """Tokens from the root, without it, to the node."""
    return [] if node == 0 else [*path_tokens(parents, tokens, parents[node]), tokens[node]]


def assert_no_pair_twice(edits: LogitEdits | None) -> None:
    if edits is not None:
        assert len(np.unique(np.stack([edits.rows, edits.token_ids]), axis=1).T) == len(edits.rows)


def check(
    all_parameters: list[dict[str, Any] | None],
    prompts: list[list[int]],
    answers: list[list[int]],
    shapes: list[tuple[list[int], list[int]]],
    logits: NDArray[np.float32],
    edits: LogitEdits | None,
) -> None:
    assert_no_pair_twice(edits)
    edited = edited_logits(logits, edits)
    row = 0
    for its, prompt, answer, (parents, tokens) in zip(all_parameters, prompts, answers, shapes, strict=True):
        for node in range(len(parents)):
            text = prompt + answer + path_tokens(parents, tokens, node)
            expected = edit_logits_reference(logits[row], text, len(prompt), **(its or {}))
            assert edited[row].tolist() == expected.tolist(), (row, node)
            row += 1
    assert row == len(logits)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_each_node_is_edited_as_its_own_text(data: st.DataObject) -> None:
    num_sequences = data.draw(st.integers(1, 4))
    all_parameters = [data.draw(st.one_of(st.none(), parameters)) for _ in range(num_sequences)]
    prompts = [data.draw(texts) for _ in range(num_sequences)]
    answers = [data.draw(st.lists(token_ids, max_size=9)) for _ in range(num_sequences)]
    shapes = [data.draw(trees((prompt + answer)[-1])) for prompt, answer in zip(prompts, answers, strict=True)]
    rules: list[LogitRules | None] = []
    for its, prompt, answer in zip(all_parameters, prompts, answers, strict=True):
        if its is None:
            rules.append(None)
            continue
        its_rules = LogitRules(prompt, **its)
        cut = data.draw(st.integers(0, len(answer)))
        its_rules.append(answer[:cut])
        its_rules.append(answer[cut:])
        rules.append(its_rules)
    num_rows = sum(len(parents) for parents, _ in shapes)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = random.standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32)
    drafted = padded(shapes)
    arrays = (drafted.parents, drafted.token_ids, drafted.log_probs, drafted.sources, drafted.num_nodes)
    before = [array.copy() for array in arrays]
    check(all_parameters, prompts, answers, shapes, logits, build_edits(rules, drafted))
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)
    # And without trees, after the same rules have been asked once: asking changes nothing.
    roots = [([-1], [(prompt + answer)[-1]]) for prompt, answer in zip(prompts, answers, strict=True)]
    check(all_parameters, prompts, answers, roots, logits[:num_sequences], build_edits(rules))


@settings(deadline=None)
@given(texts, parameters)
def test_neutral_rules_edit_nothing(prompt: list[int], its: dict[str, Any]) -> None:
    rules = LogitRules(prompt, **its)
    if rules.is_neutral:
        assert build_edits([rules]) is None
    logits = np.random.default_rng(0).standard_normal(VOCAB_SIZE).astype(np.float32)
    changes = edit_logits_reference(logits, prompt, len(prompt), **its).tolist() != logits.tolist()
    assert not (rules.is_neutral and changes)


def test_off_is_neutral() -> None:
    assert LogitRules([1, 2]).is_neutral
    assert LogitRules([1, 2], end_ids=[2]).is_neutral
    assert LogitRules([1, 2], min_tokens=4).is_neutral, "no end id to ban"
    assert LogitRules([1, 2], logit_bias=[(3, 0.0)]).is_neutral
    assert not LogitRules([1, 2], min_tokens=1, end_ids=[2]).is_neutral
    assert not LogitRules([1, 2], bad_words=[(3, 4)]).is_neutral


def test_a_step_of_neutral_rules_has_no_edits() -> None:
    assert build_edits([None, None]) is None
    satisfied = LogitRules([1], min_tokens=2, end_ids=[0], bad_words=[(3, 4)])
    satisfied.append([5, 6])
    assert build_edits([None, satisfied]) is None


def test_min_tokens_frees_the_end_id_on_the_path() -> None:
    """An answer of one token, min_tokens 3: the root and its child may not end, the grandchild may."""
    rules = LogitRules([7, 8], min_tokens=3, end_ids=[0, 1])
    rules.append([5])
    edits = build_edits([None, rules], padded([([-1, 0], [3, 3]), ([-1, 0, 1], [5, 4, 4])]))
    assert edits is not None
    banned = edits.offset == np.float32(BANNED)
    assert sorted(zip(edits.rows[banned].tolist(), edits.token_ids[banned].tolist(), strict=True)) == [
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
    ]


@pytest.mark.parametrize("prompt_end", [0, 1, 2])
def test_a_bad_word_reaches_over_prompt_answer_and_path(prompt_end: int) -> None:
    """The word 1 2 3 4, of which some tokens are in the prompt, one is the answer and the rest are drafted."""
    word = (1, 2, 3, 4)
    rules = LogitRules([8, *word[:prompt_end]], bad_words=[word])
    rules.append([word[prompt_end]])
    drafted = word[prompt_end + 1 : 3]
    parents = list(range(-1, len(drafted)))
    edits = build_edits([rules], padded([(parents, [word[prompt_end], *drafted])]))
    assert edits is not None
    banned = edits.offset == np.float32(BANNED)
    assert edits.rows[banned].tolist() == [len(drafted)]
    assert edits.token_ids[banned].tolist() == [4]


def test_more_tokens_than_the_first_capacity() -> None:
    random = np.random.default_rng(0)
    prompt, answer = random.integers(0, 3000, 700).tolist(), random.integers(0, 3000, 300).tolist()
    rules = LogitRules(prompt, presence_penalty=0.5, frequency_penalty=0.25)
    rules.append(answer)
    logits = random.standard_normal((1, 3000)).astype(np.float32)
    expected = edit_logits_reference(
        logits[0], prompt + answer, len(prompt), presence_penalty=0.5, frequency_penalty=0.25
    )
    assert edited_logits(logits, build_edits([rules]))[0].tolist() == expected.tolist()


def test_types_are_those_of_the_graph() -> None:
    rules = LogitRules([1, 2], repetition_penalty=1.2, min_tokens=3, end_ids=[0])
    edits = build_edits([None, rules, rules])
    assert edits is not None
    assert [str(column.dtype) for column in vars(edits).values()] == ["int32", "int32", "float32", "float32", "float32"]
    assert set(edits.rows.tolist()) == {1, 2}


def test_the_documentation_is_true() -> None:
    result = doctest.testmod(draftline.logit_edits)
    assert result.failed == 0
    assert result.attempted > 0
