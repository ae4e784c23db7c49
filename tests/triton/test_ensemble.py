"""The whole contract against the real tritonserver; the engine behind it recites a known text."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from draftline.errors import RequestError
from tests.triton.classic_client import ask_classically, scalars
from tests.triton.example import SCRIPT


def recite(tokenizer, prompt: str, num_tokens: int) -> str:
    """What the engine says after a prompt."""
    script = tokenizer.encode(SCRIPT, add_special_tokens=False)
    start = len(tokenizer.encode(prompt))
    return tokenizer.decode([script[place % len(script)] for place in range(start, start + num_tokens)])


def post(server, path: str, body: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=20)
    try:
        connection.request(
            "POST",
            f"/v2/{path}" if path.startswith(("repository/", "logging", "trace/")) else f"/v2/models/{path}",
            json.dumps(body) if not isinstance(body, bytes) else body,
        )
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8")
    finally:
        connection.close()


def post_stream(server, **body: object) -> list[dict]:
    status, text = post(server, "ensemble/generate_stream", {"stream": True, **body})
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def text_of(results: list) -> list[str]:
    return [result.as_numpy("text_output").item().decode() for result in results]


def test_every_classic_input_at_its_neutral_value(server, tokenizer) -> None:
    inputs = scalars(
        text_input="hello", max_tokens=60, decoder_text_input="", num_return_sequences=1, bad_words="", stop_words="",
        exclude_input_in_output=True, end_id=2, pad_id=2, top_k=1, top_p=0.0, temperature=1.0, length_penalty=1.0,
        repetition_penalty=1.0, min_tokens=0, min_length=0, presence_penalty=0.0, frequency_penalty=0.0, seed=1,
        random_seed=1, return_log_probs=False, return_context_logits=False, return_generation_logits=False,
        return_perf_metrics=False, return_num_input_tokens=False, return_num_output_tokens=False, beam_width=1,
        stream=False, prompt_vocab_size=0, embedding_bias_words="", guided_decoding_guide_type="",
        guided_decoding_guide="",
    )  # fmt: skip
    assert text_of(ask_classically(server, inputs)) == [recite(tokenizer, "hello", 60)]


def test_a_whole_answer_starts_with_the_prompt(server, tokenizer) -> None:
    status, body = post(server, "ensemble/generate", {"text_input": "hello", "max_tokens": 10})
    assert (status, json.loads(body)["text_output"]) == (200, "hello" + recite(tokenizer, "hello", 10))


def test_grpc_and_http_streams_join_to_the_whole_answer(server, client, tokenizer) -> None:
    expected = recite(tokenizer, "hello", 150)
    assert "👩‍👩‍👧" in expected
    assert "你好" in expected
    events = post_stream(server, text_input="hello", max_tokens=150, return_num_output_tokens=True)
    assert "".join(event["text_output"] for event in events) == expected
    assert events[-1]["num_output_tokens"] == 150
    chunks = list(client.stream_chunks("hello", max_tokens=150))
    assert "".join(chunk.text for chunk in chunks) == expected
    assert len(chunks) > 75, "it streams"
    assert client.generate("hello", max_tokens=150) == expected


def test_reports_come_when_asked_for(server) -> None:
    flags = dict.fromkeys(("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"), True)
    event = post_stream(server, text_input="hello", max_tokens=4, **flags)[-1]
    assert (event["num_input_tokens"], event["num_output_tokens"]) == (1, 4)
    times = [event[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 1.6e18
    assert event["kv_cache_alloc_total_blocks"] >= 1
    assert event["total_draft_tokens"] == 0


def test_pieces_join_to_the_answer_and_the_last_chunk_has_the_numbers(client, tokenizer) -> None:
    chunks = list(client.stream_chunks("hello", max_tokens=150, return_acceptance=True))
    assert all("".join(piece.text for piece in chunk.pieces) == chunk.text for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == recite(tokenizer, "hello", 150)
    pieces, numbers = [piece for chunk in chunks for piece in chunk.pieces], chunks[-1].speculation
    assert len(pieces) == 150
    assert [chunk.speculation is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert sum(piece.is_draft for piece in pieces) == numbers.num_accepted_tokens > 20
    assert numbers.num_emitted_tokens == numbers.num_accepted_tokens + numbers.num_steps == 149  # 1 is the prompt's
    assert len(numbers.histogram) <= 5


@pytest.mark.parametrize("given", [{"speculate": False}, {"max_draft_tokens": 0}])
def test_a_request_may_decode_plainly_and_gets_the_same_answer(client, tokenizer, given) -> None:
    chunks = list(client.stream_chunks("hello", max_tokens=150, return_acceptance=True, **given))
    assert "".join(chunk.text for chunk in chunks) == recite(tokenizer, "hello", 150)
    assert not any(piece.is_draft for chunk in chunks for piece in chunk.pieces)
    assert (chunks[-1].speculation.num_drafted_tokens, chunks[-1].speculation.num_steps) == (0, 149)


def test_a_cap_of_draft_tokens_holds(client) -> None:
    chunks = list(client.stream_chunks("hello", max_tokens=150, return_acceptance=True, max_draft_tokens=2))
    assert len(chunks[-1].speculation.histogram) == 3


def test_an_answer_may_end_at_every_place_of_an_accepted_run(server, client, tokenizer) -> None:
    ids = tokenizer.encode(SCRIPT)  # the script once: drafts are accepted from the start
    script = [*ids, *ids]
    accepted = 0
    for length in range(1, 12):
        (*_, last) = chunks = list(client.stream_chunks(SCRIPT, max_tokens=length, return_acceptance=True))
        assert "".join(chunk.text for chunk in chunks) == recite(tokenizer, SCRIPT, length)
        assert last.num_output_tokens == sum(len(chunk.pieces) for chunk in chunks) == length
        accepted += last.speculation.num_accepted_tokens

        # The same by an end id: the first token of its kind from the prompt's end on.
        place = next(place for place in range(len(ids) + length, 2 * len(ids)) if script[place] not in ids[:length])
        inputs = scalars(input_lengths=len(ids), request_output_len=90, exclude_input_in_output=True)
        inputs |= {
            "input_ids": np.array([ids], np.int32),
            **scalars(end_id=script[place], return_num_output_tokens=True),
        }
        outputs = ("output_ids", "num_output_tokens")
        (result,) = ask_classically(server, inputs, outputs, model="tensorrt_llm")
        assert result.as_numpy("output_ids")[0, 0].tolist() == script[len(ids) : place]
        assert result.as_numpy("num_output_tokens").item() == place - len(ids)
    assert accepted > 20


@pytest.mark.parametrize("word", ["naïve", "and then"])
def test_a_stop_word_ends_the_answer_inside_an_accepted_run(client, tokenizer, word) -> None:
    prompt = recite(tokenizer, "", len(tokenizer.encode(SCRIPT, add_special_tokens=False)))  # once round: drafts begin
    given = {"max_tokens": 300, "stop_words": [word]}
    (*_, last) = chunks = list(client.stream_chunks(prompt, return_acceptance=True, **given))
    text = "".join(chunk.text for chunk in chunks)
    assert text == recite(tokenizer, prompt, 300).split(word)[0]
    assert "".join(piece.text for chunk in chunks for piece in chunk.pieces) == text
    assert last.num_output_tokens == sum(len(chunk.pieces) for chunk in chunks)
    assert last.speculation.num_accepted_tokens > 0
    assert client.generate(prompt, speculate=False, **given) == text


def test_counters_of_speculation_are_published(server, client) -> None:
    client.generate("hello", max_tokens=5)
    time.sleep(0.2)  # two reporting periods
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as response:
        lines = response.read().decode().splitlines()
    assert "# TYPE draftline_speculation counter" in lines
    (steps,) = [line for line in lines if line.startswith("draftline_speculation{") and 'kind="steps"' in line]
    assert float(steps.rsplit(" ", 1)[1]) >= 4


@pytest.mark.parametrize("streaming", [True, False])
def test_log_probs_and_logits_come_for_every_token_of_the_answer(server, tokenizer, streaming) -> None:
    ids = tokenizer.encode(SCRIPT)  # the script once: drafts are accepted from the start
    flags = dict.fromkeys(["return_log_probs", "return_generation_logits", "exclude_input_in_output"], True)
    inputs = scalars(input_lengths=len(ids), request_output_len=40, streaming=streaming, **flags)
    results = ask_classically(
        server, {**inputs, "input_ids": np.array([ids], np.int32)}, outputs=None, model="tensorrt_llm"
    )
    output_ids, log_probs, logits = (
        np.concatenate([result.as_numpy(name) for result in results], axis=2)[0, 0]
        for name in ("output_ids", "output_log_probs", "generation_logits")
    )
    assert logits.shape == (40, tokenizer.vocab_size)
    assert logits.argmax(axis=1).tolist() == output_ids.tolist()
    np.testing.assert_allclose(log_probs, 10 - np.log(np.exp(logits).sum(axis=1)), rtol=1e-4)
    assert results[-1].as_numpy("cum_log_probs").item() == pytest.approx(log_probs.sum())
    assert len(results) < 30 if streaming else len(results) == 1, "steps of several tokens"


def test_stop_words_of_several_forms(server, client, tokenizer) -> None:
    expected = recite(tokenizer, "hello", 100).split("naïve")[0]
    assert client.generate("hello", max_tokens=100, stop_words=["nothing", "naïve"]) == expected
    body = {"text_input": "hello", "max_tokens": 100, "stop_words": ["naïve", "x"], "exclude_input_in_output": True}
    assert json.loads(post(server, "ensemble/generate", body)[1])["text_output"] == expected


def test_a_batch_yields_a_response_per_row(server, tokenizer) -> None:
    inputs = {
        "text_input": np.array([[b"hello"], ["你好 the".encode()]], np.object_),
        "max_tokens": np.array([[20], [30]], np.int32),
        "exclude_input_in_output": np.array([[True], [True]]),
    }
    results = ask_classically(server, inputs, ("text_output", "batch_index"))
    answers = {result.as_numpy("batch_index").item(): text for result, text in zip(results, text_of(results))}  # noqa: B905
    assert answers == {0: recite(tokenizer, "hello", 20), 1: recite(tokenizer, "你好 the", 30)}


def test_the_engine_model_by_itself(server, tokenizer) -> None:
    ids = tokenizer.encode("hello the")
    inputs = scalars(input_lengths=len(ids), request_output_len=5, exclude_input_in_output=True)
    inputs["input_ids"] = np.array([ids], np.int32)
    (result,) = ask_classically(server, inputs, outputs=None, model="tensorrt_llm")
    length = result.as_numpy("sequence_length").item()
    assert tokenizer.decode(result.as_numpy("output_ids")[0, 0, :length].tolist()) == recite(tokenizer, "hello the", 5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be >= 1; got 0"),
        ({"max_tokens": -3}, "max_tokens: must be >= 1; got -3"),
        ({"text_input": ""}, "text_input: must hold at least one token"),
        ({"temperature": -1.0}, "temperature: must be finite and >= 0"),
        ({"top_p": 1.5}, "top_p: must be <= 1"),
        ({"top_k": -1}, "top_k: must be >= 0"),
        ({"max_tokens": 5000}, "engine.max_seq_len"),
        ({"text_input": "x" * 3000}, "engine.max_seq_len"),
        ({"beam_width": 2}, "beam_width: is not supported by this version; got 2; leave it out or send 1"),
        ({"length_penalty": 2.0}, "length_penalty: is not supported"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must lie in"),
        ({"min_length": -3}, "min_tokens: must lie in 0..max_tokens = 5; got -3"),
        ({"return_context_logits": True}, "return_context_logits: is not supported"),
        ({"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]}, "embedding_bias_weights: must be as"),
        ({"presence_penalty": 1e30}, "presence_penalty: must lie in"),
        ({"frequency_penalty": -1e30}, "frequency_penalty: must lie in"),
        ({"max_draft_tokens": -1}, "max_draft_tokens: must be at least 0; got -1"),
        ({"lora_task_id": 1}, "lora_task_id: is not supported"),
        ({"guided_decoding_guide": "json"}, "guided_decoding_guide: is not supported"),
    ],
)
def test_bad_requests_over_http(server, inputs, message) -> None:
    body = {"text_input": "hello", "max_tokens": 5, **inputs}
    status, answer = post(server, "ensemble/generate", body)
    assert status == 400
    assert message in json.loads(answer)["error"]
    assert "\n" not in json.loads(answer)["error"]


def test_bad_requests_over_grpc_become_our_errors(server, client) -> None:
    with pytest.raises(RequestError, match=r"^top_k: must be >= 0; got -1; send 0 to turn it off$"):
        client.generate("hello", max_tokens=5, top_k=-1)
    inputs = {**scalars(max_tokens=5), "text_input": np.array([[b"a\xff"]], np.object_)}
    with pytest.raises(tritonclient.grpc.InferenceServerException, match="text_input: must be valid UTF-8"):
        ask_classically(server, inputs)


def wait_until_idle(server) -> None:
    assert server.wait_until_idle(5), "the engine still runs a request"


def test_closing_a_stream_ends_its_request(server, client) -> None:
    stream = client.stream("hello", max_tokens=1900)
    assert next(stream)
    stream.close()
    wait_until_idle(server)


def test_cancel_by_request_id_ends_the_stream(server, client) -> None:
    threading.Timer(0.3, client.cancel, ["to-cancel"]).start()
    started = time.monotonic()
    text = client.generate("hello", max_tokens=1900, request_id="to-cancel")
    assert 0 < len(text) < 1000
    assert time.monotonic() - started < 4
    wait_until_idle(server)


def test_a_direct_client_that_leaves_ends_its_request(server, tokenizer) -> None:
    inputs = scalars(input_lengths=1, request_output_len=1900, streaming=True)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as classic:
        arrived = threading.Event()
        classic.start_stream(lambda result, error: arrived.set())
        tensors = [tritonclient.grpc.InferInput("input_ids", [1, 1], "INT32")]
        tensors[0].set_data_from_numpy(np.array([[5]], np.int32))
        for name, array in inputs.items():
            tensors.append(tritonclient.grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        classic.async_stream_infer("tensorrt_llm", tensors)
        assert arrived.wait(10)
        classic.stop_stream(cancel_requests=True)
    wait_until_idle(server)


def test_many_clients_at_once_get_their_own_text(client, tokenizer) -> None:
    prompts = ["hello", "the", "你好", "a b c", "x" * 100, "😀", "in an", "naïve"] * 2
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        answers[place] = client.generate(prompts[place], max_tokens=20 + place)

    threads = [threading.Thread(target=ask, args=[place]) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {place: recite(tokenizer, prompt, 20 + place) for place, prompt in enumerate(prompts)}


def test_any_seed_fixes_a_sampled_answer(client) -> None:
    answers = {client.generate("hello", max_tokens=5, temperature=0.8, top_p=0.9, seed=2**64 - 1) for _ in range(2)}
    assert len(answers) == 1


def test_afterwards_every_block_is_free(server) -> None:
    wait_until_idle(server)
    time.sleep(0.1)  # one reporting period
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as response:
        lines = response.read().decode().splitlines()
    (used,) = [line for line in lines if 'kv_cache_block_type="used"' in line]
    assert used.endswith(" 0")


def test_models_cannot_be_loaded_by_clients(server) -> None:
    for path in ("repository/models/ensemble/unload", "logging", "trace/setting"):
        assert post(server, path, {})[0] == 403


def test_a_chat_is_rendered_by_the_published_template(client) -> None:
    assert (
        client.render_chat([{"role": "user", "content": "hi"}])
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_thread_is_left_by_a_client(server) -> None:
    from draftline.triton.client import Client

    def rounds(count: int) -> int:
        for _ in range(count):
            with Client(f"127.0.0.1:{server.ports.grpc}") as one:
                one.generate("hello", max_tokens=3)
        return threading.active_count()

    assert rounds(2) >= rounds(5)
