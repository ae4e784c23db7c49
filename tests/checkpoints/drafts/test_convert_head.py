"""Heads of every format keep their numbers, and a conversion that fails leaves nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import HEAD_METHODS, SourceMethod, convert_head
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.errors import CheckpointError
from tests.checkpoints.drafts.head_conversion import (
    FFN,
    FILES,
    HIDDEN,
    KV,
    VOCAB,
    WRITERS,
    Q,
    assert_layer_equals,
    convert,
    converted,
    edit_config,
    edit_tensors,
    fails,
    ignore_progress,
    layer_shapes,
    load_all,
)
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa


@pytest.mark.parametrize("method", ["eagle1", "eagle2"])
def test_eagle1_keeps_its_numbers(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir, max_position_embeddings=128)
    config = convert(source, method, target)
    assert config == HeadConfig(
        method="eagle1",
        layout="EAGLE-1/2",
        dtype="float32",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        num_layers=1,
        draft_vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=16,
        intermediate_size=FFN,
        max_position_embeddings=128,
        fc_bias=True,
        owns_embedding=True,
    )
    theirs, ours = load_all(source / "model.safetensors"), converted(source)
    assert {name: values.shape for name, values in ours.items()} == {
        "vocab_embedding.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        **layer_shapes("layers.0", HIDDEN),
    }
    np.testing.assert_array_equal(ours["vocab_embedding.weight"], theirs["embed_tokens.weight"])
    np.testing.assert_array_equal(ours["fc.weight"], theirs["fc.weight"])
    np.testing.assert_array_equal(ours["fc.bias"], theirs["fc.bias"])
    assert_layer_equals(ours, theirs, "layers.0", "layers.0")


def test_eagle1_without_fc_bias_and_embedding_with_qkv_bias_and_two_layers(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir, bias=False, qkv_bias=True, own_embedding=False, num_layers=2)
    config = convert(source, "eagle1", target)
    assert (config.fc_bias, config.qkv_bias, config.owns_embedding, config.num_layers) == (False, True, False, 2)
    theirs, ours = load_all(source / "model.safetensors"), converted(source)
    assert {"vocab_embedding.weight", "fc.bias", "layers.0.input_layernorm.weight"}.isdisjoint(ours)
    np.testing.assert_array_equal(ours["layers.1.input_layernorm.weight"], theirs["layers.1.input_layernorm.weight"])
    for layer in ("layers.0", "layers.1"):
        assert_layer_equals(ours, theirs, layer, layer)
        assert f"{layer}.attention.qkv.bias" in ours


def test_eagle3_keeps_its_numbers(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir, draft_vocab_size=200, captured_layers=(0, 1))
    config = convert(source, "eagle3", target)
    assert (config.method, config.draft_vocab_size, config.captured_layers) == ("eagle3", 200, (0, 1))
    assert (config.fc_bias, config.owns_embedding, config.owns_lm_head) == (False, False, True)
    theirs, ours = load_all(source / "model.safetensors"), converted(source)
    assert {name: values.shape for name, values in ours.items()} == {
        "d2t": (200,),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        **layer_shapes("layers.0", 2 * HIDDEN),
        "ln_f.weight": (HIDDEN,),
        "lm_head.weight": (200, HIDDEN),
    }
    assert ours["d2t"].dtype == np.int64
    np.testing.assert_array_equal(theirs["t2d"].nonzero()[0], np.arange(200) + ours["d2t"])
    for name in ("d2t", "fc.weight", "lm_head.weight"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    for name in ("hidden_norm", "input_layernorm"):
        np.testing.assert_array_equal(ours[f"layers.0.{name}.weight"], theirs[f"midlayer.{name}.weight"])
    np.testing.assert_array_equal(ours["ln_f.weight"], theirs["norm.weight"])
    assert_layer_equals(ours, theirs, "layers.0", "midlayer")


def test_an_eagle3_head_may_be_wider_than_its_target(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir, hidden_size=96, own_embedding=True, captured_layers=(0, 1))
    config = convert(source, "eagle3", target)
    assert (config.hidden_size, config.target_hidden_size, config.owns_embedding) == (96, HIDDEN, True)
    ours = converted(source)
    assert ours["fc.weight"].shape == (96, 2 * HIDDEN)
    assert ours["vocab_embedding.weight"].shape == (VOCAB, 96)
    assert ours["layers.0.attention.qkv.weight"].shape == (Q + 2 * KV, 192)


@pytest.mark.parametrize("own_lm_head", [True, False])
@pytest.mark.parametrize("is_stated", [True, False])
def test_an_eagle3_head_of_the_whole_vocabulary_has_no_offsets(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, own_lm_head: bool, is_stated: bool
) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir, draft_vocab_size=None, own_lm_head=own_lm_head)
    if is_stated:
        whole = {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
        edit_tensors(source, "eagle3", lambda tensors: tensors.update(whole))
    else:
        edit_config(source, draft_vocab_size=None)
    config = convert(source, "eagle3", target)
    assert (config.draft_vocab_size, config.owns_lm_head) == (VOCAB, own_lm_head)
    assert {"d2t", "t2d"}.isdisjoint(converted(source))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("own_lm_head", [True, False])
def test_medusa_keeps_its_numbers(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, own_lm_head: bool, num_layers: int
) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir, num_heads=3, num_layers=num_layers, own_lm_head=own_lm_head)
    config = convert(source, "medusa", target)
    assert config == HeadConfig(
        method="medusa",
        layout="Medusa v1",
        dtype="float32",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        num_layers=num_layers,
        num_heads=3,
        owns_medusa_lm_heads=own_lm_head,
    )
    theirs, ours = load_all(source / FILES["medusa"]), converted(source)
    renamed = {}
    for head in range(3):
        for layer in range(num_layers):
            for kind in ("weight", "bias"):
                name = f"medusa_heads.{head}.medusa_layers.{layer}.linear.{kind}"
                renamed[name] = theirs[f"{head}.{layer}.linear.{kind}"]
        if own_lm_head:
            renamed[f"medusa_heads.{head}.lm_head.weight"] = theirs[f"{head}.{num_layers}.weight"]
    assert set(ours) == set(renamed)
    for name, values in renamed.items():
        np.testing.assert_array_equal(ours[name], values)


def test_medusa_needs_no_configuration_but_contradicts_none(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir)
    edit_config(source, medusa_num_layers=2)
    fails(source, "medusa", target, "medusa_num_layers is the 1 residual blocks")
    (source / "config.json").unlink()
    assert convert(source, "medusa", target).num_heads == 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", WRITERS)
def test_weights_are_rounded_to_the_dtype(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod, dtype: str
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir, dtype="bfloat16")
    calls: list[tuple[int, int]] = []
    config = convert_head(source, tmp_path / "c", method, target, dtype, lambda *call: calls.append(call))
    assert config.dtype == dtype
    path = tmp_path / "c/rank0.safetensors"
    for name, location in tensor_locations(path).items():
        assert location.dtype == ("int64" if name == "d2t" else dtype)
        assert location.byte_offset % numpy_dtype(location.dtype).itemsize == 0
    name = next(name for name in tensor_locations(path) if name.endswith("weight"))
    their_name = {"eagle1": "embed_tokens.weight", "eagle3": "fc.weight", "medusa": "0.0.linear.weight"}[method]
    expected = load_all(source / FILES[method])[their_name].astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(load_all(path)[name], expected)
    num_bytes = sum(item.num_bytes for key, item in tensor_locations(path).items() if key != "d2t")
    assert calls[-1] == (num_bytes, num_bytes)


def test_a_weight_that_overflows_is_refused(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    edit_tensors(source, "eagle3", lambda tensors: tensors["norm.weight"].fill(1e5))
    fails(source, "eagle3", target, "tensor norm.weight fits float16; got a weight of size 100000", "float16")


def test_rotary_frequencies_of_old_files_are_ignored(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    for method, prefix in (("eagle1", "layers.0"), ("eagle3", "midlayer")):
        source = WRITERS[method](tmp_path / method / "s", target_dir)
        frequencies = {f"{prefix}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
        edit_tensors(source, method, lambda tensors, frequencies=frequencies: tensors.update(frequencies))
        convert(source, method, target)


def test_the_destination_is_replaced_only_where_that_is_safe(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir)
    convert(source, "eagle1", target)
    (tmp_path / "converted/left_over").touch()
    convert(source, "eagle1", target)
    assert sorted(path.name for path in (tmp_path / "converted").iterdir()) == ["config.json", "rank0.safetensors"]
    (tmp_path / "converted/rank0.safetensors").unlink()
    fails(source, "eagle1", target, "the destination is new, empty or a converted checkpoint")


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    with pytest.raises(KeyboardInterrupt):
        convert_head(source, tmp_path / "converted", "eagle3", target, "float32", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_source_that_is_not_there_and_a_dtype_that_is_none(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    for method in HEAD_METHODS:
        with pytest.raises(CheckpointError, match="the draft checkpoint is a folder; got no such folder"):
            convert_head(tmp_path / "absent", tmp_path / "c", method, target, "float32", ignore_progress)  # type: ignore[arg-type]
    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    fails(source, "eagle3", target, "dtype is one of", "int8")
    (source / "config.json").unlink()
    fails(source, "eagle3", target, "config.json: the file exists")
