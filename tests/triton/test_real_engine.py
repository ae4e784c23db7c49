"""A converted, built and packaged checkpoint: the answers over gRPC are those of the engine in this process."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.config.schema import Pipeline
from draftline.generation import LoadedEngine, load_engine
from draftline.runtime.request import SamplingParameters
from draftline.sessions.onnxruntime_builder import DraftSource, build_engine
from draftline.speculation import TreeShape
from draftline.triton.client import Client
from draftline.triton.preprocessing import build_word_lists
from draftline.triton.repository import write_model_repository
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.triton.classic_client import ask_classically, scalars

PROMPTS = ["hello", "the end", "你好", "a", "in and on", "😀", "x" * 150, "hello the"]
NUM_TOKENS = 24
SAMPLING = [
    SamplingParameters(temperature=0.8, top_k=40, seed=seed) if seed % 2 else SamplingParameters() for seed in range(8)
]


def write_real_build(directory: Path) -> Path:
    for name in ("checkpoint", "engine", "model_repository"):
        (directory / name).mkdir(parents=True)
    source = write_tiny_checkpoint(directory / "source")
    convert_checkpoint(source, directory / "checkpoint", "float32", lambda done, total: None)
    pipeline = Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "tiny"},
            "engine": {"max_batch_size": 8, "max_seq_len": 256, "max_num_tokens": 64, "num_threads": 1},
            "kv_cache": {"max_blocks": 128},
        }
    )
    build_engine(
        directory / "checkpoint",
        directory / "engine",
        weights_dtype=pipeline.engine.weights_dtype,
        max_batch_size=pipeline.engine.max_batch_size,
        max_seq_len=pipeline.engine.max_seq_len,
        max_num_tokens=pipeline.engine.max_num_tokens,
        num_threads=pipeline.engine.num_threads,
        block_size=pipeline.kv_cache.block_size,
        max_blocks=pipeline.kv_cache.max_blocks,
        prefix_cache=pipeline.kv_cache.prefix_cache,
        progress=lambda done, total: None,
        drafts=[DraftSource("ngram", None)],
        tree=TreeShape("chain", max_nodes=5, max_depth=4, top_k=1),
    )
    write_model_repository(directory, directory / "model_repository", pipeline)
    return directory


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built in one place and served in another: a build can be moved.
    directory = tmp_path_factory.mktemp("real")
    return write_real_build(directory / "built").rename(directory / "moved")


@pytest.fixture(scope="module")
def loaded(build: Path) -> Iterator[LoadedEngine]:
    with load_engine(build / "engine") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(build: Path) -> Iterator[TritonServer]:
    ports = find_free_ports()
    server = TritonServer(build / "model_repository", host="127.0.0.1", ports=ports, log_file=build / "log")
    with server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.ports.grpc}") as client:
        yield client


def ask_engine(server: TritonServer, prompt_ids: list[int], outputs: Sequence[str], **inputs: object) -> list:
    """Return chosen outputs of the ``tensorrt_llm`` model, without the batch and beam dimensions."""
    given = scalars(input_lengths=len(prompt_ids), request_output_len=NUM_TOKENS, exclude_input_in_output=True)
    given["input_ids"] = np.array([prompt_ids], np.int32)
    for name, value in inputs.items():
        given |= {name: value} if isinstance(value, np.ndarray) else scalars(**{name: value})
    (result,) = ask_classically(server, given, outputs, model="tensorrt_llm")
    return [np.squeeze(result.as_numpy(name), axis=(0, 1)) for name in outputs]


def test_answers_over_grpc_are_those_of_the_engine(loaded, client) -> None:
    expected = [answer.text for answer in loaded.generate(PROMPTS, NUM_TOKENS, SAMPLING)]
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        sampling = SAMPLING[place]
        options = {"temperature": sampling.temperature, "top_k": sampling.top_k or None, "seed": sampling.seed}
        answers[place] = client.generate(PROMPTS[place], max_tokens=NUM_TOKENS, **options)

    threads = [threading.Thread(target=ask, args=[place]) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[place] for place in range(len(PROMPTS))] == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 3.0},
        {"repetition_penalty": 1.25, "presence_penalty": -0.5, "frequency_penalty": 1.0, "temperature": 0.5, "seed": 3},
    ],
)
def test_penalties_change_the_answer_as_they_do_in_the_engine(loaded, client, penalties) -> None:
    (expected,) = loaded.generate(["hello the"], NUM_TOKENS, SamplingParameters(**penalties))
    assert client.generate("hello the", max_tokens=NUM_TOKENS, **penalties) == expected.text
    unpenalised = {name: value for name, value in penalties.items() if not name.endswith("_penalty")}
    assert client.generate("hello the", max_tokens=NUM_TOKENS, **unpenalised) != expected.text
    assert client.generate("hello the", max_tokens=NUM_TOKENS, speculate=False, **penalties) == expected.text


def test_bad_words_never_appear(loaded, server, client) -> None:
    tokenizer = loaded.tokenizer
    prompt_ids = tokenizer.encode("hello the")
    bans: list[list[int]] = []
    for length in (1, 1, 2):  # ban what comes first, again and again
        (answer,) = loaded.generate([prompt_ids], NUM_TOKENS, SamplingParameters(bad_words=tuple(map(tuple, bans))))
        bans.append(list(answer.token_ids[:length]))
    (ids,) = ask_engine(server, prompt_ids, ["output_ids"], bad_words_list=build_word_lists([bans]))
    ids = ids.tolist()
    for ban in bans:
        assert ban not in [ids[place : place + len(ban)] for place in range(len(ids))]
    assert ids[0] != bans[0][0]

    # The same by their text, where a text has one spelling.
    words = [tokenizer.decode([token]) for token in range(3, tokenizer.vocab_size)]
    spelled = [word for token, word in enumerate(words, 3) if tokenizer.encode(word) == [token]]
    chunks = client.stream_chunks("hello the", max_tokens=NUM_TOKENS, bad_words=spelled, return_acceptance=True)
    assert not {piece.text for chunk in chunks for piece in chunk.pieces} & set(spelled)


def test_a_bias_forces_its_word(client) -> None:
    assert client.generate("hello", max_tokens=3, embedding_bias={"the": 0.0, "hello": 1000.0}) == "hello" * 3


def test_log_probs_and_logits_are_the_targets_own(loaded, server) -> None:
    prompt_ids = loaded.tokenizer.encode("hello the")
    names = ["output_ids", "output_log_probs", "generation_logits"]
    flags = {"return_log_probs": True, "return_generation_logits": True}
    ids, log_probs, logits = ask_engine(server, prompt_ids, names, **flags)
    assert ids.tolist() == list(loaded.generate([prompt_ids], NUM_TOKENS)[0].token_ids)
    assert logits.argmax(axis=1).tolist() == ids.tolist()
    largest = logits.max(axis=1)
    expected = logits[np.arange(len(ids)), ids] - largest - np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)

    penalised_ids, penalised = ask_engine(server, prompt_ids, names[::2], repetition_penalty=1.5, **flags)
    assert penalised_ids.tolist() != ids.tolist()
    np.testing.assert_array_equal(penalised[0], logits[0])  # before any edit


def test_an_answer_has_at_least_its_min_tokens(loaded, server) -> None:
    prompt_ids = loaded.tokenizer.encode("hello the")
    (ids,) = ask_engine(server, prompt_ids, ["output_ids"], end_id=-1)
    end_id = int(ids[2])
    (length,) = ask_engine(server, prompt_ids, ["sequence_length"], end_id=end_id)
    assert length <= 2
    ids, length = ask_engine(server, prompt_ids, ["output_ids", "sequence_length"], end_id=end_id, min_tokens=7)
    assert length >= 7
    assert end_id not in ids.tolist()


def test_speculation_is_counted_and_changes_no_answer(server, client) -> None:
    time.sleep(0.8)  # more than a reporting period
    before = read_counters(server)
    options = {"max_tokens": 100, "return_acceptance": True}
    drafted, plain = (
        list(client.stream_chunks("hello the", speculate=speculate, **options)) for speculate in (True, False)
    )
    assert "".join(chunk.text for chunk in drafted) == "".join(chunk.text for chunk in plain)
    numbers = drafted[-1].speculation
    assert numbers.num_accepted_tokens > 0
    assert numbers.num_steps + numbers.num_accepted_tokens == 99
    assert plain[-1].speculation.num_drafted_tokens == 0
    time.sleep(0.8)
    after = read_counters(server)
    assert after["accepted"] - before["accepted"] == numbers.num_accepted_tokens
    assert after["steps"] - before["steps"] == numbers.num_steps + plain[-1].speculation.num_steps


def read_counters(server: TritonServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as response:
        lines = response.read().decode().splitlines()
    counters = [line for line in lines if line.startswith("draftline_speculation{")]
    return {line.split('kind="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in counters}
