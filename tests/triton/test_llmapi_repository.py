"""The repository of TensorRT-LLM from 1.3 on: its settings, and the classic names through the real server."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from draftline.checkpoints.tokenizer import Tokenizer, load_tokenizer
from draftline.config.schema import Pipeline
from draftline.errors import RequestError
from draftline.triton.client import Client
from draftline.triton.generate import generate
from draftline.triton.llmapi_repository import write_llmapi_repository
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.triton.classic_client import ask_classically, scalars


def load_tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_tiny_checkpoint(Path(folder, "model")))


TOKENIZER = load_tiny_tokenizer()


def make_pipeline(
    method: str | None = None, tree: dict[str, Any] | None = None, serve: dict[str, Any] | None = None, **engine: Any
) -> Pipeline:
    draft = {"method": method} | ({} if method == "ngram" else {"checkpoint": "head"}) if method else None
    return Pipeline.model_validate(
        {
            "name": "example",
            "target": {"checkpoint": "tiny", "dtype": "bfloat16"},
            "draft": draft,
            "tree": tree,
            "engine": {
                "backend": "tensorrt_llm",
                "route": "llmapi",
                "weights_dtype": "bfloat16",
                "max_batch_size": 4,
                "max_seq_len": 1024,
                **engine,
            },
            "kv_cache": {"dtype": "bfloat16", "block_size": 32, "max_blocks": 100, "free_gpu_memory_fraction": 0.5},
            "serve": serve or {},
        }
    )


def settings_of(directory: Path, pipeline: Pipeline, draft: Path | None = None, layers: tuple[int, ...] = ()) -> Any:
    write_llmapi_repository(directory, pipeline, Path("/models/target"), draft, layers, TOKENIZER)
    return yaml.safe_load((directory / "tensorrt_llm" / "1" / "model.yaml").read_text())


def test_plain_decoding(tmp_path: Path) -> None:
    assert settings_of(tmp_path, make_pipeline(tensor_parallel_size=2, pipeline_parallel_size=2)) == {
        "model": "/models/target",
        "backend": "pytorch",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "max_batch_size": 4,
        "max_seq_len": 1024,
        "max_num_tokens": 128,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "enable_block_reuse": True,
            "max_tokens": 3200,
            "free_gpu_memory_fraction": 0.5,
            "tokens_per_block": 32,
        },
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }


EAGLE3 = {
    "decoding_type": "Eagle3",
    "max_draft_len": 3,
    "speculative_model": "/models/head",
    "eagle3_layers_to_capture": [1, 15, 28],
}


@pytest.mark.parametrize(
    ("method", "tree", "expected"),
    [
        ("eagle3", {"kind": "chain", "max_depth": 3}, EAGLE3),
        (
            "eagle3",
            {"kind": "dynamic", "max_depth": 3, "top_k": 5, "max_nodes": 12},
            EAGLE3 | {"use_dynamic_tree": True, "dynamic_tree_max_topK": 5, "max_total_draft_tokens": 11},
        ),
        (
            "draft_model",
            {"kind": "chain", "max_depth": 2},
            {"decoding_type": "Draft_Target", "max_draft_len": 2, "speculative_model": "/models/head"},
        ),
        (
            "ngram",
            {"kind": "chain", "max_depth": 6},
            {
                "decoding_type": "NGram",
                "max_draft_len": 6,
                "max_matching_ngram_size": 4,
                "is_use_oldest": False,
                "is_public_pool": False,
            },
        ),
    ],
)
def test_speculation(tmp_path: Path, method: str, tree: dict[str, Any], expected: dict[str, Any]) -> None:
    draft = None if method == "ngram" else Path("/models/head")
    layers = (1, 15, 28) if method == "eagle3" else ()
    settings = settings_of(tmp_path, make_pipeline(method, tree), draft, layers)
    assert settings["speculative_config"] == expected
    assert settings.get("disable_overlap_scheduler", False) == (method != "eagle3")


def test_configurations_parse_and_agree_with_what_the_model_completes(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, make_pipeline())
    configs = {}
    for path in tmp_path.glob("*/config.pbtxt"):
        text = path.read_text()
        assert "${" not in text
        configs[path.parent.name] = text_format.Parse(text, model_config_pb2.ModelConfig())
    model = configs["tensorrt_llm"]
    assert model.max_batch_size == settings["triton_config"]["max_batch_size"]
    assert model.model_transaction_policy.decoupled == settings["triton_config"]["decoupled"]
    assert model.backend == configs["ensemble"].backend == "python"
    assert configs["ensemble"].max_batch_size == 1
    script = (tmp_path / "serve.sh").read_text()
    assert "--http-address=127.0.0.1" in script
    assert "--metrics-port=8002" in script


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    build = tmp_path_factory.mktemp("llmapi")
    repository = build / "model_repository"
    ports = find_free_ports()
    settings_of(repository, make_pipeline(serve={"http_port": ports.http}))
    model = Path(__file__).parent / "scripted_llmapi" / "model.py"
    shutil.copyfile(model, repository / "tensorrt_llm" / "1" / "model.py")
    with TritonServer(repository, host="127.0.0.1", ports=ports, log_file=build / "log") as server:
        yield server
        assert server.stop() == 0


def test_classic_clients_are_served(server: TritonServer) -> None:
    (whole,) = ask_classically(server, scalars(text_input="one two three", max_tokens=2))
    assert whole.as_numpy("text_output").tolist() == [[b"one two"]]
    asked = scalars(text_input="one two three", max_tokens=3, stream=True, return_perf_metrics=True)
    streamed = ask_classically(server, asked, outputs=("text_output", "acceptance_rate"))
    assert [answer.as_numpy("text_output").tolist() for answer in streamed] == [[[b"one"]], [[b" two"]], [[b" three"]]]
    assert streamed[-1].as_numpy("acceptance_rate").tolist() == [[0.25]]


def test_streams_run_at_the_same_time(server: TritonServer) -> None:
    texts = [" ".join(f"{word}-{index}" for word in range(40)) for index in range(4)]

    def ask(text: str) -> str:
        answers = ask_classically(server, scalars(text_input=text, max_tokens=100, stream=True))
        return b"".join(answer.as_numpy("text_output")[0, 0] for answer in answers).decode()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, texts)) == texts


def test_errors_reach_the_client(server: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match=r"Error generating request: asked for"):
        ask_classically(server, scalars(text_input="fail", max_tokens=2))
    with pytest.raises(InferenceServerException, match=r"beam_width: is not supported by this version; got 4"):
        ask_classically(server, scalars(text_input="hi", max_tokens=2, beam_width=4))


def test_the_terminal_gets_the_answer(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The chat template is the front's, and what cannot be counted is not asked for."""
    url = f"127.0.0.1:{server.ports.grpc}"
    with Client(url) as client:
        chat = client.render_chat([{"role": "user", "content": "one two three"}])
        assert chat == TOKENIZER.render_chat([{"role": "user", "content": "one two three"}])
        assert client.generate("one two three", max_tokens=2) == "one two"
    for raw, text in ((True, "one two three"), (False, chat)):
        out = io.StringIO()
        asked = generate(
            "one two three", url=url, raw=raw, show_acceptance=False, use_colour=False, out=out, max_tokens=50
        )
        assert asked == 0
        assert out.getvalue() == f"{text}\n"
        said = capsys.readouterr().err
        assert re.match(rf"{len(text)} characters, [\d.]+ characters/s after a first character at ", said), said
    with Client(url) as client, pytest.raises(RequestError, match="return_acceptance: is not supported"):
        client.generate("one", max_tokens=2, return_acceptance=True)


