"""Single forwards of the CPU engine: what more tokens cost, what attention costs, and where the time goes."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from draftline.bench.rounds import SETTLE_SECONDS, Measurement
from draftline.checkpoints.optional_package import import_optional
from draftline.errors import ArtifactError
from draftline.graphs.onnx_graph import DRAFTLINE
from draftline.sessions.engine_config import MODEL_FILE, EngineConfig, load_engine_config
from draftline.sessions.native_kernels import library_of_engine
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession, step_feeds
from draftline.sessions.protocol import Session, StepBatch

_NUM_FORWARDS, _NUM_UNCOUNTED = 12, 4  # in a row: the first ones wake threads and fill caches


def make_step(config: EngineConfig, num_sequences: int, num_rows: int, context: int) -> StepBatch:
    """Make a step of ``num_sequences`` chains of ``num_rows`` tokens, each behind ``context`` tokens of its own."""
    random = np.random.default_rng(0)
    num_blocks = -(-(context + num_rows) // config.block_size)
    assert num_sequences * num_blocks <= config.max_blocks
    total = num_sequences * num_rows
    return StepBatch(
        input_ids=random.integers(config.model.vocab_size, size=total).astype(np.int32),
        position_ids=np.tile(np.arange(context, context + num_rows, dtype=np.int32), num_sequences),
        sequence_starts=np.arange(0, total + 1, num_rows, dtype=np.int32),
        context_lengths=np.full(num_sequences, context, np.int32),
        block_table=np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, num_blocks),
        sample_rows=np.arange(total, dtype=np.int32),
        temperature=np.zeros(total, np.float32),
        top_k=np.zeros(total, np.int32),
        top_p=np.ones(total, np.float32),
        uniform=np.zeros(total, np.float32),
    )


def fill_pool(session: Session, config: EngineConfig) -> None:
    """Commit a first forward's rows to every slot: pages that nobody wrote are one page of zeros to every reader."""
    session.forward(make_step(config, 1, 1, 0))
    for block in range(config.max_blocks):
        slots = np.arange(block * config.block_size, (block + 1) * config.block_size)
        session.commit(np.zeros(config.block_size, np.int64), slots)


def measure_steps(
    sessions: Mapping[str, Session], steps: Mapping[str, StepBatch], num_rounds: int, say: Callable[[str], None]
) -> list[Measurement]:
    """Measure the milliseconds of every step in every session, in turn within each round."""
    values: dict[tuple[str, str], list[float]] = {(name, step): [] for step in steps for name in sessions}
    for number in range(num_rounds):
        for title, step in steps.items():
            for name, session in sessions.items():
                values[name, title].append(_forward_ms(session, step))
        say(f"round {number + 1}/{num_rounds}: {len(steps)} steps in {', '.join(sessions)}")
    return [Measurement(name, title, "ms", tuple(numbers)) for (name, title), numbers in values.items()]


def _forward_ms(session: Session, step: StepBatch) -> float:
    """Return the median of some forwards in a row, as in decoding."""
    time.sleep(SETTLE_SECONDS)
    milliseconds = []
    for _ in range(_NUM_FORWARDS):
        started = time.perf_counter()
        session.forward(step)
        milliseconds.append((time.perf_counter() - started) * 1000)
    return statistics.median(milliseconds[_NUM_UNCOUNTED:])


def link_without_attention(engine: Path, destination: Path) -> Path:
    """Make a copy of an engine of native kernels whose attention returns its queries; weights are hard-linked.

    Raises: ArtifactError for an engine without native attention.
    """
    destination.mkdir(parents=True)
    for file in engine.iterdir():
        if file.name != MODEL_FILE:
            os.link(file, destination / file.name)
    graph = onnx.load(engine / MODEL_FILE, load_external_data=False)
    cut = 0
    flat = onnx.numpy_helper.from_array(np.array([0, -1], np.int64), "bench.flat")
    for node in graph.graph.node:
        if node.op_type == "TreeAttention" and node.domain == DRAFTLINE:
            queries = node.input[0]
            output = node.output[0]
            node.CopyFrom(onnx.helper.make_node("Reshape", [queries, flat.name], [output], name=node.name))
            cut += 1
    if not cut:
        raise ArtifactError(engine, "has native attention", "none", "build it with engine.kernels: native")
    graph.graph.initializer.append(flat)
    onnx.save(graph, destination / MODEL_FILE)
    return destination


def open_without_attention(engine: Path, destination: Path) -> OnnxRuntimeSession:
    """Open such a copy; ``config.json`` beside it records the size of the graph that was cut."""
    return OnnxRuntimeSession(link_without_attention(engine, destination), load_engine_config(engine))


def profile_step(engine: Path, step: StepBatch, num_forwards: int, directory: Path) -> dict[str, float]:
    """Return the milliseconds of a forward by kind of operator, by ONNX Runtime's own profiler; the greatest first."""
    onnxruntime = import_optional("onnxruntime", "the profile", "pip install onnxruntime")
    config = load_engine_config(engine)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = config.num_threads
    options.enable_profiling, options.profile_file_prefix = True, str(directory / "profile")
    if config.kernels == "native":
        options.register_custom_ops_library(str(library_of_engine(engine)))
    session = onnxruntime.InferenceSession(str(engine / MODEL_FILE), options, providers=["CPUExecutionProvider"])
    model = config.model
    shape = (config.max_blocks, 2, model.num_key_value_heads, config.block_size, model.head_size)
    pool = np.ones((model.num_hidden_layers, *shape), config.pool_dtype)
    feeds = step_feeds(step) | {f"kv_pool.{layer}": values for layer, values in enumerate(pool)}
    for _ in range(num_forwards + 1):
        session.run(["sampled_ids", "kv_rows"], feeds)
    path = Path(session.end_profiling())
    events = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return _sum_by_operator(events, num_forwards)


def _sum_by_operator(events: Sequence[Mapping[str, Any]], num_forwards: int) -> dict[str, float]:
    """Sum the kernel times after the first forward."""
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        if event["name"].endswith("_kernel_time") and event["ts"] >= runs[1]:
            totals[event["args"]["op_name"]] += event["dur"] / 1000 / num_forwards
    return dict(sorted(totals.items(), key=lambda entry: -entry[1]))
