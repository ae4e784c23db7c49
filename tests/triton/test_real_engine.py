"""A converted, built and packaged checkpoint: the answers over gRPC are those of the engine in this process."""

from __future__ import annotations

import threading
from pathlib import Path

from draftline.checkpoints.convert import convert_checkpoint
from draftline.config.schema import Pipeline
from draftline.generation import load_engine
from draftline.runtime.request import SamplingParameters
from draftline.sessions.onnxruntime_builder import build_engine
from draftline.triton.client import Client
from draftline.triton.repository import write_model_repository
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports
from tests.tiny_checkpoints import write_tiny_checkpoint

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
    )
    write_model_repository(directory, directory / "model_repository", pipeline)
    return directory


def test_answers_over_grpc_are_those_of_the_engine(tmp_path: Path) -> None:
    # Built in one place and served in another: a build can be moved.
    build = write_real_build(tmp_path / "built").rename(tmp_path / "moved")
    with load_engine(build / "engine") as loaded:
        expected = [answer.text for answer in loaded.generate(PROMPTS, NUM_TOKENS, SAMPLING)]
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        sampling = SAMPLING[place]
        options = {"temperature": sampling.temperature, "top_k": sampling.top_k or None, "seed": sampling.seed}
        answers[place] = client.generate(PROMPTS[place], max_tokens=NUM_TOKENS, **options)

    server = TritonServer(
        build / "model_repository", host="127.0.0.1", ports=find_free_ports(), log_file=tmp_path / "log"
    )
    with server, Client(f"127.0.0.1:{server.ports.grpc}") as client:
        threads = [threading.Thread(target=ask, args=[place]) for place in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert server.stop() == 0
    assert [answers[place] for place in range(len(PROMPTS))] == expected
    assert len(set(expected)) == len(expected)