LONG = " ".join(map(str, range(3000)))  # 15 s of the scripted model


def wait_until_nothing_runs(client: Client) -> None:
    for _ in range(50):
        if client.generate("running", max_tokens=2, timeout_seconds=20.0) == "0":
            return
        time.sleep(0.1)
    raise AssertionError("the model still runs requests")


def test_a_client_that_goes_away_ends_what_the_model_does(server: TritonServer) -> None:
    """More of them than the front has threads."""
    with Client(f"127.0.0.1:{server.ports.grpc}") as client:
        for _ in range(6):
            stream = client.stream(LONG, max_tokens=5000)
            assert next(stream) == "0"
            stream.close()
        wait_until_nothing_runs(client)


def test_a_client_that_drops_its_connection_ends_what_the_model_does(server: TritonServer) -> None:
    body = json.dumps({"text_input": LONG, "max_tokens": 5000, "stream": True}).encode()
    head = f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    with Client(f"127.0.0.1:{server.ports.grpc}") as client:
        with socket.create_connection(("127.0.0.1", server.ports.http)) as asked:
            asked.sendall(head.encode() + body)
            while client.generate("running", max_tokens=2, timeout_seconds=20.0) == "0":
                time.sleep(0.02)
        wait_until_nothing_runs(client)


def test_another_client_cancels(server: TritonServer) -> None:
    with Client(f"127.0.0.1:{server.ports.grpc}") as client, Client(f"127.0.0.1:{server.ports.grpc}") as other:
        stream = client.stream(LONG, max_tokens=5000, request_id="mine")
        first = next(stream)
        other.cancel("mine")
        said = first + "".join(stream)
        assert LONG.startswith(said)
        assert len(said) < len(LONG)
        wait_until_nothing_runs(client)
        client.cancel("mine")  # nobody's by now: nothing happens


def test_requests_that_wait_are_cancelled(server: TritonServer) -> None:
    """All of the front's threads are taken: the one that waits ends at once, and is never asked of the model."""
    words = " ".join(map(str, range(200)))

    def ask(request_id: str) -> str:
        with Client(f"127.0.0.1:{server.ports.grpc}") as client:
            return client.generate(words, max_tokens=1000, request_id=request_id)

    with ThreadPoolExecutor(5) as threads, Client(f"127.0.0.1:{server.ports.grpc}") as client:
        running = [threads.submit(ask, f"running-{index}") for index in range(4)]
        time.sleep(0.2)
        waiting = threads.submit(ask, "waiting")
        time.sleep(0.2)
        client.cancel("waiting")
        assert waiting.result(timeout=10.0) == ""
        assert not any(answer.done() for answer in running)
        assert [answer.result() for answer in running] == [words] * 4
