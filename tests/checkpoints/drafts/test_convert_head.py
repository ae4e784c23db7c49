"""Heads of every format: good ones keep their numbers, and each way to be wrong is an error that leaves nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import HEAD_METHODS, SourceMethod, convert_head, load_head_config
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import load_json
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_draft, write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

VOCAB, HIDDEN, FFN, Q, KV = 320, 64, 96, 64, 32
FILES = {"eagle1": "model.safetensors", "eagle3": "model.safetensors", "medusa": "medusa_lm_head.safetensors"}

Writer = Callable[..., Path]
WRITERS: dict[SourceMethod, Writer] = {
    "eagle1": write_tiny_eagle1,
    "eagle3": write_tiny_eagle3,
    "medusa": write_tiny_medusa,
}


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_dir: Path) -> CheckpointConfig:
    return parse_huggingface_config(load_json(target_dir / "config.json"), None, "float32")


def ignore_progress(done: int, total: int) -> None:
    pass


def load_all(path: Path) -> dict[str, NDArray[Any]]:
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def convert(source: Path, method: SourceMethod, target: CheckpointConfig, dtype: str = "float32") -> HeadConfig:
    config = convert_head(source, source.with_name("converted"), method, target, dtype, ignore_progress)
    assert load_head_config(source.with_name("converted")) == config
    return config


def converted(source: Path) -> dict[str, NDArray[Any]]:
    return load_all(source.with_name("converted") / "rank0.safetensors")


def fails(source: Path, method: SourceMethod, target: CheckpointConfig, rule: str, dtype: str = "float32") -> str:
    """Convert, expecting a one-line error and nothing left behind; return its message."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError, match=rule) as caught:
        convert(source, method, target, dtype)
    assert sorted(source.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_tensors(source: Path, method: str, edit: Callable[[dict[str, NDArray[Any]]], object]) -> None:
    tensors = load_all(source / FILES[method])
    edit(tensors)
    write_draft(source, tensors, None, weights_file=FILES[method])


def edit_config(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def layer_shapes(prefix: str, attention_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.attention.qkv.weight": (Q + 2 * KV, attention_size),
        f"{prefix}.attention.dense.weight": (HIDDEN, Q),
        f"{prefix}.post_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.fc.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.gate.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.proj.weight": (HIDDEN, FFN),
    }


def assert_layer_equals(ours: dict[str, NDArray[Any]], theirs: dict[str, NDArray[Any]], key: str, name: str) -> None:
    for kind in ("weight", "bias") if f"{name}.self_attn.q_proj.bias" in theirs else ("weight",):
        qkv = np.concatenate([theirs[f"{name}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
        np.testing.assert_array_equal(ours[f"{key}.attention.qkv.{kind}"], qkv)
    for our_part, their_part in (
        ("attention.dense", "self_attn.o_proj"),
        ("post_layernorm", "post_attention_layernorm"),
        ("mlp.fc", "mlp.gate_proj"),
        ("mlp.gate", "mlp.up_proj"),
        ("mlp.proj", "mlp.down_proj"),
    ):
        np.testing.assert_array_equal(ours[f"{key}.{our_part}.weight"], theirs[f"{name}.{their_part}.weight"])


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


def tensor_names(method: SourceMethod) -> list[str]:
    """Names of the writers' default tensors that every head of the format has."""
    if method == "medusa":
        return [name for head in range(3) for name in (f"{head}.0.linear.weight", f"{head}.0.linear.bias")]
    prefix = "midlayer" if method == "eagle3" else "layers.0"
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    norms = ["post_attention_layernorm"]
    norms += ["hidden_norm", "input_layernorm"] if method == "eagle3" else []
    names = ["fc.weight", *(f"{prefix}.{part}.weight" for part in parts + norms)]
    return names + (["norm.weight", "lm_head.weight", "d2t"] if method == "eagle3" else [])


CASES = [(method, name) for method in WRITERS for name in tensor_names(method)]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_a_missing_renamed_misshaped_or_wild_tensor_is_named(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod, name: str
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir)
    original = load_all(source / FILES[method])

    def fails_with(tensors: dict[str, NDArray[Any]], rule: str) -> None:
        write_draft(source, tensors, None, weights_file=FILES[method])
        fails(source, method, target, rule)

    others = {key: values for key, values in original.items() if key != name}
    fails_with(others, re.escape(name))
    fails_with(others | {f"{name}.old": original[name]}, re.escape(f"{name}.old"))
    longer = np.concatenate([original[name], original[name][:1]])
    fails_with(others | {name: longer}, rf"tensor {re.escape(name)} .*shape \[{len(longer) - 1}")
    if name != "d2t":
        for wild in (np.nan, np.inf):
            spoilt = original[name].copy()
            spoilt.reshape(-1)[-1] = wild
            fails_with(original | {name: spoilt}, f"tensor {name} is finite; got NaN or infinity")
        fails_with(original | {name: np.zeros(original[name].shape, np.int8)}, f"tensor {name} has one of the dtypes")


@pytest.mark.parametrize("method", WRITERS)
def test_all_missing_and_all_unexpected_tensors_are_listed(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir)
    first, second = tensor_names(method)[:2]
    edit_tensors(source, method, lambda tensors: tensors.update(adapter=np.ones(1), other=np.ones(1)))
    fails(source, method, target, "no others; got also adapter, other")
    edit_tensors(source, method, lambda tensors: (tensors.pop(first), tensors.pop(second)))
    message = fails(source, method, target, "without")
    assert f"{first}, {second}" in message


def test_a_medusa_head_left_out_is_found(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir)
    edit_tensors(source, "medusa", lambda tensors: [tensors.pop(name) for name in list(tensors) if name[0] == "1"])
    fails(source, "medusa", target, "without 1.0.linear.weight, 1.0.linear.bias, 1.1.weight")


def test_one_medusa_projection_left_out_is_found(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir)
    edit_tensors(source, "medusa", lambda tensors: tensors.pop("2.1.weight"))
    fails(source, "medusa", target, "without 2.1.weight")


def test_a_file_that_holds_no_medusa_heads_is_refused(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir)
    fails(source, "medusa", target, "holds tensors {head}.{layer}.linear.weight")
    (source / "model.safetensors").rename(source / FILES["medusa"])
    fails(source, "medusa", target, "holds tensors {head}.{layer}.linear.weight")
    (source / FILES["medusa"]).unlink()
    fails(source, "medusa", target, "holds one of medusa_lm_head.safetensors, medusa_lm_head.pt, model.*; got none")


def test_a_head_of_another_method_is_refused_by_name(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    eagle1 = write_tiny_eagle1(tmp_path / "eagle1", target_dir)
    eagle3 = write_tiny_eagle3(tmp_path / "eagle3", target_dir)
    assert "set it to eagle3" in fails(eagle3, "eagle1", target, "draft.method is the head's own")
    assert "set it to eagle1 or eagle2" in fails(eagle1, "eagle3", target, "draft.method is the head's own")
    medusa = write_tiny_medusa(tmp_path / "medusa", target_dir)
    for method in ("eagle1", "eagle3"):
        fails(medusa, method, target, "the folder holds one of")
    (medusa / FILES["medusa"]).rename(medusa / "model.safetensors")
    assert "set draft.method to medusa" in fails(medusa, "eagle1", target, r"Medusa heads: 0\.0\.linear\.weight")
    fails(target_dir, "eagle3", target, r"a whole model: model\.")


@pytest.mark.parametrize("method", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"vocab_size": 319}, "vocab_size is the target's"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"intermediate_size": 95}, r"shape \[95, 64\]"),
        ({"num_attention_heads": 8}, "has shape"),
        ({"max_position_embeddings": None}, "max_position_embeddings is a positive integer; got nothing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "magic"}}, "rope_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised heads are not read"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tmp_path: Path,
    target_dir: Path,
    target: CheckpointConfig,
    method: SourceMethod,
    changes: dict[str, Any],
    rule: str,
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir)
    edit_config(source, **changes)
    fails(source, method, target, rule)


def test_rotary_settings_are_the_heads_own(tmp_path: Path, target: CheckpointConfig) -> None:
    """The target's base is never inherited: heads trained without rope_theta ran with 10000."""
    target_dir = write_tiny_checkpoint(tmp_path / "target", rope_theta=1e6)
    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    config = convert(source, "eagle3", target)
    assert (config.rotary_base, config.rotary_scaling, config.max_position_embeddings) == (10000.0, None, 512)
    edit_config(source, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}, max_position_embeddings=2048)
    config = convert(source, "eagle3", target)
    assert (config.rotary_base, config.max_position_embeddings) == (5e5, 2048)
    assert config.rotary_scaling == {"rope_type": "linear", "factor": 4.0}


def test_keys_that_were_copied_from_the_target_mean_nothing(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    expected = convert(source, "eagle3", target)
    edit_config(source, sliding_window=4, use_sliding_window=False, attention_bias=True)
    edit_config(source, architectures=["LlamaForCausalLM"], model_type="qwen3", max_window_layers=36)
    assert convert(source, "eagle3", target) == expected


def test_the_fc_bias_follows_the_tensors_and_contradicts_nothing(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir)
    edit_config(source, bias=False)
    fails(source, "eagle1", target, "got bias false and an fc.bias")
    edit_config(source, bias=True)
    assert convert(source, "eagle1", target).fc_bias
    source = write_tiny_eagle1(tmp_path / "without", target_dir, bias=False)
    edit_config(source, bias=None)
    fails(source, "eagle1", target, "got bias true and no fc.bias")


def test_the_qkv_bias_is_whole_and_contradicts_nothing(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir, qkv_bias=True)
    edit_config(source, qkv_bias=False)
    fails(source, "eagle1", target, "qkv_bias is true, as the tensors")
    edit_config(source, qkv_bias=True)
    edit_tensors(source, "eagle1", lambda tensors: tensors.pop("layers.0.self_attn.k_proj.bias"))
    fails(source, "eagle1", target, r"without layers\.0\.self_attn\.k_proj\.bias")


def test_eagle1_fits_the_targets_hidden_size(tmp_path: Path, target: CheckpointConfig) -> None:
    wider = write_tiny_checkpoint(tmp_path / "wider", hidden_size=96)
    fails(write_tiny_eagle1(tmp_path / "s", wider), "eagle1", target, r"hidden_size is the target's \(64\); got 96")
    fails(write_tiny_eagle3(tmp_path / "t", wider), "eagle3", target, "target_hidden_size is the target's")


def test_what_is_borrowed_must_fit(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_eagle3(tmp_path / "a", target_dir, own_lm_head=False)
    fails(source, "eagle3", target, "lm_head.weight is in the head")
    source = write_tiny_eagle3(tmp_path / "b", target_dir, hidden_size=96, draft_vocab_size=None, own_lm_head=False)
    fails(source, "eagle3", target, "embed_tokens.weight is in the head")
    source = write_tiny_eagle3(
        tmp_path / "c", target_dir, hidden_size=96, draft_vocab_size=None, own_lm_head=False, own_embedding=True
    )
    fails(source, "eagle3", target, "lm_head.weight is in the head")
    source = write_tiny_eagle3(tmp_path / "d", target_dir, draft_vocab_size=None, own_lm_head=False, own_embedding=True)
    assert not convert(source, "eagle3", target).owns_lm_head
    edit_config(source, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        convert(source, "eagle3", target)


@pytest.mark.parametrize(
    "changes",
    [
        {"speculators_model_type": "mtp"},
        {"norm_output": False},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "parallel_draft_step": 2}},
        {"eagle_config": [0, 1]},
        {"draft_vocab_size": 321},
        {"draft_vocab_size": 199},
    ],
)
def test_variants_that_compute_something_else_are_refused(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, changes: dict[str, Any]
) -> None:
    source = write_tiny_eagle3(tmp_path / "s", target_dir)
    edit_config(source, **changes)
    fails(source, "eagle3", target, "199" if changes.get("draft_vocab_size") == 199 else next(iter(changes)))


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
