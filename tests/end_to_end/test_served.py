"""The served model gives the engine's texts over every protocol, to many clients, whatever else is asked of it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import RequestError
from draftline.generation import LoadedEngine
from draftline.runtime.request import SamplingParameters
from draftline.triton.client import Client
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports
from tests.end_to_end.conftest import Question
from tests.end_to_end.processes import wait_for

pytestmark = pytest.mark.end_to_end

MULTIBYTE = ("日本の首都は東京です。韓国の首都は", "I love pizza 🍕🍕 and 👩‍👩‍👧 and", "naïve café, größer:")
BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"text_input": "word " * 5000}, "engine.max_seq_len = 4352; got 5"),
    ({"text_input": ""}, "text_input: must hold at least one token"),
    ({"max_tokens": -1}, "max_tokens: must be >= 1; got -1"),
    ({"max_tokens": 0}, "max_tokens: must be >= 1; got 0"),
    ({"max_tokens": 100_000}, "max_tokens: prompt and answer must fit"),
    ({"temperature": -0.5}, "temperature: must be finite and >= 0; got -0.5"),
    ({"top_p": 2.0}, "top_p: must be <= 1; got 2.0"),
    ({"beam_width": 4}, "beam_width: is not supported by this version; got 4"),
    ({"repetition_penalty": -1.0}, "repetition_penalty: must lie in 0.001..1000; got -1.0"),
    ({"min_tokens": 6}, "min_tokens: must lie in 0..max_tokens = 5; got 6"),
    ({"max_draft_tokens": -1}, "max_draft_tokens: must be at least 0; got -1"),
    ({"return_context_logits": True}, "return_context_logits: is not supported"),
    ({"guided_decoding_guide": "{}"}, "guided_decoding_guide: is not supported"),
]


@pytest.fixture(scope="module")
def server(build_of: Callable[[str], Path], weights_dtype: str) -> Iterator[TritonServer]:
    build = build_of(weights_dtype)
    ports = find_free_ports()
    with TritonServer(build / "model_repository", host="127.0.0.1", ports=ports, log_file=build / "log") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.ports.grpc}") as client:
        yield client


def post(server: TritonServer, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/ensemble/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def stream_over_http(server: TritonServer, body: dict[str, Any]) -> list[str]:
    status, answer = post(server, "generate_stream", {**body, "stream": True})
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line]
    return [event["text_output"] for event in events]


def num_blocks_used(server: TritonServer) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if 'kv_cache_block_type="used"' in line]
    return float(line.rsplit(" ", 1)[1])


def test_sixteen_clients_at_once_get_the_text_each_gets_alone(
    server: TritonServer,
    client: Client,
    weights_dtype: str,
    questions_and_answers: Callable[[str], tuple[list[Question], list[str]]],
) -> None:
    questions, expected = questions_and_answers(weights_dtype)
    texts: dict[int, str] = {}

    def ask(place: int) -> None:
        texts[place] = client.generate(questions[place].prompt, max_tokens=questions[place].max_tokens)

    def leave_early() -> None:
        stream = client.stream("Tell me everything", max_tokens=2000)
        for _ in range(3):
            next(stream)
        stream.close()

    threads = [threading.Thread(target=ask, args=[place]) for place in range(len(questions))]
    threads.append(threading.Thread(target=leave_early))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[place] for place in range(len(questions))] == expected
    assert server.wait_until_idle(30)
    assert wait_for(lambda: num_blocks_used(server) == 0, 5)


def test_all_protocols_give_the_same_text(
    server: TritonServer,
    client: Client,
    weights_dtype: str,
    questions_and_answers: Callable[[str], tuple[list[Question], list[str]]],
) -> None:
    questions, expected = questions_and_answers(weights_dtype)
    for question, text in list(zip(questions, expected, strict=True))[1:6]:
        body = {"text_input": question.prompt, "max_tokens": question.max_tokens, "exclude_input_in_output": True}
        whole = json.loads(post(server, "generate", body)[1])["text_output"]
        streamed = stream_over_http(server, body)
        assert [whole, "".join(streamed), client.generate(question.prompt, max_tokens=question.max_tokens)] == [
            text
        ] * 3
        assert len(streamed) > 1


@pytest.mark.parametrize("prompt", MULTIBYTE)
def test_multibyte_text_survives(server: TritonServer, client: Client, loaded: LoadedEngine, prompt: str) -> None:
    text = loaded.generate([prompt], 24)[0].text
    body = {"text_input": prompt, "max_tokens": 24}
    assert json.loads(post(server, "generate", body)[1])["text_output"] == prompt + text
    assert "".join(stream_over_http(server, {**body, "exclude_input_in_output": True})) == text
    assert client.generate(prompt, max_tokens=24) == text


def test_a_seed_gives_the_engines_text(client: Client, loaded: LoadedEngine) -> None:
    sampling = SamplingParameters(temperature=0.8, top_k=40, top_p=0.95, seed=7)
    expected = loaded.generate(["Once upon a time"], 24, sampling)[0].text
    texts = [
        client.generate("Once upon a time", max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=seed)
        for seed in (7, 8)
    ]
    assert texts[0] == expected
    assert texts[1] != expected


def test_bad_inputs_are_refused_in_one_line_and_serving_goes_on(server: TritonServer, client: Client) -> None:
    good = client.generate("The capital of France is", max_tokens=8)
    for inputs, message in BAD_INPUTS:
        status, answer = post(server, "generate", {"text_input": "hello", "max_tokens": 5, **inputs})
        error = json.loads(answer)["error"]
        assert status == 400, inputs
        assert message in error
        assert error.count("; ") >= 2
        assert "\n" not in error
    invalid = b'{"text_input": "a\xff\xfe", "max_tokens": 5}'
    status, answer = post(server, "generate", invalid)
    assert status >= 400
    with pytest.raises(RequestError, match=r"^max_tokens: must be >= 1; got -7; "):
        client.generate("hello", max_tokens=-7)
    assert client.generate("The capital of France is", max_tokens=8) == good
    assert server.wait_until_idle(10)
