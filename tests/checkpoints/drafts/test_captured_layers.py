"""Which layers feed an EAGLE-3 head: written ids, the reference's default, and the ids that mean something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.drafts.captured_layers import CapturedLayers, parse_captured_layers
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

IDS = "eagle_aux_hidden_state_layer_ids"
HIDDEN = 64


def read(
    num_layers: int,
    fc_columns: int | None = 3 * HIDDEN,
    ids_name: Literal["outputs", "inputs"] = "outputs",
    stated: tuple[int, ...] | None = None,
    **values: Any,
) -> CapturedLayers:
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
    return parse_captured_layers(JsonObject(Path("config.json"), values), target, fc_columns, ids_name, stated)


def parse(num_layers: int, fc_columns: int | None = 3 * HIDDEN, **values: Any) -> tuple[int, ...]:
    return read(num_layers, fc_columns, **values).layers


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


def test_the_default_of_either_convention_is_known_in_every_layout() -> None:
    for ids_name in ("outputs", "inputs"):
        for ids in ([1, 15, 28], [2, 16, 29]):
            found = read(32, ids_name=ids_name, **{IDS: ids})  # type: ignore[arg-type]
            assert (found.layers, found.readings) == ((1, 15, 28), ())
    assert read(32, **{IDS: [2, 16, 29]}).note == f"{IDS} [2, 16, 29] names inputs: outputs of [1, 15, 28]"


def test_other_ids_have_two_readings_where_both_are_layers_and_the_layouts_own_goes_first() -> None:
    assert read(32, **{IDS: [3, 9, 20]}).readings == ((3, 9, 20), (2, 8, 19))
    assert read(32, ids_name="inputs", **{IDS: [3, 9, 20]}).readings == ((2, 8, 19), (3, 9, 20))
    assert read(32, **{IDS: [0, 9, 20]})[:2] == ((0, 9, 20), ())
    assert read(32, ids_name="inputs", **{IDS: [3, 9, 32]})[:2] == ((2, 8, 31), ())
    assert parse(3, **{IDS: [0, 1, 2]}) == (0, 1, 2)


def test_without_ids_the_default_is_probed_beside_its_neighbours() -> None:
    assert read(32).readings == ((1, 15, 28), (2, 16, 29), (0, 14, 27))


def test_the_embedding_is_no_layer() -> None:
    with pytest.raises(CheckpointError, match="1 to 32, as they name inputs"):
        read(32, ids_name="inputs", **{IDS: [0, 9, 20]})


def test_stated_layers_stand_over_written_ones() -> None:
    found = read(32, stated=(3, 9, 20), **{IDS: [2, 16, 29]})
    assert found == ((3, 9, 20), (), f"draft.captured_layers [3, 9, 20] stands over {IDS} [2, 16, 29]")
    assert read(5, stated=(0, 1, 4))[:2] == ((0, 1, 4), ()), "they need no default"
    assert read(32, 2 * HIDDEN, stated=(3, 9)).note.endswith(f"{IDS} nothing")


@pytest.mark.parametrize("layers", [(1, 2, 32), (2, 1, 3), (1, 1, 2)])
def test_stated_layers_are_the_targets(layers: tuple[int, ...]) -> None:
    with pytest.raises(
        CheckpointError, match=r"draft\.captured_layers: rise, and are layers of the target, 0\.\.31; got"
    ):
        read(32, stated=layers)


def test_stated_layers_are_as_many_as_fc_joins() -> None:
    with pytest.raises(CheckpointError, match=r"as many layers as fc\.weight joins, 3; got \[1, 2\]; correct it"):
        read(32, stated=(1, 2))


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("use_aux_hidden_state", False, "eagle_config.use_aux_hidden_state is true; got false"),
        ("parallel_draft_step", 2, "eagle_config.parallel_draft_step is 1; got 2"),
        ("use_mtp_layernorm", True, "eagle_config.use_mtp_layernorm is false; got true"),
        ("other", 1, "eagle_config.other is one of"),
    ],
)
def test_switches_of_other_networks_are_refused(key: str, value: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        parse(32, eagle_config={key: value})
    assert parse(32, eagle_config={"parallel_draft_heads_num_layers": 3, "use_mtp_layernorm": None}) == (1, 15, 28)


@pytest.mark.parametrize("ids", [[1, 2, 33], [2, 1, 3], [1, 1, 2], [], [-1, 2, 3], [1.0, 2, 3], "1,2,3"])
def test_wrong_ids_are_refused(ids: Any) -> None:
    with pytest.raises(CheckpointError, match=IDS):
        parse(32, **{IDS: ids})


@pytest.mark.parametrize("columns", [0, 100, 2 * HIDDEN])
def test_fc_is_as_wide_as_the_features(columns: int) -> None:
    with pytest.raises(CheckpointError, match=rf"fc\.weight has .*got {columns};"):
        parse(32, columns, **{IDS: [1, 15, 28]})
