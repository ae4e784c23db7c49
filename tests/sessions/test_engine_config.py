"""What is written about an engine is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.config import CheckpointConfig, Experts
from draftline.sessions.engine_config import DraftConfig, EngineConfig, load_engine_config, write_engine_config
from draftline.speculation import Acceptance, TreeShape

MODEL = CheckpointConfig(
    "LlamaForCausalLM", "float32", 320, 64, 2, 4, 2, 16, 96, 1e-5, 10000.0, 2048, eos_token_ids=(2, 5)
)
LIMITS: dict[str, Any] = {
    "backend": "onnxruntime",
    "weights_dtype": "int8",
    "max_batch_size": 8,
    "max_seq_len": 2048,
    "max_num_tokens": 64,
    "num_threads": 0,
    "block_size": 16,
    "max_blocks": 512,
    "prefix_cache": True,
    "model": MODEL,
}
SPECULATION: dict[str, Any] = {
    "drafts": (DraftConfig("ngram"), DraftConfig("medusa", num_candidates=4, num_heads=3)),
    "tree": TreeShape("static", max_nodes=3, max_depth=2, top_k=2, choices=((0,), (0, 1))),
    "acceptance": Acceptance("typical", epsilon=0.1, alpha=0.3),
}


@pytest.mark.parametrize("experts", [None, Experts(8, 2, 96, renormalises=True)], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "speculation",
    [{}, SPECULATION, {"captured_layers": ()}, {"captured_layers": (0, 1)}],
    ids=["plain", "drafts", "final hidden rows", "captured layers"],
)
@pytest.mark.parametrize("options", [("native", "float16"), ("onnxruntime", "float32")])
def test_what_is_written_is_read(
    tmp_path: Path, options: tuple[Any, Any], speculation: dict[str, Any], experts: Experts | None
) -> None:
    kernels, pool_dtype = options
    limits = LIMITS | {"model": replace(MODEL, experts=experts)}
    config = EngineConfig(kernels=kernels, pool_dtype=pool_dtype, **limits, **speculation)
    write_engine_config(tmp_path, config)
    assert load_engine_config(tmp_path) == config
