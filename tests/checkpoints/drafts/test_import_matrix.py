"""Each row of the import matrix is recognised by its contents, and misses its tensors by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import convert_head, load_head_config
from draftline.checkpoints.drafts.eagle_layouts import EAGLE_LAYOUTS
from draftline.checkpoints.drafts.medusa import MEDUSA_LAYOUTS
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import load_json
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_draft
from tests.tiny_layout_writers import load_tensors
from tests.tiny_layouts import NUM_LAYERS, ROWS, Row

ROOT = Path(__file__).resolve().parents[3]
FEW = 5  # tensors of a row that are spoilt; tests of single layouts spoil each


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> CheckpointConfig:
    return parse_huggingface_config(load_json(target_dir / "config.json"), None, "float32")


def convert(source: Path, row: Row, target: CheckpointConfig) -> HeadConfig:
    destination = source.with_name("converted")
    config = convert_head(source, destination, row.method, target, "float32", lambda done, total: None)
    assert load_head_config(destination) == config
    return config


def tensors_of(source: Path, row: Row) -> dict[str, NDArray[Any]]:
    path = source / row.weights_file
    if path.suffix == ".safetensors":
        return load_tensors(path)
    torch = pytest.importorskip("torch")
    return {name: values.numpy().copy() for name, values in torch.load(path, weights_only=True).items()}


def rewrite(source: Path, row: Row, tensors: Mapping[str, NDArray[Any]]) -> None:
    path = source / row.weights_file
    if path.suffix == ".safetensors":
        write_draft(source, tensors, None, weights_file=row.weights_file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(values) for name, values in tensors.items()}, path)


def test_every_layout_has_a_row_here_and_in_the_documentation() -> None:
    layouts = {layout.name for layout in (*EAGLE_LAYOUTS, *MEDUSA_LAYOUTS)}
    assert layouts == {row.layout for row in ROWS.values()}
    page = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")
    assert layouts <= set(re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_recognised_and_misses_its_tensors(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, name: str
) -> None:
    row = ROWS[name]
    source = row.write(tmp_path / "any-name", target_dir)
    config = convert(source, row, target)
    assert (config.layout, config.captured_layers) == (row.layout, row.captured)
    tensors = tensors_of(source, row)
    of_model = ("model.", "lm_head.") if row.method == "medusa" else ()
    own = [tensor for tensor in tensors if not tensor.startswith(of_model)] if of_model else list(tensors)
    for tensor in own[:: max(1, len(own) // FEW)]:
        others = {key: values for key, values in tensors.items() if key != tensor}
        if tensor not in row.optional:
            rewrite(source, row, others)
            with pytest.raises(CheckpointError, match=re.escape(tensor)):
                convert(source, row, target)
        rewrite(source, row, others | {f"{tensor}.old": tensors[tensor]})
        with pytest.raises(CheckpointError, match=re.escape(f"{tensor}.old")):
            convert(source, row, target)
        rewrite(source, row, others | {tensor: np.concatenate([tensors[tensor], tensors[tensor][:1]])})
        with pytest.raises(CheckpointError, match=rf"tensor {re.escape(tensor)} .*shape \[{len(tensors[tensor])}"):
            convert(source, row, target)


def test_rows_behind_the_targets_vocabulary_are_padding_or_another_vocabulary(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    row = ROWS["specforge-padded"]
    source = row.write(tmp_path / "head", target_dir)
    note = "24 rows of padding behind the target's 320 tokens"
    assert convert(source, row, target).notes[-1] == note
    tensors = tensors_of(source, row)
    embedding = tensors["embed_tokens.weight"].copy()
    embedding[-1, -1] = 1e-3
    rewrite(source, row, tensors | {"embed_tokens.weight": embedding})
    rule = r"behind the target's 320 tokens are padding, all zeros; got other numbers in embed_tokens\.weight; choose"
    with pytest.raises(CheckpointError, match=rule):
        convert(source, row, target)
    members = tensors["t2d"].copy()
    members[-1] = True
    rewrite(source, row, tensors | {"t2d": members})
    with pytest.raises(CheckpointError, match="other numbers in t2d"):
        convert(source, row, target)


def test_a_head_of_speculators_with_norms_of_its_own_is_refused(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    row = ROWS["eagle1-speculators"]
    source = row.write(tmp_path / "head", target_dir)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layernorms": True}))
    with pytest.raises(CheckpointError, match="layernorms is false or absent, as the network of EAGLE-1 has it"):
        convert(source, row, target)


def test_a_model_with_heads_inside_is_its_own_target(tmp_path: Path, target_dir: Path) -> None:
    """Medusa-2 tunes the model with its heads: one folder is target and draft."""
    source = ROWS["medusa-2"].write(tmp_path / "tuned", target_dir)
    target = convert_checkpoint(source, tmp_path / "target", "float32", lambda done, total: None)
    assert convert(source, ROWS["medusa-2"], target).num_heads == 3


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"speculators_model_type": "peagle"}, 'speculators_model_type is "eagle3" or "eagle"'),
        ({"dflash_config": {}, "block_size": 16}, "a DFlash head: dflash_config"),
        ({"mask_token_id": 5}, "a P-EAGLE head: mask_token_id"),
        ({"markov_rank": 256}, "a DSpark head: markov_rank"),
        ({"norm_output": False}, "norm_output is true or absent in this layout"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc is false where fc_norm is true"),
        ({"norm_before_fc": True}, "without input_norm.weight"),
        ({"fc_norm": True}, r"without fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight"),
    ],
)
def test_drafts_of_other_kinds_and_wrong_switches_are_named(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, changes: dict[str, Any], rule: str
) -> None:
    source = ROWS["specforge"].write(tmp_path / "s", target_dir)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=rule):
        convert(source, ROWS["specforge"], target)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"transformer_layer_config": None}, "transformer_layer_config is an object"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, "of a model_type among llama, qwen3"),
        (
            {"transformer_layer_config": {"model_type": "llama", "layer_types": ["sliding_attention"]}},
            "without layers of sliding_attention",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "1 to 8, as they name inputs"),
    ],
)
def test_what_speculators_configurations_must_hold(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, changes: dict[str, Any], rule: str
) -> None:
    source = ROWS["speculators"].write(tmp_path / "s", target_dir)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=rule):
        convert(source, ROWS["speculators"], target)


def test_a_tie_that_ties_nothing_is_noted(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = ROWS["specforge"].write(tmp_path / "s", target_dir)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert (
        "tie_word_embeddings true ties nothing: lm_head is in the head"
        in convert(source, ROWS["specforge"], target).notes
    )
