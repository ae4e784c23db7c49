"""The runtime against ``reference_loop``, step by step: what was drafted, accepted and emitted, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.runtime.core import EngineCore
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.drafters.building import DrafterSetup, Speculation
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.sampling import uniform
from draftline.speculation import TreeShape
from draftline.tree_growth import needed_candidates
from tests.reference_loop import ReferenceAnswer, reference_loop
from tests.runtime.fake_draft_session import FakeDraftSession
from tests.runtime.fake_session import FakeSession, next_token

VOCAB_SIZE, ACCURACY = 7, 0.7
LIMITS = EngineLimits(max_batch_size=3, max_seq_len=64, max_num_tokens=64, block_size=4, max_blocks=48)
CHAIN = TreeShape("chain", 5, 4, 1)
STATIC = TreeShape("static", 9, 3, 1, choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)))

requests = st.builds(
    Request,
    request_id=st.just(""),
    prompt_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=12),
    max_tokens=st.integers(1, 24),
    on_output=st.just(lambda output: None),
    sampling=st.builds(SamplingParameters, temperature=st.sampled_from([0.0, 0.8]), seed=st.integers(0, 2**64 - 1)),
    end_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
)


def drawn_after(request: Request, text: Tokens[int], vocab_size: int = VOCAB_SIZE) -> int:
    number = float(uniform(request.sampling.seed, len(text)))
    return next_token(np.array(text, dtype=np.int32), request.sampling.temperature, number, vocab_size)


def guesses_after(request: Request, text: Tokens[int], is_head: bool) -> list[int]:
    """The candidates of ``FakeDraftSession``, most probable first; heads are not told random numbers."""
    guess = drawn_after(replace(request, sampling=SamplingParameters()) if is_head else request, text)
    if next_token(np.array(text, dtype=np.int32), 0.0, 0.0, 1000) >= 1000 * ACCURACY:
        guess += 1
    return [(guess + offset) % VOCAB_SIZE for offset in range(VOCAB_SIZE)]


def propose_choices(
    request: Request, text: Tokens[int], max_depth: int, shape: TreeShape, method: str
) -> list[list[int]]:
    paths = []
    for choice in shape.choices or [(0,) * shape.max_depth]:
        path: list[int] = []
        for rank in choice[:max_depth]:
            path.append(guesses_after(request, [*text, *path], method != "draft_model")[rank])
        paths.append(path)
    return paths


def propose_repetition(
    request: Request, text: Tokens[int], max_depth: int, shape: TreeShape, method: str
) -> list[list[int]]:
    """What followed the latest earlier occurrence of the longest suffix of 4, 3 or 2 tokens, and what then follows."""
    text = list(text)
    for length in (4, 3, 2):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[-length:]:
                copied: list[int] = []
                for index in range(place, place + min(max_depth, shape.max_depth)):
                    copied.append((text + copied)[index])
                return [copied]
    return []


def reference(request: Request, shape: TreeShape, method: str) -> ReferenceAnswer:
    prompt = list(request.prompt_ids)
    propose = propose_repetition if method == "ngram" else propose_choices

    def propose_within(text: Tokens[int]) -> list[list[int]]:
        num_left = len(prompt) + request.max_tokens - len(text)
        return propose(request, text, num_left - 1, shape, method)  # the bonus token is one of those that are left

    return reference_loop(
        prompt, lambda text: drawn_after(request, text), propose_within, request.max_tokens, request.end_ids
    )


def serve(served: list[Request], shape: TreeShape, method: str) -> list[list[Output]]:
    """Serve requests together, and return what each was given."""
    target = FakeSession(
        num_blocks=LIMITS.max_blocks,
        block_size=LIMITS.block_size,
        vocab_size=VOCAB_SIZE,
        max_num_tokens=LIMITS.max_num_tokens,
    )
    session = FakeDraftSession(
        target,
        num_blocks=LIMITS.max_blocks,
        block_size=LIMITS.block_size,
        num_candidates=needed_candidates(shape),
        is_head=method != "draft_model",
        accuracy=ACCURACY,
    )
    source = DrafterSetup(method, None if method == "ngram" else session)
    core = EngineCore(
        target,
        LIMITS,
        prefix_cache=False,
        speculation=Speculation((source,), shape),
        policy=SpeculationPolicy(shape, CostCurve([1, 64], [10.0, 20.0]), 1),
    )
    outputs: dict[str, list[Output]] = {}
    for number, request in enumerate(served):
        named = replace(request, request_id=str(number))
        outputs[str(number)] = []
        core.add(Sequence(named, check_request(named, LIMITS), time.time_ns()))
    while not core.is_idle:
        for _, output in core.step():
            outputs[output.request_id].append(output)
    core.check_integrity()
    return list(outputs.values())


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("draft_model", CHAIN),
        ("draft_model", STATIC),
        ("eagle3", CHAIN),
        ("eagle3", STATIC),
        ("ngram", CHAIN),
    ],
    ids=lambda value: value.kind if isinstance(value, TreeShape) else value,
)
@settings(max_examples=40, deadline=None)
@given(served=st.lists(requests, min_size=1, max_size=3))
def test_every_step_is_the_references(served: list[Request], method: str, shape: TreeShape) -> None:
    for request, outputs in zip(served, serve(served, shape, method), strict=True):
        expected = reference(request, shape, method)
        first, *rest = outputs
        assert list(first.token_ids) == expected.token_ids[:1]
        assert [list(output.token_ids) for output in rest] == [step.emitted for step in expected.steps]
        assert [output.num_accepted_tokens for output in rest] == [
            min(len(step.accepted), len(step.emitted)) for step in expected.steps
        ]
        last = outputs[-1]
        assert last.finish_reason == expected.finish_reason
        assert last.metrics is not None
        assert last.metrics.num_output_tokens == len(expected.token_ids)
        numbers = last.metrics.speculation
        assert numbers.num_steps == numbers.num_bonus_tokens == len(expected.steps)
        assert numbers.num_drafted_tokens == sum(step.num_drafted for step in expected.steps)
        assert numbers.num_accepted_tokens == sum(len(step.accepted) for step in expected.steps)
        assert numbers.num_emitted_tokens == sum(len(step.emitted) for step in expected.steps)
        for num_accepted, count in enumerate(numbers.histogram):
            assert count == sum(len(step.accepted) == num_accepted for step in expected.steps)


def test_these_drafts_are_accepted_in_part() -> None:
    request = Request("", [1, 2, 3], 40, lambda output: None)
    steps = reference(request, CHAIN, "draft_model").steps
    assert {len(step.accepted) for step in steps} >= {0, 1, 2, 4}
