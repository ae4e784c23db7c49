"""What rounding costs: a fixed text through the engine's network, and through the same network in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.config import Pipeline
from draftline.errors import CheckpointError
from draftline.sessions.batch_split import count_parameters
from draftline.sessions.engine_config import PoolDtype, PoolScales, load_engine_config
from draftline.sessions.gpu_weight_forms import STORED_AS
from draftline.sessions.onnxruntime_builder import build_engine
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.plain_step import plain_step
from draftline.stages.gpu import is_on_gpu
from draftline.stages.perplexity import PerplexityReport, describe_report, log_softmax, score_rows, summarise_scores
from draftline.stages.perplexity_text import PASSAGES
from draftline.stages.stage import Advance, StageCall

MAX_PARAMETERS = 1_000_000_000  # of a model that is measured unasked: a float32 copy of it takes 4 GB for a while
MAX_PASSAGE_TOKENS = 512  # of tokenizers that need many tokens for a word
CHUNK_TOKENS = 128


class Precision(NamedTuple):
    """``rounded_as``: the form of a GPU to which float32 matrices are rounded. ``scales``: of a float8 pool, whose
    rounding a pool of float32 imitates."""

    weights_dtype: str
    pool_dtype: PoolDtype
    rounded_as: str | None = None
    scales: PoolScales = ()

    def __str__(self) -> str:
        pool_dtype = "float8" if self.scales else self.pool_dtype
        pool = "" if pool_dtype == "float32" else f" with a {pool_dtype} pool"
        return (self.rounded_as or self.weights_dtype) + pool


FLOAT32 = Precision("float32", "float32")


def check_perplexity(
    call: StageCall, checkpoint: Path, model: CheckpointConfig, tokenizer: Tokenizer, scales: PoolScales
) -> PerplexityReport | None:
    """Measure the networks of the converted checkpoint in the folder ``checkpoint``; None where that is not asked for.

    Of an engine on a GPU, weights of less than 16 bits and the float8 pool of ``scales`` are measured; how far its
    network in 16 bits is from float32 the network check tells. The engines stand in ``call.destination`` for as long as
    that takes, one at a time.

    Raises: CheckpointError where logits are not finite.
    """
    pipeline = call.pipeline
    if not _is_wanted(call, count_parameters(model)):
        return None
    precision = _precision(pipeline, scales)
    limit = min(pipeline.engine.max_seq_len, MAX_PASSAGE_TOKENS)
    passages = [tokenizer.encode(passage)[:limit] for passage in PASSAGES]
    if precision == FLOAT32:
        ours = float32 = _measure(call, checkpoint, FLOAT32, passages, call.advance)
    else:  # one after the other: idle threads of a second engine would spin on the cores of the first
        float32 = _measure(call, checkpoint, FLOAT32, passages, _part_of(call.advance, 0, 2))
        ours = _measure(call, checkpoint, precision, passages, _part_of(call.advance, 1, 2))
    scores = [
        score_rows(log_probs, float32_log_probs, np.array(ids[1:], np.int64))
        for ids, log_probs, float32_log_probs in zip(passages, ours, float32, strict=True)
    ]
    report = summarise_scores(scores, model.vocab_size, rounds=precision != FLOAT32)
    for line in describe_report(report, str(precision)):
        call.say(line)
    return report


def run_passage(
    session: OnnxRuntimeSession, ids: Sequence[int], block_size: int, chunk_tokens: int = CHUNK_TOKENS
) -> Iterator[NDArray[np.float32]]:
    """Run all of ``ids`` but the last through ``session``, in chunks that are committed into the pool's first blocks.

    Yields the logits ``[T, V] float32`` of each chunk.
    """
    for first in range(0, len(ids) - 1, chunk_tokens):
        chunk = ids[first : min(first + chunk_tokens, len(ids) - 1)]
        logits = session.forward_logits(plain_step(chunk, first, block_size))
        rows = np.arange(len(chunk))
        session.commit(rows, first + rows)
        yield logits


def _precision(pipeline: Pipeline, scales: PoolScales) -> Precision:
    engine, pool_dtype = pipeline.engine, pipeline.kv_cache.dtype
    if is_on_gpu(pipeline):
        return FLOAT32._replace(rounded_as=STORED_AS.get(engine.weights_dtype), scales=scales)
    assert pool_dtype in ("float32", "float16"), "others are refused"
    return Precision(engine.weights_dtype, pool_dtype)


def _is_wanted(call: StageCall, num_parameters: int) -> bool:
    wanted = call.pipeline.check.perplexity
    if wanted == "auto" and num_parameters > MAX_PARAMETERS:
        size = f"{num_parameters / 1e9:.1f} billion parameters"
        call.say(f"perplexity is not measured unasked of {size}; check.perplexity=always asks for it")
        return False
    return wanted != "never"


def _measure(
    call: StageCall, checkpoint: Path, precision: Precision, passages: Sequence[Sequence[int]], advance: Advance
) -> list[NDArray[np.float32]]:
    """Return the log-probabilities ``[T, V] float32`` of what follows the T tokens of each passage but its last.

    The engine has the settings of the pipeline's that its results depend on, no drafts, and a short life.
    """
    engine, block_size = call.pipeline.engine, call.pipeline.kv_cache.block_size
    chunk_tokens = max(map(len, passages)) if precision.scales else CHUNK_TOKENS  # what is rounded is not committed
    results = []
    with tempfile.TemporaryDirectory(dir=call.destination) as scratch, ExitStack() as opened:
        directory = Path(scratch)
        build_engine(
            checkpoint,
            directory,
            weights_dtype=precision.weights_dtype,
            pool_dtype=precision.pool_dtype,
            kernels=engine.kernels,
            max_batch_size=1,
            max_seq_len=engine.max_seq_len,
            max_num_tokens=chunk_tokens,
            num_threads=engine.num_threads,
            block_size=block_size,
            max_blocks=-(-max(map(len, passages)) // block_size),
            prefix_cache=False,
            progress=_part_of(advance, 0, 2),
            rounded_as=precision.rounded_as,
            pool_scales=precision.scales,
        )
        session = OnnxRuntimeSession(directory, load_engine_config(directory))
        opened.callback(session.close)
        for index, ids in enumerate(passages):
            logits = np.concatenate(list(run_passage(session, ids, block_size, chunk_tokens)))
            if not np.isfinite(logits).all():
                raise _failure(call, precision, f"{np.count_nonzero(~np.isfinite(logits))} that are not")
            results.append(log_softmax(logits))
            _part_of(advance, 1, 2)(index + 1, len(passages))
    return results


def _failure(call: StageCall, precision: Precision, got: str) -> CheckpointError:
    cure = "fetch or train the checkpoint again"
    if precision.scales or precision.pool_dtype != "float32":
        cure = "set kv_cache.dtype to float32, or " + cure
    elif precision.rounded_as or precision.weights_dtype != "float32":
        cure = "set engine.weights_dtype to float32, or " + cure
    return CheckpointError(call.pipeline.target.checkpoint, f"logits are finite in {precision}", got, cure)


def _part_of(advance: Advance, index: int, num_parts: int) -> Advance:
    """Report the progress of one part as that of the whole, in which all parts count the same."""
    return lambda done, total: advance(index * 1000 + 1000 * done // max(total, 1), num_parts * 1000)
