"""Two steps of a graph, a prefill and a tree behind it, run by the parsed network and by ONNX Runtime, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.oracle import FLOAT8_MAX
from draftline.sessions.engine_config import DraftConfig
from draftline.sessions.tensorrt.check_steps import (
    Sequences,
    commit,
    empty_pools,
    prefill_sequences,
    tree_sequences,
)
from draftline.sessions.tensorrt.emission import EmittedGraph, EmittedGraphs
from draftline.sessions.tensorrt.evaluation import evaluate_network
from draftline.sessions.tensorrt.network import ParsedNetwork
from draftline.sessions.tensorrt.profiles import StepLimits

Array = NDArray[Any]
ID_OUTPUTS = {"greedy_ids": "logits", "candidate_ids": "candidate_log_probs", "head_ids": "head_log_probs"}
FEATURE_INPUTS = ("target_features", "own_features")
SEED = 6


class CheckedGraph(NamedTuple):
    """A graph that is run both ways: ``network`` by numpy, ``reference`` by ONNX Runtime."""

    graph: EmittedGraph
    network: ParsedNetwork
    weights: Mapping[str, Array]
    reference: Any


class NetworkSteps:
    """Runs the two steps of a graph both ways. Pools and features are the reference's, for both.

    ``differences``: of each output, so far, the largest difference as a share of the largest magnitude in it; of ids 0,
    or 1 where one differs that ``tolerance`` does not explain.
    """

    def __init__(self, checked: CheckedGraph, limits: StepLimits, token_ids: Sequence[int], tolerance: float) -> None:
        self._checked, self._block_size, self._tolerance = checked, limits.block_size, tolerance
        self.differences: dict[str, float] = {}
        self._ids = np.array(token_ids, np.int32)
        random = np.random.default_rng(SEED)
        self._prefill, num_blocks = prefill_sequences(limits.max_seq_len, limits.block_size, random)
        shape = checked.graph.kernel_shape
        names = [value.name for value in checked.reference.get_inputs()]
        num_layers = sum(name.startswith("kv_pool.") for name in names)
        pool_shape = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
        self._pools = empty_pools(num_layers, pool_shape, numpy_dtype(shape.kv_dtype))

    def run_target(self) -> Array | None:
        """Run the target's graph; returns the features of the prefill, None without."""
        first = self._run(self._target_feeds(self._prefill, 0))
        lengths = [len(own) for own in self._prefill.parents]
        commit(self._pools, self._stored(first["kv_rows"]), self._prefill, lengths)
        self._run(self._target_feeds(tree_sequences(self._prefill), len(first["kv_rows"])))
        return first.get("features")

    def run_draft(self, draft: DraftConfig, features: Array | None, emitted: EmittedGraphs) -> None:
        """Run a drafter's graph: first over the prefill's rows, then over two nodes behind each sequence's last row."""
        sequences, ends = self._prefill, self._prefill.starts[1:] - 1
        num_rows = int(sequences.starts[-1])
        feeds = self._draft_feeds(sequences, np.arange(num_rows), 0, num_rows)
        if draft.feature_size:
            assert features is not None, "the target puts out what its drafters read"
            columns = slice(draft.feature_start, draft.feature_start + draft.feature_size)
            feeds |= self._feature_feeds(features[:, columns], np.zeros((0, draft.hidden_size), features.dtype))
        first = self._run(feeds | {"candidate_rows": ends.astype(np.int32)})
        lengths = [len(own) - 1 for own in sequences.parents]  # the last row stays in the step, as a kept one
        rows = self._stored(first["kv_rows"])
        commit(self._pools, rows, sequences, lengths)
        nodes = Sequences(tuple(lengths), tuple(np.array([-1, 0, 0], np.int32) for _ in lengths), sequences.blocks)
        kept, new = np.arange(len(ends)), len(ends) + np.arange(2 * len(ends)).reshape(-1, 2)
        row_ids = np.concatenate([kept[:, None], new], axis=1).reshape(-1)
        feeds = self._draft_feeds(nodes, row_ids, len(ends), 2 * len(ends)) | {"kept_kv": rows[ends]}
        if draft.feature_size:
            fed = np.repeat(first["hidden"][ends], 2, axis=0)
            feeds |= self._feature_feeds(np.zeros((0, draft.feature_size), fed.dtype), fed)
        self._run(feeds | {"candidate_rows": np.arange(2 * len(ends), dtype=np.int32)})

    def _target_feeds(self, sequences: Sequences, first_id: int) -> dict[str, Array]:
        num_rows = int(sequences.starts[-1])
        return {
            "input_ids": self._some_ids(first_id, num_rows),
            "position_ids": sequences.positions,
            "sample_rows": np.arange(num_rows, dtype=np.int32),
            **sequences.attention_feeds(self._block_size),
            **self._pools,
        }

    def _draft_feeds(self, sequences: Sequences, row_ids: Array, num_kept: int, num_new: int) -> dict[str, Array]:
        """``row_ids [T]``: M kept rows first, then N new ones, in packed order."""
        new_rows = np.argsort(row_ids)[num_kept:].astype(np.int32)
        pool = self._pools["kv_pool.0"]
        heads = 2 * len(self._pools) * pool.shape[2]
        return {
            "input_ids": self._some_ids(1, num_new),
            "position_ids": sequences.positions[new_rows],
            "kept_kv": np.zeros((0, heads, pool.shape[4]), pool.dtype),
            "row_ids": row_ids.astype(np.int32),
            "new_rows": new_rows,
            **sequences.attention_feeds(self._block_size),
            **self._pools,
        }

    def _feature_feeds(self, target: Array, own: Array) -> dict[str, Array]:
        return {"target_features": target, "own_features": own}

    def _some_ids(self, first: int, count: int) -> Array:
        return np.take(self._ids, np.arange(first, first + count), mode="wrap")

    def _stored(self, kv_rows: Array) -> Array:
        """Round rows of the reference to the numbers that the pool holds."""
        dtype = self._pools["kv_pool.0"].dtype
        if not self._checked.graph.pool_scales:
            return kv_rows.astype(dtype)
        scales = np.array(self._checked.graph.pool_scales, np.float32).reshape(1, -1, 1, 1)
        planes = kv_rows.reshape(len(kv_rows), scales.size, -1, kv_rows.shape[-1]).astype(np.float32)
        return np.clip(planes / scales, -FLOAT8_MAX, FLOAT8_MAX).astype(dtype).reshape(kv_rows.shape)

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Run both ways and compare; returns the reference's outputs."""
        found = evaluate_network(self._checked.network, self._own_feeds(feeds), self._checked.weights)
        session = self._checked.reference
        names = [output.name for output in session.get_outputs()]
        expected: dict[str, Array] = dict(zip(names, session.run(None, self._reference_feeds(feeds)), strict=True))
        for name in expected:
            self.differences[name] = max(self.differences.get(name, 0.0), self._difference(name, found, expected))
        return expected

    def _difference(self, name: str, found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
        def of(rows: slice) -> float:
            own, reference = found[name][rows], expected[name][rows]
            if name not in ID_OUTPUTS:
                return relative_difference(own, reference)
            return float(ids_differ(own, reference, expected[ID_OUTPUTS[name]][rows], self._tolerance))

        if not self._checked.graph.has_experts:
            return of(slice(None))
        return float(np.median([of(slice(row, row + 1)) for row in range(len(expected[name]))]))

    def _own_feeds(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Give features the network's dtype, and the pool of float8 numbers as their bits."""
        dtype = numpy_dtype(self._checked.graph.kernel_shape.dtype)
        features = {name: feeds[name].astype(dtype) for name in FEATURE_INPUTS if name in feeds}
        bits = {name: value.view(np.int8) for name, value in feeds.items() if value.dtype.name == "float8_e4m3fn"}
        return feeds | features | bits

    def _reference_feeds(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Widen what is bfloat16, where the reference is in float32, and the numbers of a float8 pool to its rows."""
        dtype = np.float16 if self._checked.graph.kernel_shape.dtype == "float16" else np.float32
        widened = {name: value.astype(dtype) for name, value in feeds.items() if value.dtype.name == "bfloat16"}
        for layer, scales in enumerate(self._checked.graph.pool_scales):
            numbers = feeds[f"kv_pool.{layer}"].astype(np.float32)
            widened[f"kv_pool.{layer}"] = (numbers * np.array(scales, np.float32).reshape(2, 1, 1, 1)).astype(dtype)
        return feeds | widened


def relative_difference(found: Array, expected: Array) -> float:
    """Return the largest difference as a share of the largest magnitude expected; infinite where one is not finite.

    >>> round(relative_difference(np.array([1.0, -4.1]), np.array([1.1, -4.0])), 3)
    0.025
    """
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    if not b.size:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))


def ids_differ(found: Array, expected: Array, scores: Array, tolerance: float) -> bool:
    """Tell whether ids differ where ``scores`` set them apart by more than the tolerance allows.

    Shapes: ``found``, ``expected [R]`` with ``scores [R, V]``, the most probable token of all V; or
    ``[..., k]`` with ``scores [..., k]``, those of the k ids, the highest first. The last of k has no known runner-up.
    """
    margin = 2 * tolerance * np.abs(scores).max()
    if found.ndim < scores.ndim:
        best, second = -np.sort(-scores, axis=-1)[..., :2].T
        is_clear = best - second > margin
    else:
        gaps = scores[..., :-1] - scores[..., 1:]
        before = np.concatenate([np.full_like(scores[..., :1], np.inf), gaps], axis=-1)
        after = np.concatenate([gaps, np.zeros_like(scores[..., :1])], axis=-1)
        is_clear = np.minimum(before, after) > margin
    return bool((is_clear & (found != expected)).any())
