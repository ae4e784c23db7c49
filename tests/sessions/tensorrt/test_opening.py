"""What opening an engine on a GPU takes: memory, releases that fit, a GPU; and what is left behind when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.errors import ArtifactError, DraftlineError
from draftline.generation import load_engine
from draftline.sessions.engine_config import EngineConfig, load_engine_config
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.sessions.tensorrt import device_engine
from draftline.sessions.tensorrt.device_engine import PoolShape, count_blocks
from draftline.sessions.tensorrt.session import TensorRtSession
from draftline.speculation import TreeShape
from tests.sessions.tensorrt.fake_engines import FakeMachine, build_fake_engine, on_machine
from tests.sessions.tiny_engines import Text, make_batch
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle3

TREE = TreeShape("dynamic", max_nodes=8, max_depth=3, top_k=2)
BLOCK_BYTES = 2 * 2 * 16 * 16 * 4  # of a layer: keys and values of 2 heads, 16 tokens, 16 numbers
LAYERS = 2 + 1  # of the target and of its head


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    with on_machine(FakeMachine()) as machine:
        yield machine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("engines")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    drafts: Any = [("eagle3", write_tiny_eagle3(directory / "head", checkpoint))]
    with on_machine(FakeMachine()) as machine:
        return {
            weights: build_fake_engine(machine, directory, checkpoint, drafts=drafts, tree=TREE, weights=weights)
            for weights in ("embedded", "external")
        }


@pytest.fixture
def engine(engines: dict[str, Path]) -> Path:
    return engines["embedded"]


def with_facts(config: EngineConfig, **changes: Any) -> EngineConfig:
    assert config.tensorrt is not None
    return replace(config, tensorrt=replace(config.tensorrt, **changes))


def loaded_bytes(engine: Path) -> int:
    """Memory that an engine takes beside its pools."""
    with on_machine(FakeMachine()) as machine:
        session = open_session(engine, replace(load_engine_config(engine), max_blocks=16))
        used = machine.cuda.used_bytes - 16 * LAYERS * BLOCK_BYTES
        session.close()
    return used


def test_pools_take_the_share_that_is_asked_for(engine: Path) -> None:
    spare = 50 * LAYERS * BLOCK_BYTES + 4096
    with on_machine(FakeMachine(total_bytes=loaded_bytes(engine) + spare)) as machine:
        session = open_session(engine, with_facts(load_engine_config(engine), free_gpu_memory_fraction=0.5))
        assert session.num_blocks == 25
        assert machine.cuda.used_bytes <= loaded_bytes(engine) + spare // 2 + 4096, "rounded up by layer"
        session.close()
        with load_engine(engine) as loaded:
            assert loaded.engine.limits.max_blocks == 45, "0.9 unless asked for otherwise"
            assert len(loaded.generate([[5, 6, 7]], 4)[0].token_ids) == 4
        assert machine.cuda.is_empty


def test_no_more_blocks_than_were_built_for(machine: FakeMachine, engine: Path) -> None:
    session = open_session(engine, load_engine_config(engine))
    assert session.num_blocks == 128
    session.close()


def test_too_little_memory_for_one_sequence_is_said_with_numbers(engine: Path) -> None:
    spare = 16 * LAYERS * BLOCK_BYTES
    with on_machine(FakeMachine(total_bytes=loaded_bytes(engine) + spare)) as machine:
        match = (
            "free_gpu_memory_fraction: one sequence of engine.max_seq_len 256 takes 16 blocks of 12,288 bytes; "
            f"got 14 blocks in 0.9 of {spare:,} free bytes; lower "
        )
        with pytest.raises(DraftlineError, match=match):
            open_session(engine, load_engine_config(engine))
        assert machine.cuda.is_empty, "what was loaded is released"


def test_too_little_memory_for_the_engine_itself(engine: Path) -> None:
    with on_machine(FakeMachine(total_bytes=20_000)) as machine:
        with pytest.raises(DraftlineError, match=r"engine: .* fits in the GPU's memory, of which .* bytes are free; "):
            open_session(engine, load_engine_config(engine))
        assert machine.cuda.is_empty


def test_blocks_of_an_engine_count_all_its_pools(engine: Path) -> None:
    shapes = [PoolShape(32, 8, 16, 128, "float16"), PoolShape(1, 8, 16, 128, "float16")]
    assert shapes[0].block_bytes == 65536
    config = with_facts(load_engine_config(engine), free_gpu_memory_fraction=0.8)
    for free in (1 << 30, 10 << 30):
        num_blocks = count_blocks(replace(config, max_blocks=1 << 20), shapes, free)
        assert 0.79 * free < num_blocks * 33 * 65536 <= 0.8 * free - 33 * 256


def test_less_than_was_built_loads_less(machine: FakeMachine, engine: Path) -> None:
    """An engine without its drafts loads the target's plan alone, and has larger pools for the same memory."""
    config = replace(load_engine_config(engine), drafts=(), tree=None)
    session = open_session(engine, config)
    assert isinstance(session, TensorRtSession)
    assert list(session.engine.plans) == ["model.plan"]
    assert open_draft_sessions(engine, config, session) == ()
    session.close()


