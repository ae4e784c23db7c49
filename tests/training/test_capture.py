"""Features of whole sequences, whatever the scheduler does to them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.runtime.core import EngineCore
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.sequence import Sequence
from draftline.sessions.protocol import StepBatch, StepResult
from draftline.training.capture import CapturingSession
from tests.runtime.fake_session import FakeSession, answer, in_step_masks, next_token

VOCAB_SIZE, BLOCK_SIZE, MAX_SEQ_LEN = 50, 4, 48


class FeatureSession(FakeSession):
    """The features of a row are its position, and a number that depends on every token before and on its own."""

    features: NDArray[np.float32]

    def forward(self, batch: StepBatch) -> StepResult:
        result = super().forward(batch)
        rows = []
        for index, mask in enumerate(in_step_masks(batch)):
            first, last = batch.sequence_starts[index : index + 2].tolist()
            context = self._committed(batch, index)
            rows += [np.concatenate([context, batch.input_ids[first:last][seen]]) for seen in mask]
        self.features = np.array([features_of(row) for row in rows], np.float32)
        return result


def features_of(token_ids: NDArray[np.int32]) -> tuple[float, float]:
    """Features of the last one of some tokens."""
    return len(token_ids) - 1, next_token(token_ids, 0.0, 0.0, 1000)


def expected_features(token_ids: list[int]) -> NDArray[np.float16]:
    rows = [features_of(np.array(token_ids[:length], np.int32)) for length in range(1, len(token_ids) + 1)]
    return np.array(rows, np.float16).reshape(-1, 2)


class World:
    """A core, and the features of every sequence of it that ended."""

    def __init__(self, max_batch_size: int, max_blocks: int, max_num_tokens: int, *, prefix_cache: bool = False):
        self.session = FeatureSession(
            num_blocks=max_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, max_num_tokens=max_num_tokens
        )
        self.capture = CapturingSession(
            self.session, max_batch_size=max_batch_size, max_seq_len=MAX_SEQ_LEN, feature_size=2
        )
        self.limits = EngineLimits(max_batch_size, MAX_SEQ_LEN, max_num_tokens, BLOCK_SIZE, max_blocks)
        self.core = EngineCore(self.capture, self.limits, prefix_cache=prefix_cache)
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()

    def add(self, name: str, prompt_ids: list[int], max_tokens: int, seed: int = 0, ends: bool = False) -> None:
        end_ids = frozenset(range(0, VOCAB_SIZE, 7)) if ends else frozenset[int]()
        request = Request(
            name, prompt_ids, max_tokens, lambda output: None, SamplingParameters(1.0, seed=seed), end_ids
        )
        self.requests[name], self.tokens[name] = request, list(prompt_ids)
        self.core.add(Sequence(request, check_request(request, self.limits), time.time_ns()))

    def step(self) -> None:
        self.read([output for _, output in self.core.step()])

    def read(self, outputs: list[Output]) -> None:
        for output in outputs:
            tokens = self.tokens[output.request_id]
            tokens += output.token_ids
            if output.end_id is not None:
                tokens.append(output.end_id)
            if output.finish_reason in ("end_id", "max_tokens"):
                fed = np.array(tokens[:-1], np.int32)
                features = self.capture.features_of(fed)
                assert features.dtype == np.float16
                np.testing.assert_array_equal(features, expected_features(tokens[:-1]))
                request = self.requests[output.request_id]
                drawn = answer(request, VOCAB_SIZE)
                assert tokens[: len(request.prompt_ids) + len(drawn)] == [*request.prompt_ids, *drawn]
                self.ended.add(output.request_id)

    def run(self) -> None:
        while not self.core.is_idle:
            self.step()


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 6) | st.integers(1, 20),
        st.integers(1, 20),
        st.booleans(),
        st.integers(0, 2),
        st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, max_batch_size=st.integers(1, 5), max_blocks=st.integers(10, 24), more_rows=st.integers(0, 9))
def test_every_sequence_that_ends_is_there_whole(
    requests: list[tuple[int, int, bool, int, int | None]], max_batch_size: int, max_blocks: int, more_rows: int
) -> None:
    """Chunks, preemptions, cancelled requests, equal prompts of equal and other seeds: any traffic."""
    world = World(max_batch_size, max_blocks, max_batch_size + more_rows)
    for number, (num_prompt, max_tokens, ends, seed, _) in enumerate(requests):
        world.add(str(number), [3] * num_prompt, max_tokens, seed, ends)
    cancelled = {str(number): step for number, (*_, step) in enumerate(requests) if step is not None}
    for step in range(13):
        for name, when in cancelled.items():
            if when == step:
                world.read([output for _, output in world.core.cancel(name)])
        world.step()
    world.run()
    assert {str(number) for number in range(len(requests))} - cancelled.keys() <= world.ended


def test_preempted_sequences_are_computed_again_and_kept_once() -> None:
    world = World(4, 10, 8)
    for number in range(4):
        world.add(str(number), [number] * 4, 20, seed=number)
    world.run()
    assert world.core.scheduler.num_preemptions > 0
    assert world.ended == {"0", "1", "2", "3"}


def test_one_that_ends_leaves_another_of_the_same_tokens_alone() -> None:
    """The first ends where the second, which has the same tokens, goes on: by its limit, and by an end token."""
    world = World(3, 20, 9)
    world.add("first", [1, 2, 3], 1)
    world.add("second", [1, 2, 3], 9)
    world.add("third", [1, 2, 3], 1)
    world.run()
    assert world.ended == {"first", "second", "third"}


def test_after_a_failed_forward_new_sequences_take_the_places() -> None:
    world = World(2, 20, 8)
    for number in range(2):
        world.add(str(number), [number] * 4, 20)
    for _ in range(5):
        world.step()
    world.session.failures = [RuntimeError("out of memory")]
    world.step()
    assert world.core.is_idle
    for number in range(2, 7):
        world.add(str(number), [number] * 4, 8)
    world.run()
    assert world.ended == {"2", "3", "4", "5", "6"}


def test_a_prefix_cache_is_a_mistake() -> None:
    world = World(1, 20, 8, prefix_cache=True)
    for name in "ab":
        world.add(name, [5] * 9, 3)
    with pytest.raises(AssertionError, match="the prefix cache is off"):
        world.run()


def test_what_float16_cannot_hold_becomes_infinite_without_a_warning() -> None:
    world = World(1, 20, 8)
    forward = world.session.forward

    def overflow(batch: StepBatch) -> StepResult:
        result = forward(batch)
        world.session.features = np.full((len(batch.input_ids), 2), 7e4, np.float32)
        return result

    world.session.forward = overflow  # type: ignore[method-assign]
    world.add("a", [1, 2], 1)
    world.core.step()
    assert np.isinf(world.capture.features_of(np.array([1, 2], np.int32))).all()
    with pytest.raises(AssertionError, match="a sequence of 3 tokens"):
        world.capture.features_of(np.array([1, 2, 3], np.int32))
