"""Networks emitted in native operators against the same networks in ONNX's own: every graph of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.sessions.engine_config import MODEL_FILE, DraftMethod, draft_model_file
from draftline.sessions.native_kernels import Kernels, library_of_engine
from draftline.speculation import TreeShape
from draftline.tree import build_tree_mask, chain_parents, pack_mask, position_offsets
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

# Logits have a spread of 2: sums of two layers in another order move them by 1e-5, a wrong term by more than 0.1.
TOLERANCE = 1e-4
NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE = 24, 16, 320
CONTEXTS, TREES = (37, 0, 130), ((-1, 0, 0, 1, 1, 2), chain_parents(5), chain_parents(1))
METHODS: tuple[DraftMethod, ...] = ("draft_model", "eagle1", "eagle3", "medusa")
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
Sessions = dict[Kernels, onnxruntime.InferenceSession]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Kernels, Path]:
    """Engines of one target with a draft of every method, for either kernels."""
    directory = tmp_path_factory.mktemp("operators")
    target = write_tiny_checkpoint(directory / "target", request.param, vocab_size=VOCAB_SIZE)
    drafts: dict[DraftMethod, Path] = {
        "draft_model": write_tiny_checkpoint(directory / "draft_model", request.param, num_layers=1, seed=4),
        "eagle1": write_tiny_eagle1(directory / "eagle1", target),
        "eagle3": write_tiny_eagle3(directory / "eagle3", target, draft_vocab_size=100),
        "medusa": write_tiny_medusa(directory / "medusa", target, num_heads=3),
    }
    tree = TreeShape("dynamic", max_nodes=16, max_depth=3, top_k=4)
    built: dict[Kernels, Path] = {}
    for kernels in ("onnxruntime", "native"):
        (directory / kernels).mkdir()
        sources = [(method, drafts[method]) for method in METHODS]
        built[kernels] = build_tiny_engine(directory / kernels, target, kernels=kernels, drafts=sources, tree=tree)
    return built


def open_graphs(engines: dict[Kernels, Path], file: str) -> Sessions:
    sessions: Sessions = {}
    for kernels, engine in engines.items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if kernels == "native":
            options.register_custom_ops_library(str(library_of_engine(engine)))
        sessions[kernels] = onnxruntime.InferenceSession(engine / file, options, providers=["CPUExecutionProvider"])
    return sessions


def make_feeds(session: onnxruntime.InferenceSession, random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """A step of three sequences for whatever a graph asks; in graphs of drafts, some of its rows are kept ones."""
    lengths = [len(tree) for tree in TREES]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    num_rows, num_kept = int(starts[-1]), 4 if "row_ids" in shapes else 0
    row_ids = random.permutation(num_rows) if num_kept else np.arange(num_rows)
    new_rows = np.argsort(row_ids)[num_kept:]
    num_new, num_own = len(new_rows), len(new_rows) // 2
    masks = np.zeros((num_rows, 1), np.int32)
    for first, parents in zip(starts, TREES, strict=False):
        masks[first : first + len(parents)] = pack_mask(build_tree_mask(parents))
    positions = np.concatenate([c + position_offsets(t) for c, t in zip(CONTEXTS, TREES, strict=True)])
    table = np.full((3, 16), -1, np.int32)  # the function body asks for a multiple of 128 tokens
    blocks = random.permutation(NUM_BLOCKS).tolist()
    for row, (context, length) in enumerate(zip(CONTEXTS, lengths, strict=True)):
        num_columns = -(-(context + length) // BLOCK_SIZE)
        table[row, :num_columns] = [blocks.pop() for _ in range(num_columns)]
    rows = random.permutation(num_new)[:5].astype(np.int32)

    def normal(*size: int) -> NDArray[np.float32]:
        return random.standard_normal(size).astype(np.float32)

    feeds: dict[str, NDArray[Any]] = {
        "input_ids": random.integers(0, VOCAB_SIZE, num_new).astype(np.int32),
        "position_ids": positions[new_rows].astype(np.int32),
        "block_table": table,
        "context_lengths": np.array(CONTEXTS, np.int32),
        "sequence_starts": starts.astype(np.int32),
        "packed_mask": masks,
        "sample_rows": rows,
        "candidate_rows": rows,
        "temperature": np.array([0, 0, 1, 0.7, 0], np.float32),
        "top_k": np.array([0, 0, 5, 0, 1], np.int32),
        "top_p": np.array([1, 0.5, 1, 0.8, 1], np.float32),
        "uniform": random.random(5).astype(np.float32),
        "edit_rows": np.array([0, 3], np.int32),
        "edit_token_ids": np.array([7, 9], np.int32),
        "edit_bias": np.array([100, -1], np.float32),
        "edit_divisor": np.array([1.5, 1], np.float32),
        "edit_offset": np.array([0.5, 0], np.float32),
        "row_ids": row_ids.astype(np.int32),
        "new_rows": new_rows.astype(np.int32),
    }
    for name, shape in shapes.items():
        if name.startswith("kv_pool."):
            feeds[name] = normal(NUM_BLOCKS, *shape[1:])
        elif name == "kept_kv":
            feeds[name] = normal(num_kept, *shape[1:])
        elif name == "target_features":
            feeds[name] = normal(num_new - num_own, *shape[1:])
        elif name == "own_features":
            feeds[name] = normal(num_own, *shape[1:])
    return {name: feeds[name] for name in shapes}


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def assert_equal_networks(sessions: Sessions, seed: int) -> None:
    feeds = make_feeds(sessions["native"], np.random.default_rng(seed))
    names = [value.name for value in sessions["native"].get_outputs()]
    assert names == [value.name for value in sessions["onnxruntime"].get_outputs()]
    found, wanted = (sessions[kernels].run(None, feeds) for kernels in ("native", "onnxruntime"))
    for name, of_native, of_portable in zip(names, found, wanted, strict=True):
        if of_portable.dtype == np.int64:  # choices among logits that no rounding brings near each other
            np.testing.assert_array_equal(of_native, of_portable, name)
        else:
            np.testing.assert_allclose(of_native, of_portable, rtol=0, atol=TOLERANCE, err_msg=name)


def test_targets_with_every_tap(engines: dict[Kernels, Path]) -> None:
    sessions = open_graphs(engines, MODEL_FILE)
    assert {"features", "head_ids"} < {value.name for value in sessions["native"].get_outputs()}
    assert_equal_networks(sessions)


@pytest.mark.parametrize("index", [index for index, method in enumerate(METHODS) if method != "medusa"])
def test_drafts(engines: dict[Kernels, Path], index: int) -> None:
    assert_equal_networks(open_graphs(engines, draft_model_file(index)))
