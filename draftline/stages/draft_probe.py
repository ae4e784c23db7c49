"""Run texts through a target and one draft, and take down what each chose: acceptance at depth 1, without decoding."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.head_file import write_head_config
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.engine_config import EngineConfig, load_engine_config
from draftline.sessions.native_kernels import WantedKernels
from draftline.sessions.onnxruntime_builder import build_engine
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.sessions.protocol import DraftBatch, DraftSession, Session, StepBatch
from draftline.speculation import TreeShape
from draftline.stages.acceptance import Proposals, propose

NUM_CANDIDATES = 8
TREE = TreeShape("dynamic", NUM_CANDIDATES + 1, 1, NUM_CANDIDATES)
BLOCK_SIZE = 16


def probe_draft(
    target: Path,
    draft: DraftSource,
    passages: Sequence[Sequence[int]],
    scratch: Path,
    *,
    head: HeadConfig | None = None,
    kernels: WantedKernels = "auto",
    num_threads: int = 0,
) -> tuple[Proposals, Proposals]:
    """Return what a draft proposes behind each token that it knows, and what the texts themselves go on with.

    Both stand beside the target's own choices: the second pair tells whether these are worth anything.

    ``target`` and ``draft`` are converted checkpoints, run in float32; ``head`` takes the place of the draft's own
    configuration. An engine stands in the folder ``scratch`` for as long as that takes.
    """
    longest = max(map(len, passages))
    with tempfile.TemporaryDirectory(dir=scratch) as folder, ExitStack() as opened:
        engine = Path(folder, "engine")
        engine.mkdir()
        if head is not None and draft.checkpoint is not None:
            draft = DraftSource(
                draft.method, _variant(draft.checkpoint, head, Path(folder, "draft")), draft.weights_dtype
            )
        build_engine(
            target,
            engine,
            weights_dtype="float32",
            kernels=kernels,
            max_batch_size=1,
            max_seq_len=longest,
            max_num_tokens=longest,
            num_threads=num_threads,
            block_size=BLOCK_SIZE,
            max_blocks=-(-longest // BLOCK_SIZE) + 1,
            prefix_cache=False,
            progress=lambda done, total: None,
            drafts=[draft],
            tree=TREE,
        )
        config = load_engine_config(engine)
        session = open_session(engine, config)
        opened.callback(session.close)
        (drafter,) = open_draft_sessions(engine, config, session)
        if drafter is not None:
            opened.callback(drafter.close)
        found = [_run_passage(session, drafter, config, np.array(ids, np.int32)) for ids in passages]
    of_draft, of_text = zip(*found, strict=True)
    return _joined(of_draft), _joined(of_text)


def _joined(parts: Sequence[Proposals]) -> Proposals:
    return Proposals(
        np.concatenate([part.choices for part in parts]),
        np.concatenate([part.proposed for part in parts]),
        np.concatenate([part.confidence for part in parts]),
    )


def _variant(checkpoint: Path, head: HeadConfig, destination: Path) -> Path:
    """Give the draft's tensors another configuration, in the folder ``destination``."""
    destination.mkdir()
    write_head_config(destination / CONFIG_FILE, head)
    try:
        os.link(checkpoint / WEIGHTS_FILE, destination / WEIGHTS_FILE)
    except OSError:  # another file system, or one without links
        shutil.copyfile(checkpoint / WEIGHTS_FILE, destination / WEIGHTS_FILE)
    return destination


def _run_passage(
    session: Session, drafter: DraftSession | None, config: EngineConfig, ids: NDArray[np.int32]
) -> tuple[Proposals, Proposals]:
    result = session.forward(_step(ids))
    choices = result.sampled_ids.astype(np.int64)
    of_text = propose(choices[:-1], ids[1:, None], np.zeros((len(ids) - 1, 1), np.float32))
    if drafter is None:  # Medusa's first head looks one token past the target's own choice
        assert result.head_ids is not None, "such a drafter is part of the target's graph"
        assert result.head_log_probs is not None, "they come with their ids"
        return propose(choices[1:], result.head_ids[:-1, 0], result.head_log_probs[:-1, 0]), of_text
    if config.drafts[0].feature_size == 0:
        found = drafter.forward(_draft_batch(ids))
        return propose(choices, found.token_ids, found.log_probs), of_text
    rows = np.arange(len(ids) - 1)  # row t of a head reads the feature of token t, and token t + 1
    drafter.keep_features(rows, rows)
    found = drafter.forward(_draft_batch(ids[1:]))
    return propose(choices[1:], found.token_ids, found.log_probs), of_text


def _step(ids: NDArray[np.int32]) -> StepBatch:
    num_rows = len(ids)
    return StepBatch(
        input_ids=ids,
        position_ids=np.arange(num_rows, dtype=np.int32),
        sequence_starts=np.array([0, num_rows], np.int32),
        context_lengths=np.zeros(1, np.int32),
        block_table=np.arange(-(-num_rows // BLOCK_SIZE), dtype=np.int32)[None],
        sample_rows=np.arange(num_rows, dtype=np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        uniform=np.zeros(num_rows, np.float32),
    )


def _draft_batch(ids: NDArray[np.int32]) -> DraftBatch:
    step, rows = _step(ids), np.arange(len(ids), dtype=np.int32)
    return DraftBatch(
        is_first=True,
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        feature_rows=rows,
        sequence_starts=step.sequence_starts,
        row_ids=rows,
        context_lengths=step.context_lengths,
        block_table=step.block_table,
        candidate_rows=step.sample_rows,
        temperature=step.temperature,
        top_k=step.top_k,
        top_p=step.top_p,
        uniform=step.uniform,
    )
