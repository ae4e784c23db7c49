"""Build an engine for ONNX Runtime: the target's graph, those of its drafters, their weights, ``config.json``."""

from __future__ import annotations

import itertools
import shutil
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import BuildError
from draftline.graphs.decoder import Pool
from draftline.graphs.native_operators import NATIVE
from draftline.graphs.operators import PORTABLE, Operators
from draftline.graphs.target import EMBEDDING, LM_HEAD, DraftTaps, build_target_graph
from draftline.graphs.tree_attention import inline_tree_attention
from draftline.sessions.draft_builder import DraftSource, describe_drafts, target_taps
from draftline.sessions.engine_config import (
    MODEL_FILE,
    TOKENIZER_FILES,
    EngineConfig,
    PoolDtype,
    PoolScales,
    draft_model_file,
    write_engine_config,
)
from draftline.sessions.engine_weights import CHECKPOINT_FILE, WEIGHTS_FILE, read_engine_weights
from draftline.sessions.native_kernels import Kernels, WantedKernels, choose_kernels
from draftline.sessions.rotary_weights import rotary_entries
from draftline.speculation import EXACT, Acceptance, TreeShape

__all__ = ["CHECKPOINT_FILE", "MODEL_FILE", "WEIGHTS_FILE", "DraftSource", "build_engine"]

OPERATORS: dict[Kernels, Operators] = {"native": NATIVE, "onnxruntime": PORTABLE}
POOL_TYPES: dict[PoolDtype, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def build_engine(
    checkpoint: Path,
    destination: Path,
    *,
    weights_dtype: str,
    pool_dtype: PoolDtype = "float32",
    kernels: WantedKernels = "auto",
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    num_threads: int,
    block_size: int,
    max_blocks: int,
    prefix_cache: bool,
    progress: Callable[[int, int], None],
    drafts: Sequence[DraftSource] = (),
    tree: TreeShape | None = None,
    acceptance: Acceptance = EXACT,
    captured_layers: Sequence[int] | None = None,
    further_layers: Sequence[int] = (),
    rounded_as: str | None = None,
    pool_scales: PoolScales = (),
) -> None:
    """Write the engine of a converted checkpoint into the existing folder ``destination``.

    A float32 checkpoint built with float32 weights is hard-linked beside the graph (copied across file systems), and
    the graph's initializers point into it. All other tensors go, quantised or cast, to ``weights.safetensors``. Drafter
    I has the same files, named ``draft-I.onnx``, ``draft-I-rank0.safetensors`` and ``draft-I.safetensors``; the heads
    of Medusa are part of the target's graph.

    ``captured_layers``, where there are no drafts: the features of a forward are the outputs of these layers (0-based),
    then the final hidden rows, as trainers of drafts read them. None = there are no features. ``further_layers``: whose
    outputs stand behind the features that the drafts read, for who measures drafts.

    ``rounded_as``, ``pool_scales``: to measure what a GPU rounds. Matrices of float32 hold what a form of TensorRT's
    rounds them to; keys and values of a step are rounded as a float8 pool with these scales does, and a commit rounds
    nothing: one forward runs a whole text.

    Raises: BuildError for drafts that do not fit the target, the tree or each other, for layers that the target does
    not have, and for native kernels where this machine has none.
    """
    config = load_checkpoint_config(checkpoint)
    chosen = choose_kernels(kernels)
    operators = OPERATORS[chosen]
    pool = Pool(block_size, POOL_TYPES[pool_dtype], pool_scales)
    described = describe_drafts(config, drafts, tree, weights_dtype, chosen, max_seq_len)
    taps = target_taps(described) if captured_layers is None else _training_taps(config, captured_layers, drafts)
    taps = replace(taps, further_layers=tuple(further_layers))
    target = read_engine_weights(
        checkpoint,
        config.dtype,
        weights_dtype,
        chosen,
        outer=(EMBEDDING, LM_HEAD),
        first=rotary_entries(config, max_seq_len, max_seq_len),
        file=WEIGHTS_FILE,
        linked_file=CHECKPOINT_FILE,
        rounded_as=rounded_as,
    )
    stored = [target, *(draft.weights for draft in described if draft.weights)]
    report = _counter(sum(len(weights.entries) for weights in stored), progress)
    locations = target.write(destination, report)
    tensors = [draft.weights.write(destination, report) if draft.weights else {} for draft in described]
    heads = [own for draft, own in zip(described, tensors, strict=True) if draft.config.method == "medusa"]
    graph = build_target_graph(config, locations | dict(ChainMap(*heads)), pool, taps, operators)
    _write_graph(destination / MODEL_FILE, graph)
    for index, (draft, own) in enumerate(zip(described, tensors, strict=True)):
        draft_graph = draft.build_graph(own, locations, config, pool, operators)
        if draft_graph is not None:
            _write_graph(destination / draft_model_file(index), draft_graph)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, destination / name)
    write_engine_config(
        destination,
        EngineConfig(
            backend="onnxruntime",
            kernels=chosen,
            weights_dtype=weights_dtype,
            pool_dtype=pool_dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            num_threads=num_threads,
            block_size=block_size,
            max_blocks=max_blocks,
            prefix_cache=prefix_cache,
            model=config,
            drafts=tuple(draft.config for draft in described),
            tree=tree,
            acceptance=acceptance,
            captured_layers=None if captured_layers is None else taps.captured_layers,
        ),
    )


def _training_taps(
    target: CheckpointConfig, captured_layers: Sequence[int], drafts: Sequence[DraftSource]
) -> DraftTaps:
    if drafts:
        got, cure = ", ".join(draft.method for draft in drafts), "leave the drafts out"
        raise BuildError("captured_layers", "stand in an engine without drafts", got, cure)
    num_layers, layers = target.num_hidden_layers, tuple(captured_layers)
    if list(layers) != sorted(set(layers) & set(range(num_layers))):
        rule = f"rise, and are layers of the target, 0..{num_layers - 1}"
        raise BuildError("captured_layers", rule, layers, "name each layer once, in order")
    return DraftTaps(captured_layers=layers, final_hidden=True)


def _write_graph(path: Path, graph: onnx.ModelProto) -> None:
    onnx.save(inline_tree_attention(graph), path)


def _counter(total: int, progress: Callable[[int, int], None]) -> Callable[[], None]:
    done = itertools.count(1)
    return lambda: progress(next(done), total)
