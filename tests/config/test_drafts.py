"""The blocks of a pipeline that say how to speculate: lists of drafts, trees by choices, acceptance."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import draftline.config.choices
from draftline.choices import NAMED_CHOICES, check_choices
from draftline.config import Pipeline
from draftline.config.choices import NAMED_SIZES, choices_size, orphans
from draftline.config.writing import pipeline_text
from draftline.errors import PipelineError
from tests.config.test_loading import MINIMAL, load, problems

TWO = MINIMAL + "draft:\n  - {method: eagle3, checkpoint: head}\n  - method: ngram\n"
STATIC = MINIMAL + "draft: {method: medusa, checkpoint: heads}\ntree: {kind: static, choices: CHOICES}\n"


def test_one_draft_and_a_list_of_one_are_the_same(tmp_path: Path) -> None:
    block = load(tmp_path, MINIMAL + "draft: {method: ngram}\n")
    assert load(tmp_path, MINIMAL + "draft: [{method: ngram}]\n") == block
    assert "draft:\n  method: ngram\n" in pipeline_text(block)


def test_a_list_of_drafts(tmp_path: Path) -> None:
    pipeline = load(tmp_path, TWO, "draft.0.checkpoint=other")
    assert [(draft.method, draft.checkpoint) for draft in pipeline.draft] == [("eagle3", "other"), ("ngram", None)]
    assert pipeline.values()["draft.1.method"] == "ngram"
    assert load(tmp_path, pipeline_text(pipeline)) == pipeline
    assert Pipeline.model_validate(pipeline.model_dump()) == pipeline


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (TWO, ["draft.method=ngram"], "override 1: draft: is a list of blocks; got draft; number them from 0: draft.0"),
        (TWO, ["draft.2.method=ngram"], "override 1: draft.2: is a block in the list draft, numbered from 0; got 2 of"),
        (TWO, ["draft.1.method=medusa"], "x.yaml:5: draft.1.checkpoint: is given, except with method ngram"),
        (TWO, ["draft.1.methd=medusa"], "override 1: draft.1.methd: is an unknown key; got methd; did you mean method"),
        (
            MINIMAL,
            ["draft.0.method=ngram"],
            "override 1: draft.0: is a block in the list draft, numbered from 0; got n",
        ),
        (MINIMAL, ["draft.x.method=ngram"], "override 1: reads block.key=value; got draft.x.method=ngram"),
        (MINIMAL + "draft: []\n", [], "x.yaml:3: draft: lists one draft or more; got an empty list; remove it"),
        (MINIMAL + "draft:\n- ngram\n", [], 'x.yaml:4: draft.0: is a block of keys; got "ngram"; indent'),
        (MINIMAL + "draft:\n- [ngram]\n", [], "x.yaml:4: draft.0: is a block of keys; got a list; indent"),
        (MINIMAL + "engine:\n- {num_threads: 1}\n", [], "x.yaml:3: engine: is a block of keys; got a list"),
        (TWO + "  - method: ngram\n", [], "x.yaml:6: draft.2.method: each draft of a list has another method; got ng"),
        (TWO + "  - method: nngram\n", [], "x.yaml:6: draft.2.method: is eagle1 | eagle2 | eagle3 | medusa | draft_"),
        (TWO + "  - method: medusa\n", [], "x.yaml:6: draft.2.checkpoint: is given, except with method ngram, which"),
        (TWO + "    method: ngram\n", [], "x.yaml:6: draft.1.method: a key stands once; got it again, after line 5"),
    ],
)
def test_broken_lists(tmp_path: Path, text: str, overrides: list[str], expected: str) -> None:
    lines = problems(tmp_path, text, *overrides)
    assert len(lines) == 1, lines
    assert lines[0].startswith(expected)


def test_a_list_given_on_the_command_line_replaces_the_draft(tmp_path: Path) -> None:
    assert load(tmp_path, TWO, "draft=null", "draft.method=ngram").draft[0].method == "ngram"


def test_captured_layers_are_a_list_of_layers(tmp_path: Path) -> None:
    eagle3 = MINIMAL + "draft: {method: eagle3, checkpoint: head, captured_layers: LAYERS}\n"
    pipeline = load(tmp_path, eagle3.replace("LAYERS", "[1, 14, 26]"))
    assert pipeline.draft[0].captured_layers == (1, 14, 26)
    assert load(tmp_path, pipeline_text(pipeline)) == pipeline
    for layers in ("[]", "[-1]", "[1.5]", "1", '["1"]'):
        (line,) = problems(tmp_path, eagle3.replace("LAYERS", layers))
        assert "captured_layers" in line
    (line,) = problems(tmp_path, eagle3.replace("LAYERS", "[2, 1, 2]"))
    assert "draft.captured_layers: rise; got 2, 1, 2; list each layer once, lowest first" in line


@pytest.mark.parametrize(
    ("choices", "size"),
    [("mc_sim_7b_63", (64, 4, 10)), ("[[0], [1], [0, 0], [0, 0, 2]]", (5, 3, 3)), ("[[0]]", (2, 1, 1))],
)
def test_a_static_tree_has_the_size_of_its_choices(tmp_path: Path, choices: str, size: tuple[int, int, int]) -> None:
    pipeline = load(tmp_path, STATIC.replace("CHOICES", choices))
    tree = pipeline.tree
    assert tree is not None
    assert (tree.max_nodes, tree.max_depth, tree.top_k) == size
    assert load(tmp_path, pipeline_text(pipeline)) == pipeline
    assert load(tmp_path, STATIC.replace("CHOICES", choices), f"tree.max_nodes={size[0]}") == pipeline


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ("[[0], [1, 0]]", "tree.choices: lists every path once, and its parent too; got [1, 0]; add the parents"),
        ("[[0], [0]]", "tree.choices: lists every path once, and its parent too; got [0]; add"),
        ("[[0], [-1]]", "tree.choices: is mc_sim_7b_63 |"),
        ("[]", "tree.choices: is mc_sim_7b_63 |"),
        ("[[]]", "tree.choices: is mc_sim_7b_63 |"),
        ("[[true]]", "tree.choices: is mc_sim_7b_63 |"),
        ("[0, 1]", "tree.choices: is mc_sim_7b_63 |"),
        ("[[[0]]]", "tree.choices: is mc_sim_7b_63 |"),
        ("mc_sim_7b_62", "tree.choices: is mc_sim_7b_63 |"),
        (
            "[[0], [1]], max_nodes: 2, max_depth: 1",
            "tree.choices: keeps tree.max_nodes 2, tree.max_depth 1 and tree.top",
        ),
        (
            "[[0], [0, 0]], max_depth: 1",
            "tree.choices: keeps tree.max_nodes 3, tree.max_depth 1 and tree.top_k 1; got 2",
        ),
        (
            "[[0], [1]], top_k: 1",
            "tree.choices: keeps tree.max_nodes 3, tree.max_depth 1 and tree.top_k 1; got 2 paths",
        ),
    ],
)
def test_broken_choices(tmp_path: Path, choices: str, expected: str) -> None:
    lines = problems(tmp_path, STATIC.replace("CHOICES", choices))
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"x.yaml:4: {expected}")


def test_choices_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    pipeline = load(tmp_path, STATIC.replace("CHOICES", "eagle_26"), "tree.choices=[[0], [0, 1]]")
    assert pipeline.tree is not None
    assert (pipeline.tree.choices, pipeline.tree.max_nodes) == (((0,), (0, 1)), 3)


def test_nests_and_loops_of_yaml_end(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL + "draft: &d [*d]\n")[0] == (
        "x.yaml:3: draft.0: is a block of keys; got a list; indent its keys below it, or remove it"
    )
    assert problems(tmp_path, STATIC.replace("CHOICES", "&c [*c, [*c]]"))[0].startswith("x.yaml:4: tree.choices: is mc")
    assert problems(tmp_path, MINIMAL, "draft.method=" + "[" * 1500)[0].startswith(
        "override 1: draft.method: the value is YAML; got [["
    )


def test_examples() -> None:
    assert doctest.testmod(draftline.config.choices).failed == 0


def test_every_named_tree_can_be_named() -> None:
    assert {name: choices_size(choices) for name, choices in NAMED_CHOICES.items()} == NAMED_SIZES


def test_a_wrong_name_is_corrected(tmp_path: Path) -> None:
    assert problems(tmp_path, STATIC.replace("CHOICES", "mc_sim_7b_62"))[0].endswith("did you mean mc_sim_7b_63?")


def test_choices_beside_another_kind(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, STATIC.replace("CHOICES", "[[0]]"), "tree.kind=chain")
    assert ": tree.choices: is given with kind static, and only there; got 1 paths; remove tree.choices from" in line


@pytest.mark.parametrize(
    ("choices", "got"),
    [
        ("[[0], [-1]]", "[-1]"),
        ("[]", "0 paths"),
        ("[[0], []]", "[]"),
        ("[[0], [true]]", "[True]"),
        ("[0, 1]", "0"),
        ("[[0], null]", "None"),
        ("[[0], [64]]", "[64]"),
    ],
)
def test_the_wrong_path_is_shown(tmp_path: Path, choices: str, got: str) -> None:
    (line,) = problems(tmp_path, STATIC.replace("CHOICES", choices))
    assert "; got " in line
    assert line.split("; got ")[1].split("; write")[0] == got


def test_a_static_tree_without_choices_is_told_to_add_them(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL + "draft: {method: medusa, checkpoint: heads}\n", "tree.kind=static")
    assert line.endswith("; remove tree.choices from a tree that grows by itself, or add them to a static one")


def test_typical_acceptance_has_the_thresholds_of_its_paper(tmp_path: Path) -> None:
    text = MINIMAL + "draft: {method: ngram}\n"
    typical = load(tmp_path, text, "acceptance.rule=typical", "acceptance.alpha=0.5").acceptance
    assert typical is not None
    assert (typical.epsilon, typical.alpha) == (0.09, 0.5)
    exact = load(tmp_path, text).acceptance
    assert exact is not None
    assert (exact.epsilon, exact.alpha) == (None, None)


@pytest.mark.parametrize("value", ["0", "-0.1", "1.1", ".nan", ".inf", "true", '"0.1"', "[0.1]"])
def test_thresholds_are_probabilities(tmp_path: Path, value: str) -> None:
    text = MINIMAL + "draft: {method: ngram}\nacceptance: {rule: typical}\n"
    (line,) = problems(tmp_path, text, f"acceptance.epsilon={value}")
    assert line.startswith("override 1: acceptance.epsilon: is a number above 0, at most 1; got ")


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=8))
def test_orphans_are_what_makes_no_tree(paths: list[list[int]]) -> None:
    try:
        check_choices(paths, "choices")
    except PipelineError:
        assert orphans(paths)
    else:
        assert not orphans(paths)
    size = choices_size(paths)
    assert size is not None
    assert size.max_nodes == len(paths) + 1
    assert size.max_depth == max(len(path) for path in paths)
    assert size.top_k == max(rank for path in paths for rank in path) + 1
