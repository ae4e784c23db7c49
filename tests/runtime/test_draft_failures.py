"""A drafter's graph that fails: those who ran are told, no block is lost, and who comes next is served rightly."""

from __future__ import annotations

from random import Random

import pytest

from tests.runtime.fake_session import answer
from tests.runtime.test_speculation import SHAPES, VOCAB_SIZE, Bench, make_request


@pytest.mark.parametrize("fails_at", range(1, 30, 3))
@pytest.mark.parametrize("shape", ["chain", "dynamic"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_failing_draft_ends_who_runs_and_nobody_else(method: str, shape: str, fails_at: int) -> None:
    random = Random(fails_at)
    bench = Bench(method, SHAPES[shape], accuracy=0.7, max_batch_size=3, max_blocks=40)
    (session,) = bench.draft_sessions
    session.failures[fails_at] = RuntimeError("out of memory")
    requests = [
        make_request(str(index), [random.randrange(4) for _ in range(random.randint(1, 40))], random.randint(4, 30))
        for index in range(9)
    ]
    for request in requests:
        bench.add(request)
        bench.step()
    bench.run()
    assert session.num_forwards > fails_at
    reasons = [bench.outputs[request.request_id][-1].finish_reason for request in requests]
    assert 0 < reasons.count("error") <= 3
    for request in requests:
        said, expected = bench.tokens(request.request_id), answer(request, VOCAB_SIZE)
        last = bench.outputs[request.request_id][-1]
        if last.finish_reason == "error":
            assert said == expected[: len(said)]
            assert last.error is not None
            assert "out of memory" in last.error
        else:
            assert said == expected
        assert [output.finish_reason for output in bench.outputs[request.request_id][:-1]] == [None] * (
            len(bench.outputs[request.request_id]) - 1
        )
