"""Part ``logits``: one prefill and one step of trees, through an engine on this GPU and through the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.bench.gpu.engines import ENGINES, REFERENCE, engine_path
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.workloads import PROMPTS
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.opening import open_session
from draftline.sessions.protocol import Session, StepBatch
from draftline.sessions.tensorrt.check_steps import Sequences, prefill_sequences, tree_sequences
from draftline.sessions.tensorrt.network_check import TOLERANCES
from draftline.sessions.tensorrt.network_steps import ids_differ, relative_difference

SEED = 6


def check_logits(call: PartCall) -> None:
    """The tolerances are those of the network check; engines follow each other, so that one has all of the memory."""
    for done, engine in enumerate(ENGINES):
        if call.is_over:
            call.tell_left_out(len(ENGINES) - done, "engines")
            return
        for finding in compare_logits(
            engine_path(call.output, REFERENCE), engine_path(call.output, engine.name), engine.name, engine.dtype
        ):
            call.tell(finding)


def compare_logits(reference: Path, checked: Path, name: str, dtype: NetworkDtype) -> list[Finding]:
    """Run both steps in both engines, one after the other; return how far logits and greedy tokens are apart."""
    config = load_engine_config(checked)
    random = np.random.default_rng(SEED)
    prefill, _ = prefill_sequences(config.max_seq_len, config.block_size, random)
    ids = np.array(load_tokenizer(reference).encode(" ".join(PROMPTS)), np.int32)
    steps = {"a prefill": prefill, "trees behind it": tree_sequences(prefill)}
    results = []
    for directory in (reference, checked):
        session = open_session(directory, load_engine_config(directory))
        try:
            results.append(_run_steps(session, list(steps.values()), ids, config.block_size))
        finally:
            session.close()
    findings, tolerance = [], TOLERANCES[dtype]
    for step, (expected, expected_ids), (found, found_ids) in zip(steps, *results, strict=True):
        unit, note = "of the largest logit", f"{len(expected)} rows"
        difference = relative_difference(found, expected)
        findings.append(Finding(f"{name}: logits of {step}", difference, unit, tolerance, note))
        is_explained = not ids_differ(found_ids, expected_ids, expected, tolerance)
        others = f"{int((found_ids != expected_ids).sum())} of {len(expected_ids)} are others"
        what = f"{name}: greedy tokens of {step}"
        findings.append(Finding(what, 0 if is_explained else 1, "beyond the tolerance", 0, others))
    return findings


def _run_steps(
    session: Session, steps: list[Sequences], ids: NDArray[np.int32], block_size: int
) -> list[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Run the steps, committing the rows of all but the last; return logits ``[R, V]`` and ids ``[R]`` of each."""
    results, first = [], 0
    for index, sequences in enumerate(steps):
        num_rows = int(sequences.starts[-1])
        batch = make_batch(sequences, np.take(ids, np.arange(first, first + num_rows), mode="wrap"), block_size)
        result = session.forward(batch)
        assert result.logits is not None, "they were asked for"
        results.append((result.logits, result.sampled_ids))
        if index + 1 < len(steps):
            session.commit(np.arange(num_rows), _slots(sequences, block_size))
        first += num_rows
    return results


def _slots(sequences: Sequences, block_size: int) -> NDArray[np.int64]:
    """Return the slot of every in-step row, of sequences that are chains."""
    slots = []
    for index, (context, parents) in enumerate(zip(sequences.contexts, sequences.parents, strict=True)):
        blocks, offsets = sequences.slots(index, context + np.arange(len(parents)), block_size)
        slots.append(blocks.astype(np.int64) * block_size + offsets)
    return np.concatenate(slots)


def make_batch(
    sequences: Sequences, input_ids: NDArray[np.int32], block_size: int, *, only_last: bool = False
) -> StepBatch:
    """Make the step of ``sequences``, of whose rows all are sampled, greedily, or the last one only."""
    num_rows = int(sequences.starts[-1])
    rows = np.arange(num_rows - 1 if only_last else 0, num_rows, dtype=np.int32)
    feeds = sequences.attention_feeds(block_size)
    return StepBatch(
        input_ids=input_ids.astype(np.int32),
        position_ids=sequences.positions,
        sequence_starts=feeds["sequence_starts"],
        context_lengths=feeds["context_lengths"],
        block_table=feeds["block_table"],
        packed_mask=feeds["packed_mask"],
        sample_rows=rows,
        temperature=np.zeros(len(rows), np.float32),
        top_k=np.zeros(len(rows), np.int32),
        top_p=np.ones(len(rows), np.float32),
        uniform=np.zeros(len(rows), np.float32),
        wants_logits=True,
    )
