"""The tiny checkpoints load in transformers, whose reading of ``config.json`` agrees with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.convert import open_source
from tests.tiny_checkpoints import CLASS_NAMES, Architecture, write_tiny_checkpoint

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", CLASS_NAMES)
def test_transformers_loads_them_whole(tmp_path: Path, architecture: Architecture, tie: bool) -> None:
    write_tiny_checkpoint(tmp_path, architecture, tie=tie, shards=2, head_dim=24)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert type(model).__name__ == CLASS_NAMES[architecture]
    assert not any(report.values()), report
    token_ids = transformers.AutoTokenizer.from_pretrained(tmp_path)("hello the", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(token_ids).logits
    assert 0.5 < float(logits.std()) < 5.0


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    # The class of Phi-3 takes longrope alone.
    [(name, scaling) for name in CLASS_NAMES for scaling in SCALINGS if scaling is None or name != "phi3"],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else value or "default",
)
def test_configurations_agree(tmp_path: Path, architecture: Architecture, scaling: dict[str, Any] | None) -> None:
    write_tiny_checkpoint(tmp_path, architecture, rope_scaling=scaling, rope_theta=5e4, head_dim=24)
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    config = open_source(tmp_path, "float32").config
    rotary = dict(reference.rope_parameters)
    if architecture == "gemma3":
        local = rotary["sliding_attention"]
        assert local == {"rope_type": "default", "rope_theta": config.local_rotary_base}
        rotary = dict(rotary["full_attention"])
    assert rotary.pop("partial_rotary_factor", 1.0) == config.rotary_fraction
    assert rotary.pop("rope_theta") == config.rotary_base
    assert (None if rotary == {"rope_type": "default"} else rotary) == config.rotary_scaling
    assert (reference.head_dim if architecture != "qwen2" else 24) == config.head_size
    assert reference.num_key_value_heads == config.num_key_value_heads
    assert getattr(reference, "sliding_window", None) == config.sliding_window
    kinds = getattr(reference, "layer_types", None) or []
    if config.sliding_window is not None and kinds:
        assert tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention") == config.full_layers
