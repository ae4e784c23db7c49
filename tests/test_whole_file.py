from __future__ import annotations

from pathlib import Path

import pytest

from draftline.whole_file import replace_file


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    path.write_text("old")
    with replace_file(path) as partial:
        assert partial.suffix == ".png"
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def fail(path: Path, is_begun: bool) -> None:
    if is_begun:
        path.write_text("half")
    raise OSError("no space")


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_error_leaves_the_old_file(tmp_path: Path, is_begun: bool) -> None:
    path = tmp_path / "loss.png"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replace_file(path) as partial:
        fail(partial, is_begun)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
