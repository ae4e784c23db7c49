from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.choices
from draftline.choices import NAMED_CHOICES, build_static_tree, check_choices
from draftline.errors import PipelineError
from draftline.tree import position_offsets

Path = tuple[int, ...]


@st.composite
def choices(draw: st.DrawFn) -> list[Path]:
    paths: set[Path] = {()}
    for _ in range(draw(st.integers(1, 30))):
        parent = draw(st.sampled_from(sorted(paths)))
        paths.add((*parent, draw(st.integers(0, 5))))
    return draw(st.permutations(sorted(paths - {()})))


@settings(deadline=None)
@given(choices())
def test_nodes_are_the_choices_in_order_of_depth_then_path(paths: list[Path]) -> None:
    check_choices(paths, "tree.choices")
    tree = build_static_tree(paths)
    built: list[Path] = [()]
    for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist(), strict=True):
        built.append((*built[parent], rank))
    assert built == [(), *sorted(paths, key=lambda path: (len(path), path))]
    assert np.array_equal(tree.depths, position_offsets(tree.parents))
    assert tree.ranks[0] == -1


@pytest.mark.parametrize("name", NAMED_CHOICES)
def test_the_published_trees_are_trees(name: str) -> None:
    published = NAMED_CHOICES[name]
    check_choices(published, name)
    tree = build_static_tree(published)
    assert len(tree.parents) == (26 if name == "eagle_26" else 64)
    assert tree.depths.max() == {"eagle_26": 5, "vicuna_33b_stage1": 3}.get(name, 4)
    assert tree.ranks.max() <= 9  # Medusa's TOPK = 10


def test_medusas_default_tree_is_the_published_one() -> None:
    assert NAMED_CHOICES["mc_sim_7b_63"][:6] == ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0))
    depths = build_static_tree(NAMED_CHOICES["mc_sim_7b_63"]).depths
    assert np.bincount(depths).tolist() == [1, 10, 28, 23, 2]


@pytest.mark.parametrize(
    ("broken", "problems"),
    [
        ([], ["no choice"]),
        ([(0,), (0,)], ["[0] 2 times"]),
        ([(0,), ()], ["a path of no rank"]),
        ([(0,), (-1,)], ["[-1] with a negative rank"]),
        ([(0,), (1, 0)], ["[1, 0] without [1]"]),
        ([(0, 0), (1,), (1,), (2, -3)], ["[0, 0] without [0]", "[1] 2 times", "[2, -3] with a negative rank"]),
    ],
)
def test_every_problem_is_named(broken: list[Path], problems: list[str]) -> None:
    with pytest.raises(PipelineError) as error:
        check_choices(broken, "p.yaml:7: tree.choices")
    assert str(error.value).startswith("p.yaml:7: tree.choices: choices are different paths")
    assert error.value.got == ", ".join(problems)


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.choices).failed == 0
