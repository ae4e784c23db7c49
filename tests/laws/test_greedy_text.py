"""Law 1: greedy speculative ids are the plain ids, for every drafter, tree and batch mix."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from draftline.choices import NAMED_CHOICES
from draftline.runtime.request import SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import AUTO, CHAIN, DYNAMIC, SHAPES, STATIC, assert_said_plainly, make_requests

DRAFTS = (
    "nearly",
    "itself",
    "eagle1",
    "eagle3",
    "medusa",
    "ngram",
    "ngram+eagle3",
    "medusa+ngram",
    "nearly+eagle1",
    "medusa+eagle3+nearly",
)
ROOMY: tuple[dict[str, Any], ...] = (
    {"max_batch_size": 16},
    {"max_batch_size": 16, "max_num_tokens": 24},  # prompts come in chunks
    {"max_batch_size": 1},
    {"max_batch_size": 3, "max_blocks": 40},
)
NAMED = TreeShape("static", 64, 5, 1, choices=NAMED_CHOICES["mc_sim_7b_63"])


def cases() -> list[tuple[str, str]]:
    every = [(drafts, shape) for drafts in DRAFTS for shape in SHAPES]
    return [case for case in every if case != ("ngram", "static")]  # n-gram lookup has no second candidates


@pytest.mark.parametrize(("drafts", "shape"), cases())
def test_texts_are_plain_where_there_is_room(engines: Engines, drafts: str, shape: str) -> None:
    """Prompts to 150 tokens, across the 128 positions of a key chunk; 6 per case."""
    number = cases().index((drafts, shape))
    requests = make_requests(Random(number), 6)
    plain = engines.open().serve().run_all(requests)
    traffic = engines.open("llama", drafts, SHAPES[shape]).serve(**ROOMY[number % len(ROOMY)])
    statistics = traffic.run_jostling(requests, Random(number), cancelling=0.2)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert drafts == "ngram" or statistics.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(("drafts", "shape"), cases())
def test_texts_are_plain_where_blocks_are_short(engines: Engines, drafts: str, shape: str) -> None:
    """Blocks of 8, too few for all who run: preemptions, drafts cut short, prefixes found again; 9 per case."""
    number = 100 * cases().index((drafts, shape))
    engine = engines.open("llama", drafts, SHAPES[shape], block_size=8)
    for seed in range(number, number + 5):
        requests = make_requests(Random(seed), 9, max_prompt=40, max_tokens=60)
        plain = engines.open().serve().run_all(requests)
        traffic = engine.serve(max_batch_size=8, max_blocks=14, max_num_tokens=48)
        statistics = traffic.run_jostling(requests, Random(seed), cancelling=0.2)
        for name, expected in plain.items():
            assert_said_plainly(traffic.said(name), expected)
        if statistics.num_preemptions > 0 and statistics.num_cached_tokens > 0:
            return
    raise AssertionError("no seed led to a preemption and a prefix found again")


@pytest.mark.parametrize("target", ["qwen2", "window", "mha", "gemma3"])
@pytest.mark.parametrize(
    ("drafts", "shape"), [("nearly", DYNAMIC), ("eagle1", CHAIN), ("ngram+eagle3", AUTO), ("medusa", STATIC)]
)
def test_texts_of_other_architectures_are_plain(engines: Engines, target: str, drafts: str, shape: TreeShape) -> None:
    """Biases, a sliding window of 24 tokens (within a tree's reach, and far behind), as many key heads as heads; norms
    behind both, layers with the window and without, the embedding scaled for the target alone."""
    random = Random(f"{target} {drafts}")
    requests = make_requests(random, 10, max_prompt=130, max_tokens=60)
    plain = engines.open(target).serve().run_all(requests)
    traffic = engines.open(target, drafts, shape, block_size=8).serve(max_batch_size=8, max_blocks=24)
    statistics = traffic.run_jostling(requests, random, cancelling=0.1)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert statistics.num_preemptions > 0
    assert statistics.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "onnxruntime"},
        {"kernels": "onnxruntime", "weights_dtype": "int8", "pool_dtype": "float16"},
        {"weights_dtype": "int8"},
        {"weights_dtype": "int8", "pool_dtype": "float16"},
        {"weights_dtype": "int4"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_texts_are_plain_whatever_the_engine_is_made_of(engines: Engines, options: dict[str, Any]) -> None:
    """Trees across the 128 positions of a key chunk; sampled and greedy."""
    sampling = [SamplingParameters(), SamplingParameters(0.8, top_p=0.9, seed=3)]
    requests = make_requests(Random(1), 8, sampling=lambda index: sampling[index % 2])
    plain = engines.open(**options).serve().run_all(requests)
    traffic = engines.open("llama", "nearly+ngram", DYNAMIC, **options).serve(max_batch_size=6)
    statistics = traffic.run_jostling(requests, Random(1), cancelling=0.1)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert statistics.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("drafts", ["eagle1", "medusa", "nearly"])
def test_texts_are_plain_with_a_named_tree(engines: Engines, drafts: str) -> None:
    """63 draft tokens each: steps of more rows than the engine takes, so trees are cut."""
    requests = make_requests(Random(drafts), 8)
    plain = engines.open().serve().run_all(requests)
    traffic = engines.open("llama", drafts, NAMED).serve(max_batch_size=8)
    traffic.run_jostling(requests, Random(drafts))
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)


@pytest.mark.parametrize(
    ("drafts", "least", "most"),
    [
        ("nearly", 0.3, 0.8),
        ("eagle1", 0.15, 0.6),
        ("eagle3", 0.04, 0.6),
        ("medusa", 0.04, 0.6),
        ("ngram", 0.3, 0.99),
    ],
)
def test_drafts_of_these_tests_are_right_now_and_then(engines: Engines, drafts: str, least: float, most: float) -> None:
    """Else the laws would be proved of texts that were never drafted; every length of a run occurs."""
    traffic = engines.open("llama", drafts, CHAIN).serve()
    traffic.run_all(make_requests(Random(drafts), 40))
    numbers = traffic.core.statistics().speculation
    assert least < numbers.acceptance_rate < most
    assert len(numbers.histogram) == 5
    assert all(count > 0 for count in numbers.histogram)
