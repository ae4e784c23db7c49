"""A request's text depends on nothing but itself, in float32 and in int8."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from draftline.generation import LoadedEngine
from draftline.runtime.request import Output, Request, SamplingParameters
from tests.end_to_end.conftest import Question
from tests.end_to_end.prompts import PROMPTS

pytestmark = pytest.mark.end_to_end

SEEDS = (1, 2, 3, 2**64 - 1)


def submit_and_cancel(loaded: LoadedEngine, after_tokens: int) -> tuple[list[Output], threading.Event]:
    """Start an answer that is cancelled when it has a few tokens; the event is set when it has ended."""
    outputs: list[Output] = []
    ended = threading.Event()

    def on_output(output: Output) -> None:
        outputs.append(output)
        if sum(len(one.token_ids) for one in outputs) == after_tokens:
            loaded.engine.cancel("cancelled")
        if output.finish_reason is not None:
            ended.set()

    loaded.engine.submit(Request("cancelled", loaded.tokenizer.encode("Tell me everything"), 2000, on_output))
    return outputs, ended


def test_sixteen_at_once_get_the_text_each_gets_alone(
    loaded: LoadedEngine,
    weights_dtype: str,
    questions_and_answers: Callable[[str], tuple[list[Question], list[str]]],
) -> None:
    """Here the prompts' blocks come from the prefix cache; over gRPC (``test_served``) all of them are prefilled."""
    questions, expected = questions_and_answers(weights_dtype)
    num_finished_before = loaded.engine.statistics().num_requests_finished
    outputs, ended = submit_and_cancel(loaded, after_tokens=5)
    texts: dict[int, str] = {}

    def ask(place: int) -> None:
        texts[place] = loaded.generate([questions[place].prompt], questions[place].max_tokens)[0].text

    threads = [threading.Thread(target=ask, args=[place]) for place in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended.wait(60)
    assert [texts[place] for place in range(len(questions))] == expected
    assert outputs[-1].finish_reason == "cancelled"
    statistics = loaded.engine.statistics()
    assert statistics.num_blocks_used == 0
    assert statistics.num_blocks_free == statistics.num_blocks_total
    assert statistics.num_requests_finished - num_finished_before == len(questions) + 1


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(loaded: LoadedEngine) -> None:
    sampling = [SamplingParameters(temperature=0.8, seed=seed) for seed in SEEDS]
    prompt = PROMPTS[1]
    alone = [loaded.generate([prompt], 24, parameters)[0].text for parameters in sampling]
    strangers = list(PROMPTS[4:12])
    together = loaded.generate(
        [*strangers, *[prompt] * len(SEEDS)],
        24,
        [*[SamplingParameters(temperature=1.0, seed=9)] * len(strangers), *sampling],
    )
    assert [answer.text for answer in together[len(strangers) :]] == alone
    assert len(set(alone)) == len(SEEDS)
