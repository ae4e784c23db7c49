"""Native operators and ONNX Runtime's write the same texts, and a float16 pool takes half the memory for little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.generation import LoadedEngine, load_engine
from draftline.sessions.native_kernels import Kernels
from draftline.speculation import TreeShape
from tests.sessions.tiny_engines import Text, build_tiny_engine, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint

TREE = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=3)
PROMPT_LENGTHS = (3, 130, 45)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3-thirds": {"architecture": "qwen3", "hidden_size": 144, "heads": 9, "kv_heads": 3, "tie": True},
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("agree")
    return write_tiny_checkpoint(directory / "checkpoint", **MODELS[request.param], extra_config={"eos_token_id": 0})


def texts_of(loaded: LoadedEngine) -> list[tuple[int, ...]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 260, length).tolist() for length in PROMPT_LENGTHS]
    return [answer.token_ids for answer in loaded.generate(prompts, max_tokens=120)]


def test_texts_are_the_same(tmp_path: Path, checkpoint: Path) -> None:
    """Greedy, in float32, over the border of a chunk of keys; plain, and drafted in trees."""
    texts = []
    for kernels in ("native", "onnxruntime"):
        for drafts in ([], [("draft_model", checkpoint)]):
            directory = tmp_path / f"{kernels}-{len(drafts)}"
            directory.mkdir()
            options: dict[str, Any] = {"kernels": kernels, "drafts": drafts, "tree": TREE if drafts else None}
            with load_engine(build_tiny_engine(directory, checkpoint, **options)) as loaded:
                texts.append(texts_of(loaded))
    assert sum(map(len, texts[0])) > 300, "the texts are long"
    assert texts[1:] == texts[:1] * 3


def test_a_pool_of_half_floats_takes_half_the_memory_and_moves_logits_little(
    tmp_path: Path, checkpoint: Path, kernels: Kernels
) -> None:
    ids = np.random.default_rng(1).integers(3, 260, 150).tolist()
    logits, num_bytes = [], []
    for pool_dtype in ("float32", "float16"):
        directory = tmp_path / pool_dtype
        directory.mkdir()
        session = open_tiny_session(build_tiny_engine(directory, checkpoint, kernels=kernels, pool_dtype=pool_dtype))
        logits.append(run_text(session, Text(list(range(10))), ids, [100, *[1] * 50]))
        num_bytes.append(session._graph.pool.nbytes)
        session.close()
    assert num_bytes[0] == 2 * num_bytes[1]
    change = logits[1] - logits[0]
    assert 1e-6 < np.sqrt((change**2).mean()) / logits[0].std() < 2e-3
