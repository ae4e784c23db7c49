"""Law 3: what speculation draws is distributed as the target's own probabilities say, all tokens together."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.logit_edits import edit_logits_reference
from draftline.runtime.request import SamplingParameters
from draftline.sampling import kept_probabilities
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import OpenEngine, make_request

VOCAB_SIZE, NUM_DRAWN, NUM_TEXTS = 6, 3, 4000
TEMPERATURE, TOP_K, TOP_P = 1.9, 5, 0.97
PROMPT = [1, 4, 2]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "bad_words": ((0, 3), (5, 5, 5)),
    "logit_bias": ((0, 0.8),),
}
# A draft may reach to the last token but one, so a fourth token lets trees of depth 2 propose the three looked at.
SHAPES = {
    "chain": TreeShape("chain", 4, 3, 1),
    "dynamic": TreeShape("dynamic", 10, 3, 3),
}


def open_engine(engines: Engines, shape: str) -> OpenEngine:
    """The draft has its own mind: it is the target with much noise."""
    return engines.open("few_tokens", "nearly", SHAPES[shape])


def drawn_texts(engine: OpenEngine, parameters: dict[str, Any]) -> tuple[NDArray[np.int64], float]:
    """Draw the first tokens of one answer per seed, ``[NUM_TEXTS, NUM_DRAWN]``, and say how much was accepted."""
    traffic = engine.serve(max_batch_size=16)
    said = traffic.run_all(
        make_request(
            str(seed),
            PROMPT,
            NUM_DRAWN + 1,
            sampling=SamplingParameters(TEMPERATURE, TOP_K, TOP_P, seed=seed, **parameters),
        )
        for seed in range(NUM_TEXTS)
    )
    rate = traffic.core.statistics().speculation.acceptance_rate
    return np.array([said[str(seed)].token_ids[:NUM_DRAWN] for seed in range(NUM_TEXTS)]), rate


def enumerated(engine: OpenEngine, parameters: dict[str, Any]) -> NDArray[np.float64]:
    """Multiply the probabilities of every text, from the logits that plain decoding gives for every beginning."""
    beginnings = [drawn for length in range(NUM_DRAWN) for drawn in itertools.product(range(VOCAB_SIZE), repeat=length)]
    said = engine.serve().run_all(
        make_request(str(drawn), [*PROMPT, *drawn], 1, return_logits=True) for drawn in beginnings
    )
    expected = np.ones((VOCAB_SIZE,) * NUM_DRAWN)
    for drawn in beginnings:
        logits = said[str(drawn)].last.logits
        assert logits is not None
        edited = edit_logits_reference(logits[0], [*PROMPT, *drawn], len(PROMPT), **parameters)
        kept = kept_probabilities(edited, TEMPERATURE, TOP_K, TOP_P)
        shape = (VOCAB_SIZE,) + (1,) * (NUM_DRAWN - 1 - len(drawn))
        expected[drawn] *= (kept / kept.sum()).reshape(shape)
    return expected


def chi_squared_bound(degrees: int) -> float:
    """Bound that a right sampler exceeds once in 100,000 times (Wilson and Hilferty; the seeds are fixed anyway)."""
    width = 2 / (9 * degrees)
    return float(degrees * (1 - width + 4.265 * width**0.5) ** 3)


@pytest.fixture(scope="module", params=["bare", "penalties"])
def parameters(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PENALTIES if request.param == "penalties" else {}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_distribution_is_the_targets(engines: Engines, parameters: dict[str, Any], shape: str) -> None:
    expected = enumerated(engines.open("few_tokens"), parameters)
    np.testing.assert_allclose(expected.sum(), 1.0, atol=1e-5)
    texts, acceptance_rate = drawn_texts(open_engine(engines, shape), parameters)
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(texts.T), 1)
    assert counts[expected == 0].sum() == 0, "what has no probability is never drawn"
    # Rare texts are counted together: the law of chi-squared needs some of each.
    order = np.argsort(expected, axis=None)
    mean, seen = NUM_TEXTS * expected.ravel()[order], counts.ravel()[order]
    num_rare = int(np.searchsorted(mean.cumsum(), 10.0)) + 1
    num_rare = max(num_rare, int(np.searchsorted(mean, 5.0)))
    mean = np.append(mean[num_rare:], mean[:num_rare].sum())
    seen = np.append(seen[num_rare:], seen[:num_rare].sum())
    assert mean.size > 50
    assert ((seen - mean) ** 2 / mean).sum() < chi_squared_bound(mean.size - 1)
    assert 0.05 < acceptance_rate < 0.95


def test_the_statistic_notices_a_biased_draw(engines: Engines) -> None:
    """The bare distribution is refused as the penalised one."""
    bare, penalised = (enumerated(engines.open("few_tokens"), each) for each in ({}, PENALTIES))
    possible = (bare * NUM_TEXTS >= 5) & (penalised > 0)
    seen, mean = NUM_TEXTS * penalised[possible], NUM_TEXTS * bare[possible]
    assert ((seen - mean) ** 2 / mean).sum() > 2 * chi_squared_bound(mean.size)
