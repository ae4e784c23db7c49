"""What a head is measured against: what users and tools get wrong, each once, in one thing only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import load_head_config
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.stages.challengers import challengers, with_layers
from tests.sessions.tiny_engines import convert_tiny_draft
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_layouts import NUM_LAYERS, ROWS

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The converted target and head."""
    from draftline.checkpoints.convert import convert_checkpoint

    root = tmp_path_factory.mktemp("challengers")
    published = write_tiny_checkpoint(root / "published", num_layers=NUM_LAYERS)
    convert_checkpoint(published, root / "target", "float32", lambda done, total: None)
    source = ROWS["specforge"].write(root / "source", published)
    return root / "target", convert_tiny_draft(root, "eagle3", source, root / "target", "float32")


def names(head: HeadConfig, folders: tuple[Path, Path], *readings: HeadConfig, **target: object) -> list[str]:
    config = replace(load_checkpoint_config(folders[0]), **target)  # type: ignore[arg-type]
    found = challengers([head, *readings], folders[1], config)
    return [other.name for other in found if other.stands_beside(head)]


def test_layers_one_off_and_those_of_the_reference(folders: tuple[Path, Path]) -> None:
    head = load_head_config(folders[1])
    assert names(with_layers(head, (2, 4, 5)), folders)[:2] == ["layers [1, 3, 4]", "layers [3, 5, 6]"]
    assert names(with_layers(head, (1, 3, 4)), folders)[:2] == ["layers [2, 4, 5]", "layers [0, 2, 3]"]
    assert names(with_layers(head, (0, 5, 7)), folders)[:2] == ["layers [1, 3, 4]", "rope_theta 500000"]
    readings = (with_layers(head, (2, 4, 5)), with_layers(head, (0, 2, 3)))
    assert not any("layers" in name for name in names(with_layers(head, (1, 3, 4)), folders, *readings))


def test_bases_of_the_target_and_common_ones(folders: tuple[Path, Path]) -> None:
    head = replace(load_head_config(folders[1]), captured_layers=(), method="eagle1")
    assert names(head, folders) == ["rope_theta 500000", "rope_theta 1e+06"]
    assert names(replace(head, rotary_base=500000.0), folders) == ["rope_theta 10000", "rope_theta 1e+06"]
    scaled = names(head, folders, rotary_base=1e6, rotary_scaling=YARN)
    assert scaled == [f"rope_theta 1e+06 with rope_scaling {YARN}", "rope_theta 500000", "rope_theta 1e+06"]
    assert names(replace(head, method="medusa"), folders) == []


def test_each_of_two_readings_has_its_own_bases(folders: tuple[Path, Path]) -> None:
    first = with_layers(load_head_config(folders[1]), (1, 3, 4))
    second = with_layers(first, (2, 4, 5))
    found = challengers([first, second], folders[1], load_checkpoint_config(folders[0]))
    for reading in (first, second):
        bases = [other for other in found if other.stands_beside(reading) and other.kind == "rope_theta"]
        assert {other.head.captured_layers for other in bases} == {reading.captured_layers}
        assert len(bases) == 2


@pytest.mark.parametrize(
    ("offsets", "is_tried"), [([0, 3, 5, 9], True), ([0, 0, 5, 5], False), ([2, 3, 5, 400], False)]
)
def test_offsets_that_could_be_ids_are_read_as_such(
    folders: tuple[Path, Path], tmp_path: Path, offsets: list[int], is_tried: bool
) -> None:
    values = np.array(offsets, np.int64)
    write_safetensors(tmp_path / "rank0.safetensors", [TensorEntry("d2t", "int64", (4,), lambda: [values])])
    head = load_head_config(folders[1])
    found = challengers([head], tmp_path, load_checkpoint_config(folders[0]))
    assert [other.cure for other in found if other.has_ids] == ["store d2t[draft id] - draft id"] * is_tried
    assert head.vocab_size < 400
