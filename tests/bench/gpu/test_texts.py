"""Logits and texts of two engines, here both of the CPU: one of them rounds its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from draftline.bench.gpu.logits import compare_logits
from draftline.bench.gpu.texts import Reference, compare_texts, find_difference, with_cuda_graphs
from draftline.generation import load_engine
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


class Engines(NamedTuple):
    exact: Path
    other: Path
    rounded: Path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("engines")
    write_tiny_checkpoint(folder / "checkpoint", "llama")
    exact, other = (
        build_tiny_engine(folder, folder / "checkpoint", num_threads=num_threads, kernels="onnxruntime")
        for num_threads in (1, 2)
    )
    rounded = build_tiny_engine(folder, folder / "checkpoint", weights_dtype="int8", kernels="onnxruntime")
    return Engines(exact, other, rounded)


@pytest.fixture
def reference(engines: Engines) -> Iterator[Reference]:
    with Reference(engines.exact) as opened:
        yield opened


def test_engines_of_the_same_weights_agree(engines: Engines) -> None:
    findings = compare_logits(engines.exact, engines.other, "other", "float32")
    assert [finding.what for finding in findings] == [
        "other: logits of a prefill",
        "other: greedy tokens of a prefill",
        "other: logits of trees behind it",
        "other: greedy tokens of trees behind it",
    ]
    assert all(finding.agrees for finding in findings)
    assert max(finding.value for finding in findings) < 1e-5


def test_engines_of_rounded_weights_do_not(engines: Engines) -> None:
    findings = compare_logits(engines.exact, engines.rounded, "rounded", "float32")
    assert not findings[0].agrees
    assert not findings[2].agrees
    assert all(finding.agrees for finding in compare_logits(engines.exact, engines.rounded, "rounded", "bfloat16"))


def answer(engine: Path) -> list[tuple[int, ...]]:
    with load_engine(engine) as loaded:
        return [one.token_ids for one in loaded.generate(PROMPTS, 24)]


def test_the_same_texts_agree(engines: Engines, reference: Reference) -> None:
    finding = compare_texts(reference, PROMPTS, answer(engines.exact), answer(engines.other), "x", "float32")
    assert (finding.value, finding.agrees) == (0.0, True)
    assert finding.note.startswith("2 of 2 answers")


def test_another_text_is_wrong_by_its_margin(engines: Engines, reference: Reference) -> None:
    """A token that the reference holds for far less probable, at the place that is named."""
    expected = answer(engines.exact)
    changed = [expected[0], (*expected[1][:5], 0 if expected[1][5] else 1, *expected[1][6:])]
    finding = compare_texts(reference, PROMPTS, expected, changed, "x", "float32")
    assert finding.agrees is False
    assert finding.value > 0.001
    assert "1 of 2 answers" in finding.note
    assert f"answer 1 differs from token 5 on, margin {finding.value:.1e}" in finding.note


def test_the_reference_prefers_its_own_tokens(engines: Engines, reference: Reference) -> None:
    (own, _) = answer(engines.exact)
    for place in range(0, 24, 6):
        for token in (0, 3, 60):
            margin = reference.margin([*PROMPTS[0], *own[:place]], own[place : place + 1], (token,))
            assert 0 <= margin <= 2
            assert (margin == 0) == (token == own[place])


def test_an_answer_that_ended_differs_where_it_ends(reference: Reference) -> None:
    assert find_difference((1, 2), (1, 2, 3)) == 2
    assert find_difference((), ()) is None
    assert reference.margin(PROMPTS[0], (), (0,)) >= 0
    assert reference.margin(PROMPTS[0], (0,), ()) <= 0


def test_cuda_graphs_are_of_engines_on_a_gpu(engines: Engines) -> None:
    with load_engine(engines.exact) as loaded, pytest.raises(AssertionError, match="engines on a GPU"):
        with_cuda_graphs(loaded.config, True)
