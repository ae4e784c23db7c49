"""The laws of texts with mixtures of experts as target and as draft: each row of a step has experts of its own."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from draftline.runtime.request import SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import AUTO, CHAIN, DYNAMIC, STATIC, assert_said_plainly, make_requests

SAMPLING = (SamplingParameters(), SamplingParameters(0.8, top_p=0.9, seed=3))


@pytest.mark.parametrize(
    ("target", "drafts", "shape", "options"),
    [
        ("mixture", "nearly", DYNAMIC, {}),
        ("mixture", "nearly+ngram", AUTO, {"weights_dtype": "int8"}),
        ("mixture", "eagle3", CHAIN, {"weights_dtype": "int4"}),
        ("many_experts", "eagle1", STATIC, {"pool_dtype": "float16"}),
        ("many_experts", "medusa", DYNAMIC, {"weights_dtype": "int8"}),
        ("many_experts", "nearly", DYNAMIC, {"kernels": "onnxruntime"}),
        ("mixture", "nearly", DYNAMIC, {"kernels": "onnxruntime", "weights_dtype": "int8"}),
        ("sinks", "nearly", DYNAMIC, {}),
        ("sinks", "eagle3+ngram", AUTO, {"weights_dtype": "int4"}),
        ("sinks", "nearly", STATIC, {"kernels": "onnxruntime", "weights_dtype": "int8"}),
    ],
)
def test_texts_are_plain(engines: Engines, target: str, drafts: str, shape: TreeShape, options: dict[str, Any]) -> None:
    """Greedy and sampled, in traffic of preemptions and cancels."""
    random = Random(f"{target} {drafts}")
    requests = make_requests(random, 8, max_prompt=130, max_tokens=40, sampling=lambda index: SAMPLING[index % 2])
    plain = engines.open(target, **options).serve().run_all(requests)
    traffic = engines.open(target, drafts, shape, **options).serve(max_batch_size=6, max_blocks=40)
    statistics = traffic.run_jostling(requests, random, cancelling=0.1)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert statistics.speculation.num_accepted_tokens > 0
