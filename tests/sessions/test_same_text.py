"""The same request gives the same ids: alone or in a batch, whatever the chunks, blocks, threads and prefix cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.generation import LoadedEngine, load_engine
from draftline.runtime.request import SamplingParameters
from draftline.sessions.engine_config import load_engine_config, write_engine_config
from draftline.sessions.native_kernels import Kernels
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint

NUM_REQUESTS = 16
MAX_TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Lengths of 1 to 150 tokens; some share a long prefix."""
    random = np.random.default_rng(0)
    shared = random.integers(3, 260, 70).tolist()
    lengths = random.integers(1, 80, NUM_REQUESTS).tolist()
    return [
        (shared if index % 4 == 1 else []) + random.integers(3, 260, length).tolist()
        for index, length in enumerate(lengths)
    ]


PROMPTS = make_prompts()
SAMPLED = [SamplingParameters(temperature=0.8, seed=seed) for seed in range(NUM_REQUESTS)]
MIXED = [
    SamplingParameters(),
    SamplingParameters(temperature=0.8, top_k=20, seed=5),
    SamplingParameters(temperature=1.3, top_p=0.9, seed=2**63),
    SamplingParameters(temperature=0.6, top_k=50, top_p=0.95, seed=7),
] * (NUM_REQUESTS // 4)
REQUESTS = {"sampled": SAMPLED, "mixed": MIXED}


@pytest.fixture(scope="module", params=[("float32", "float32"), ("int8", "float16"), ("int4", "float32")])
def engine(request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights_dtype, pool_dtype = request.param
    directory = tmp_path_factory.mktemp("engine")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint", hidden_size=72, heads=3, kv_heads=1, vocab_size=267)
    return build_tiny_engine(directory, checkpoint, weights_dtype=weights_dtype, pool_dtype=pool_dtype, kernels=kernels)


def ids_of(loaded: LoadedEngine, sampling: list[SamplingParameters], together: bool) -> list[tuple[int, ...]]:
    if together:
        return [answer.token_ids for answer in loaded.generate(PROMPTS, MAX_TOKENS, sampling)]
    pairs = zip(PROMPTS, sampling, strict=True)
    return [loaded.generate([prompt], MAX_TOKENS, parameters)[0].token_ids for prompt, parameters in pairs]


@pytest.fixture(scope="module")
def expected(engine: Path) -> dict[str, list[tuple[int, ...]]]:
    """Every request alone."""
    with load_engine(engine) as loaded:
        answers = {name: ids_of(loaded, sampling, together=False) for name, sampling in REQUESTS.items()}
    assert sum(len(ids) for ids in answers["sampled"]) > NUM_REQUESTS * MAX_TOKENS / 2, "few of them end early"
    assert len(set(answers["sampled"])) == NUM_REQUESTS
    return answers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefix_cache": False},
        {"max_num_tokens": 16},
        {"max_num_tokens": 37, "max_batch_size": 5},
        {"max_blocks": 24},  # too few for all at once: some are preempted and computed again
        {"num_threads": 2},
    ],
    ids=lambda changes: ",".join(map(str, changes)) or "as-built",
)
def test_in_a_batch_as_alone(
    engine: Path, tmp_path: Path, expected: dict[str, list[tuple[int, ...]]], changes: dict[str, Any]
) -> None:
    variant = Path(shutil.copytree(engine, tmp_path / "variant"))
    write_engine_config(variant, replace(load_engine_config(engine), **changes))
    with load_engine(variant) as loaded:
        for name, sampling in REQUESTS.items():
            assert ids_of(loaded, sampling, together=True) == expected[name]
        statistics = loaded.engine.statistics()
    assert statistics.num_requests_active == 0
    assert statistics.num_blocks_free == statistics.num_blocks_total
    assert (statistics.num_cached_tokens > 0) == changes.get("prefix_cache", True)
    assert (statistics.num_preemptions > 0) == ("max_blocks" in changes)


@pytest.mark.parametrize("block_size", [8, 128])
def test_blocks_of_another_size(
    engine: Path, tmp_path: Path, expected: dict[str, list[tuple[int, ...]]], block_size: int
) -> None:
    config = load_engine_config(engine)
    checkpoint = engine.parent / "checkpoint"
    other = build_tiny_engine(
        tmp_path,
        checkpoint,
        weights_dtype=config.weights_dtype,
        pool_dtype=config.pool_dtype,
        kernels=config.kernels,
        block_size=block_size,
    )
    with load_engine(other) as loaded:
        assert ids_of(loaded, SAMPLED, together=True) == expected["sampled"]


def test_another_seed_gives_another_text(engine: Path, expected: dict[str, list[tuple[int, ...]]]) -> None:
    with load_engine(engine) as loaded:
        others = ids_of(loaded, [replace(one, seed=one.seed + 1000) for one in SAMPLED], together=True)
    assert sum(one != other for one, other in zip(others, expected["sampled"], strict=True)) > NUM_REQUESTS * 0.8
