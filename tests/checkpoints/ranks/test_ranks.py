"""Splitting and merging TensorRT-LLM's checkpoint format: every element of every rank, and back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.ranks.convert import HeadSource, convert_for_ranks
from draftline.checkpoints.ranks.cuts import Heads, cut
from draftline.checkpoints.ranks.mapping import Mapping, weights_file
from draftline.checkpoints.ranks.merge import merge_checkpoint
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import CheckpointError
from tests.checkpoints.ranks.reference import eagle_of_rank, medusa_of_rank, target_of_rank
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_medusa

ALL = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def read(path: Path) -> dict[str, NDArray[Any]]:
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def same(left: dict[str, NDArray[Any]], right: dict[str, NDArray[Any]]) -> bool:
    assert set(left) == set(right)
    for name, values in left.items():
        assert values.shape == right[name].shape, name
        assert values.tobytes() == right[name].tobytes(), name
    return True


def ignore(done: int, total: int) -> None:
    assert done <= total


@settings(deadline=None)
@given(
    tp_size=st.integers(1, 6),
    shared=st.integers(1, 3),
    kv_per_rank=st.integers(1, 3),
    group=st.integers(1, 3),
    head_size=st.integers(1, 4),
    is_shared=st.booleans(),
)
def test_every_rank_has_its_query_heads_and_their_key_value_heads(
    tp_size: int, shared: int, kv_per_rank: int, group: int, head_size: int, is_shared: bool
) -> None:
    """The head of query h is h // (heads / kv heads), on every rank, whatever is repeated."""
    kv_heads = max(1, tp_size // shared) if is_shared else tp_size * kv_per_rank
    if is_shared and tp_size % kv_heads:
        kv_heads = 1
    num_heads = np.lcm(kv_heads, tp_size) * group
    heads = Heads(int(num_heads), kv_heads, head_size)
    rows = (int(num_heads) + 2 * kv_heads) * head_size
    found = cut("transformer.layers.0.attention.qkv.weight", (rows, 3), tp_size, heads)
    whole = np.arange(rows)
    for place in range(tp_size):
        local = np.full(found.shape[0], -1)
        for band in found.bands:
            if band.place == place:
                local[band.at : band.at + band.stop - band.start] = whole[band.start : band.stop]
        assert (local >= 0).all()
        num_local = int(num_heads) // tp_size
        kv_local = (len(local) // head_size - num_local) // 2
        q, k, v = np.split(local.reshape(-1, head_size)[:, 0] // head_size, [num_local, num_local + kv_local])
        assert q.tolist() == list(range(place * num_local, (place + 1) * num_local))
        assert (k - num_heads == v - num_heads - kv_heads).all()
        queries_of_one = num_local // kv_local
        for index, query in enumerate(q):
            assert k[index // queries_of_one] - num_heads == query // (num_heads // kv_heads)


@settings(max_examples=25, deadline=None, suppress_health_check=ALL)
@given(
    architecture=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    tp_size=st.sampled_from([1, 2, 4]),
    pp_size=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    num_layers=st.integers(3, 4),
    vocab_size=st.integers(280, 285),
    tie=st.booleans(),
    bias=st.booleans(),
    dtypes=st.sampled_from([("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]),
)
def test_split_and_merge_of_a_target(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: Architecture,
    tp_size: int,
    pp_size: int,
    kv_heads: int,
    num_layers: int,
    vocab_size: int,
    tie: bool,
    bias: bool,
    dtypes: tuple[str, str],
) -> None:
    root = tmp_path_factory.mktemp("split")
    stored, dtype = dtypes
    source = write_tiny_checkpoint(
        root / "model",
        architecture,
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        head_dim=8,
        num_layers=num_layers,
        kv_heads=kv_heads,
        tie=tie,
        dtype=stored,
        extra_config={"attention_bias": True, "mlp_bias": True} if bias and architecture == "llama" else None,
    )
    mapping = Mapping(tp_size, pp_size)
    convert_for_ranks(source, root / "split", dtype, mapping, None, ignore)
    arrays = {name: values.astype(dtype) for name, values in read(source / "model.safetensors").items()}
    for rank in range(mapping.world_size):
        expected = target_of_rank(arrays, num_layers, kv_heads, tp_size, pp_size, rank)
        assert same(read(weights_file(root / "split", rank)), expected)
    assert not weights_file(root / "split", mapping.world_size).exists()

    merge_checkpoint(root / "split", root / "merged", ignore)
    convert_for_ranks(source, root / "whole", dtype, Mapping(), None, ignore)
    for name in ("rank0.safetensors", "config.json", "tokenizer.json"):
        assert (root / "merged" / name).read_bytes() == (root / "whole" / name).read_bytes(), name
    assert load_checkpoint_config(root / "merged").architecture == load_checkpoint_config(root / "whole").architecture


@settings(max_examples=8, deadline=None, suppress_health_check=ALL)
@given(
    tp_size=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(["medusa", "eagle1"]),
    owns=st.booleans(),
    bias=st.booleans(),
    tie=st.booleans(),
)
def test_split_and_merge_with_a_head(
    tmp_path_factory: pytest.TempPathFactory, tp_size: int, method: Any, owns: bool, bias: bool, tie: bool
) -> None:
    root = tmp_path_factory.mktemp("heads")
    source = write_tiny_checkpoint(root / "model", vocab_size=283, hidden_size=16, intermediate_size=24, tie=tie)
    target = read(source / "model.safetensors")
    lm_head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
    if method == "medusa":
        write_tiny_medusa(root / "head", source, num_layers=2, own_lm_head=owns)
    else:
        write_tiny_eagle1(root / "head", source, bias=bias, own_embedding=owns)
    head = HeadSource(root / "head", method, num_draft_tokens=7, max_depth=3, max_non_leaves=10)
    convert_for_ranks(source, root / "split", "float32", Mapping(tp_size), head, ignore)
    for rank in range(tp_size):
        expected = target_of_rank(target, 2, 2, tp_size, 1, rank)
        if method == "medusa":
            heads = read(root / "head" / "medusa_lm_head.safetensors")
            expected |= medusa_of_rank(heads, 3, 2, lm_head, tp_size, rank)
        else:
            drafter = read(root / "head" / "model.safetensors")
            expected |= eagle_of_rank(drafter, target, 2, 3, tp_size, rank, lm_head)
        assert same(read(weights_file(root / "split", rank)), expected)
    merge_checkpoint(root / "split", root / "merged", ignore)
    convert_for_ranks(source, root / "whole", "float32", Mapping(), head, ignore)
    for name in ("rank0.safetensors", "config.json"):
        assert (root / "merged" / name).read_bytes() == (root / "whole" / name).read_bytes(), name


@pytest.fixture
def split(tmp_path: Path) -> Path:
    source = write_tiny_checkpoint(tmp_path / "model", kv_heads=1)
    convert_for_ranks(source, tmp_path / "split", "float32", Mapping(2, 2), None, ignore)
    return tmp_path / "split"


def test_ranks_that_should_hold_the_same_are_compared(split: Path, tmp_path: Path) -> None:
    path = weights_file(split, 1)
    location = tensor_locations(path)["transformer.layers.0.attention.qkv.weight"]
    with path.open("r+b") as file:  # the last row is of the value head that both ranks have
        file.seek(location.byte_offset + location.num_bytes - 4)
        file.write(b"\0\0\0\1")
    rule = r"rank1.safetensors: transformer.layers.0.attention.qkv.weight holds what rank 0 holds; got other values"
    with pytest.raises(CheckpointError, match=rule):
        merge_checkpoint(split, tmp_path / "merged", ignore)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": {"world_size": 4, "tp_size": 4, "pp_size": 1}}, r"rank0.safetensors: .* with"),
        ({"num_hidden_layers": 3}, r"rank0.safetensors: .*; got without transformer.layers.1"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "quantization is without algorithms"),
        ({"use_parallel_embedding": True}, "use_parallel_embedding is false; got true"),
        ({"vocab_size": 400}, r"vocab_embedding.weight is float32 \[400, 64\]; got float32 \[320, 64\]"),
        ({"mapping": {"world_size": 3, "tp_size": 2, "pp_size": 2}}, r"mapping is of tp_size \* pp_size ranks"),
    ],
)
def test_what_cannot_be_merged(split: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = split / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint(split, tmp_path / "merged", ignore)


def test_a_missing_rank_is_named(split: Path, tmp_path: Path) -> None:
    weights_file(split, 2).unlink()
    with pytest.raises(CheckpointError, match=r"rank2.safetensors: the safetensors file exists"):
        merge_checkpoint(split, tmp_path / "merged", ignore)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (Mapping(3), "engine.tensor_parallel_size: the target's num_attention_heads 4 divides by it; got 3"),
        (Mapping(1, 3), "engine.pipeline_parallel_size: every stage has one of the 2 layers; got 3"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, mapping: Mapping, message: str) -> None:
    source = write_tiny_checkpoint(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        convert_for_ranks(source, tmp_path / "split", "float32", mapping, None, ignore)
    assert not (tmp_path / "split").exists()
