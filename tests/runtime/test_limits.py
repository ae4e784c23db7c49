from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftline.errors import PipelineError, RequestError
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters

LIMITS = EngineLimits(max_batch_size=4, max_seq_len=32, max_num_tokens=8, block_size=4, max_blocks=6, vocab_size=100)


def ignore(output: Output) -> None:
    pass


GOOD = Request("r", [1, 2, 3], 4, ignore)


def test_a_good_request_gives_its_prompt() -> None:
    prompt_ids = check_request(GOOD, LIMITS)
    assert prompt_ids.dtype == np.int32
    assert prompt_ids.tolist() == [1, 2, 3]
    check_request(replace(GOOD, prompt_ids=[0] * 24, max_tokens=1), LIMITS)
    check_request(replace(GOOD, prompt_ids=[0], max_tokens=24), LIMITS)


BAD = [
    ({"prompt_ids": []}, "prompt: must hold at least one token; got an empty prompt; send some text"),
    ({"prompt_ids": [0] * 32}, "prompt: .*engine.max_seq_len = 32; got 32 tokens; shorten"),
    ({"prompt_ids": [5, 100]}, r"prompt: token ids lie in 0..99; got 100; "),
    ({"prompt_ids": [-1]}, r"prompt: token ids lie in 0..99; got -1; "),
    ({"max_tokens": 0}, "max_tokens: must be at least 1; got 0; "),
    ({"max_tokens": -5}, "max_tokens: must be at least 1; got -5; "),
    (
        {"max_tokens": 30},
        r"max_tokens: .*engine.max_seq_len = 32; got 3 prompt tokens \+ 30; ask for at most 29, or raise",
    ),
    (
        {"max_tokens": 23},
        "max_tokens: .*kv_cache.max_blocks = 6 of 4 tokens; got .*7 blocks; .*raise kv_cache.max_blocks",
    ),
    ({"sampling": SamplingParameters(temperature=-1.0)}, "temperature: .*got -1.0; "),
    ({"sampling": SamplingParameters(temperature=float("nan"))}, "temperature: .*got nan; "),
    ({"sampling": SamplingParameters(temperature=1e-9)}, "temperature: .*got 1e-09; use 0"),
    ({"sampling": SamplingParameters(top_k=-1)}, "top_k: .*got -1; "),
    ({"sampling": SamplingParameters(top_p=0.0)}, "top_p: .*got 0.0; "),
    ({"sampling": SamplingParameters(top_p=1.5)}, "top_p: .*got 1.5; "),
    ({"sampling": SamplingParameters(seed=-1)}, "seed: .*got -1; "),
    ({"sampling": SamplingParameters(seed=2**64)}, "seed: "),
    ({"max_draft_tokens": -1}, "max_draft_tokens: must be at least 0; got -1; use 0 for plain"),
    ({"sampling": SamplingParameters(repetition_penalty=0.0)}, "repetition_penalty: .*0.001..1000; got 0.0; use 1"),
    ({"sampling": SamplingParameters(repetition_penalty=float("inf"))}, "repetition_penalty: .*got inf; "),
    ({"sampling": SamplingParameters(repetition_penalty=float("nan"))}, "repetition_penalty: .*got nan; "),
    ({"sampling": SamplingParameters(presence_penalty=-2e3)}, "presence_penalty: .*-1000..1000; got -2000.0; use 0"),
    ({"sampling": SamplingParameters(frequency_penalty=float("nan"))}, "frequency_penalty: .*got nan; "),
    ({"sampling": SamplingParameters(min_tokens=-1)}, "min_tokens: must lie in 0..max_tokens = 4; got -1; "),
    ({"sampling": SamplingParameters(min_tokens=5)}, "min_tokens: must lie in 0..max_tokens = 4; got 5; "),
    (
        {"sampling": SamplingParameters(min_tokens=1), "end_ids": frozenset([3, 100])},
        "end_ids: token ids lie in 0..99; got 100; ",
    ),
    ({"sampling": SamplingParameters(bad_words=((3,), ()))}, "bad_words: .*got an empty word; leave it out"),
    ({"sampling": SamplingParameters(bad_words=((3, 100),))}, "bad_words: token ids lie in 0..99; got 100; "),
    ({"sampling": SamplingParameters(logit_bias=((-1, 1.0),))}, "logit_bias: token ids lie in 0..99; got -1; "),
    ({"sampling": SamplingParameters(logit_bias=((7, float("-inf")),))}, "logit_bias: .*got -inf for token 7; .*bad"),
    ({"sampling": SamplingParameters(logit_bias=((7, float("nan")),))}, "logit_bias: .*got nan for token 7; "),
]


def test_rules_at_their_bounds_are_served() -> None:
    sampling = SamplingParameters(
        repetition_penalty=1e-3,
        presence_penalty=-1e3,
        frequency_penalty=1e3,
        min_tokens=4,
        bad_words=((99,), (0, 99)),
        logit_bias=((0, -1e9), (99, 1e9)),
    )
    check_request(replace(GOOD, sampling=sampling, max_draft_tokens=0, end_ids=frozenset([0, 99])), LIMITS)
    check_request(replace(GOOD, end_ids=frozenset([100])), LIMITS)  # never drawn, and with nothing to ban no edit


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_requests_are_refused_in_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        check_request(replace(GOOD, **change), LIMITS)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"max_batch_size": 0}, "engine.max_batch_size"),
        ({"block_size": 0}, "kv_cache.block_size"),
        ({"max_num_tokens": 3}, "engine.max_num_tokens"),
    ],
)
def test_impossible_sizes_name_the_pipeline_field(change: dict[str, int], where: str) -> None:
    with pytest.raises(PipelineError, match=f"^{where}: must"):
        replace(LIMITS, **change)
