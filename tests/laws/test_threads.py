"""The laws through the engine's own thread, where requests join and are cancelled at any moment."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from random import Random

from draftline.generation import load_engine
from draftline.runtime.request import Output, Request, SamplingParameters
from tests.laws.conftest import Engines
from tests.laws.traffic import AUTO, Said, assert_said_plainly, make_requests

NUM_THREADS, NUM_EACH = 4, 8


def test_threads_that_submit_and_cancel_get_the_plain_texts(engines: Engines) -> None:
    """A callback cancels one request in four after so many tokens, in the engine's thread, between two steps."""
    sampling = [SamplingParameters(), SamplingParameters(0.8, seed=3, frequency_penalty=0.2)]
    requests = make_requests(
        Random(7), NUM_THREADS * NUM_EACH, max_prompt=100, sampling=lambda index: sampling[index % 2]
    )
    plain = engines.open().serve().run_all(requests)
    directory = engines.open("llama", "ngram+eagle3+nearly", AUTO, max_blocks=60).directory
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    cancel_after = {
        request.request_id: Random(request.request_id).choice((None, None, None, 5)) for request in requests
    }
    with load_engine(directory) as loaded:

        def receive(output: Output) -> None:
            said = outputs[output.request_id]
            said.append(output)
            limit = cancel_after[output.request_id]
            if limit is not None and sum(len(each.token_ids) for each in said) >= limit:
                loaded.engine.cancel(output.request_id)
            if output.finish_reason:
                ended.put(output.request_id)

        def submit(part: list[Request]) -> None:
            for request in part:
                loaded.engine.submit(replace(request, on_output=receive))

        threads = [
            threading.Thread(target=submit, args=(requests[first::NUM_THREADS],)) for first in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {ended.get(timeout=60) for _ in requests} == set(outputs)
        statistics = loaded.engine.statistics()
    for name, expected in plain.items():
        assert_said_plainly(Said(tuple(outputs[name])), expected)
    assert any(said[-1].finish_reason == "cancelled" for said in outputs.values())
    assert statistics.num_requests_active == 0
    assert statistics.num_blocks_free == 60


def test_generate_says_the_plain_texts(engines: Engines) -> None:
    prompts = ["hello", "the the the", "in an an", "hello the hello the"]
    with load_engine(engines.open().directory) as loaded:
        plain = loaded.generate(prompts, 40, stop_words=["e"])
    with load_engine(engines.open("llama", "nearly", AUTO).directory) as loaded:
        for keywords in ({}, {"speculate": False}, {"max_draft_tokens": 1}):
            answers = loaded.generate(prompts, 40, stop_words=["e"], **keywords)
            assert [(answer.text, answer.token_ids, answer.finish_reason) for answer in answers] == [
                (answer.text, answer.token_ids, answer.finish_reason) for answer in plain
            ]
            assert (answers[0].metrics.speculation.num_drafted_tokens == 0) or keywords != {"speculate": False}
