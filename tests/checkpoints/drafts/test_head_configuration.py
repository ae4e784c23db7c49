"""What ``config.json`` of a head says, may say, and must not contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.drafts import SourceMethod
from draftline.errors import CheckpointError
from tests.checkpoints.drafts.head_conversion import (
    WRITERS,
    convert,
    edit_config,
    edit_tensors,
    fails,
)
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3


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