def test_external_weights_are_uploaded_once(machine: FakeMachine, engines: dict[str, Path]) -> None:
    """The head borrows the target's embedding and projection to the vocabulary."""
    session = open_session(engines["external"], load_engine_config(engines["external"]))
    assert isinstance(session, TensorRtSession)
    contexts = {context.engine.model.graph.name: context for context in machine.module().contexts}
    target, head = contexts["target"], contexts["eagle3"]
    address = target.addresses["transformer.vocab_embedding.weight"]
    assert head.addresses["vocab_embedding.weight"] == address
    stored = machine.cuda.device(address, 16).view(np.float32)
    assert np.isfinite(stored).all()
    assert machine.cuda.calls.count("cuMemcpyHtoD_v2") == len(
        {
            at
            for context in (target, head)
            for name, at in context.addresses.items()
            if name.endswith(("weight", "sines", "cosines", "d2t"))
        }
    )
    session.close()


def test_a_file_of_weights_that_is_too_short(machine: FakeMachine, engines: dict[str, Path], tmp_path: Path) -> None:
    for path in engines["external"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: -8 if path.name == "rank0.safetensors" else None])
    with pytest.raises(ArtifactError, match=r"rank0.safetensors: holds \d+ bytes at \d+; got \d+ bytes; build"):
        open_session(tmp_path, load_engine_config(engines["external"]))
    assert machine.cuda.is_empty


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"vendor_version": "1.6.0"}, "vendor_version: TensorRT-RTX loads the plans of its own release"),
        ({"plugin_sha256": "abc"}, "plugin_sha256: the plugin TreeAttention is the one it was built with"),
    ],
)
def test_a_mismatch_is_refused_before_anything_is_loaded(
    machine: FakeMachine, engine: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ArtifactError, match=match):
        open_session(engine, with_facts(load_engine_config(engine), **changes))
    assert set(machine.cuda.calls) <= {"cuInit"}


def test_a_gpu_that_has_no_code(engine: Path) -> None:
    with on_machine(FakeMachine(architecture=75)) as machine:
        with pytest.raises(ArtifactError, match="runs on a GPU of one of the architectures 89; got a GPU of 75; "):
            open_session(engine, load_engine_config(engine))
        assert machine.cuda.is_empty


def test_a_plan_that_the_vendor_does_not_load(machine: FakeMachine, engine: Path, tmp_path: Path) -> None:
    for path in engine.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"another" + plan.read_bytes()[7:])
    with pytest.raises(ArtifactError, match=r"model\.plan: loads on a GPU that it was built for; got no reason; "):
        open_session(tmp_path, load_engine_config(engine))
    assert machine.cuda.is_empty


def test_without_a_gpu(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_engine, "load_driver", lambda: None)
    with pytest.raises(ArtifactError, match=": runs on a GPU; got none; "):
        open_session(engine, load_engine_config(engine))


def test_contexts_are_made_as_the_vendors_differ(engine: Path, machine: FakeMachine) -> None:
    """Of a captured shape TensorRT-RTX compiles kernels at once, of others none; contexts share what it compiled."""
    session = open_session(engine, load_engine_config(engine))
    session.forward(make_batch([Text([0])], [[5, 6, 7]]))
    contexts = machine.module().contexts
    kinds = [context.config.dynamic_shapes_kernel_specialization_strategy.name for context in contexts]
    assert kinds == ["NONE"] * 4 + ["EAGER"]
    assert len({id(context.config.cache) for context in contexts if context.engine is contexts[0].engine}) == 1
    assert len({context.memory for context in contexts}) == 1, "they work in the same memory"
    session.close()
