"""The engine that answers prompts for training: the target alone, with features, many requests at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftline.runtime.engine import Engine
from draftline.sessions.engine_config import EngineConfig, load_engine_config
from draftline.sessions.onnxruntime_builder import build_engine
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.training.capture import CapturingSession
from draftline.training.description import Description

BLOCK_SIZE = 16


@dataclass(frozen=True)
class AnsweringEngine:
    engine: Engine
    capture: CapturingSession
    config: EngineConfig


@contextmanager
def open_answering_engine(
    checkpoint: Path,
    directory: Path,
    description: Description,
    *,
    max_batch_size: int,
    max_num_tokens: int,
    max_seq_len: int,
    num_threads: int,
) -> Iterator[AnsweringEngine]:
    """Build the engine in ``directory``, open it, and remove it in the end; what a killed run left there is replaced.

    Its pool holds ``max_batch_size`` sequences of ``max_seq_len``, so that none is ever computed twice; a block takes
    memory when it is first used.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, directory)
        build_engine(
            checkpoint,
            directory,
            weights_dtype=description.weights_dtype,
            pool_dtype=description.pool_dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            num_threads=num_threads,
            block_size=BLOCK_SIZE,
            max_blocks=max_batch_size * -(-max_seq_len // BLOCK_SIZE),
            prefix_cache=False,  # a row is found by the first block of its sequence
            progress=lambda done, total: None,
            captured_layers=description.captured_layers,
        )
        config = load_engine_config(directory)
        session = OnnxRuntimeSession(directory, config)
        opened.callback(session.close)
        capture = CapturingSession(
            session,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            feature_size=description.feature_size,
        )
        engine = Engine(
            capture,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            block_size=BLOCK_SIZE,
            max_blocks=config.max_blocks,
            prefix_cache=False,
            vocab_size=config.model.vocab_size,
        )
        opened.callback(engine.close)
        yield AnsweringEngine(engine, capture, config)
