"""Which layers feed an EAGLE-3 head: written ids, the reference's default, and the ids that mean something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.drafts.captured_layers import parse_captured_layers
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

IDS = "eagle_aux_hidden_state_layer_ids"
HIDDEN = 64


def parse(num_layers: int, fc_columns: int | None = 3 * HIDDEN, **values: Any) -> tuple[int, ...]:
    target = CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=320,
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=16,
        intermediate_size=96,
        norm_epsilon=1e-5,
        rotary_base=1e4,
        max_position_embeddings=512,
    )
    return parse_captured_layers(JsonObject(Path("config.json"), values), target, fc_columns)


@pytest.mark.parametrize(("num_layers", "expected"), [(32, (1, 15, 28)), (36, (1, 17, 32)), (7, (1, 2, 3))])
def test_the_default_is_the_references(num_layers: int, expected: tuple[int, ...]) -> None:
    assert parse(num_layers) == expected
    assert parse(num_layers, None) == expected
    assert parse(num_layers, eagle_config={IDS: None}) == expected


@pytest.mark.parametrize("num_layers", range(1, 7))
def test_a_shallow_target_has_no_default(num_layers: int) -> None:
    with pytest.raises(CheckpointError, match=f"names the target's layers.*3 features and a target of {num_layers}"):
        parse(num_layers)


def test_two_features_have_no_default() -> None:
    with pytest.raises(CheckpointError, match="2 features and a target of 32 layers"):
        parse(32, 2 * HIDDEN)


@pytest.mark.parametrize("ids", [(0, 1), (1, 2), (0,), (1, 46, 90), (0, 1, 2, 3)])
def test_written_ids_decide_wherever_they_are(ids: tuple[int, ...]) -> None:
    columns = len(ids) * HIDDEN
    assert parse(94, columns, **{IDS: list(ids)}) == ids
    inner = {IDS: list(ids), "use_aux_hidden_state": True}
    assert parse(94, columns, eagle_config=inner) == ids
    assert parse(94, columns, eagle_config=inner, **{IDS: list(ids)}) == ids


def test_two_lists_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"written once; got \[1, 2, 3\] and \[1, 2, 4\]"):
        parse(32, eagle_config={IDS: [1, 2, 3]}, **{IDS: [1, 2, 4]})


def test_ids_that_mean_inputs_are_refused_with_the_right_ones() -> None:
    with pytest.raises(CheckpointError, match=r"outputs, not inputs.*got \[2, 16, 29\]; write \[1, 15, 28\]"):
        parse(32, **{IDS: [2, 16, 29]})
    assert parse(3, **{IDS: [0, 1, 2]}) == (0, 1, 2)


@pytest.mark.parametrize("ids", [[1, 2, 32], [2, 1, 3], [1, 1, 2], [], [-1, 2, 3], [1.0, 2, 3], "1,2,3"])
def test_wrong_ids_are_refused(ids: Any) -> None:
    with pytest.raises(CheckpointError, match=IDS):
        parse(32, **{IDS: ids})


@pytest.mark.parametrize("columns", [0, 100, 2 * HIDDEN])
def test_fc_is_as_wide_as_the_features(columns: int) -> None:
    with pytest.raises(CheckpointError, match=rf"fc\.weight has .*got {columns};"):
        parse(32, columns, **{IDS: [1, 15, 28]})
