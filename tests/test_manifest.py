"""Stage directories: whole or absent, current or not."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from draftline.errors import ArtifactError
from draftline.manifest import (
    FileHasher,
    Manifest,
    find_change,
    is_current,
    load_manifest,
    lock_directory,
    record_outputs,
    remove_leftovers,
    replace_directory,
    write_manifest,
)

INPUTS = {"setting target.dtype": '"float32"', "code": "a" * 64}


def write_stage(directory: Path, content: str = "weights") -> None:
    with replace_directory(directory) as partial:
        (partial / "a.bin").write_text(content)
        (partial / "deep").mkdir()
        (partial / "deep" / "b.bin").write_text(content * 2)
        outputs = record_outputs(partial, FileHasher())
        manifest = Manifest("convert", "0.1.0", INPUTS, {}, outputs, ["draftline"], 0.1, "2026-01-01T00:00:00+00:00")
        write_manifest(partial, manifest)


def test_a_manifest_is_read_back(tmp_path: Path) -> None:
    write_stage(tmp_path / "checkpoint")
    manifest = load_manifest(tmp_path / "checkpoint")
    assert manifest is not None
    assert set(manifest.outputs) == {"a.bin", "deep/b.bin"}
    assert is_current(tmp_path / "checkpoint", INPUTS, FileHasher())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_equal_outputs_have_equal_hashes(tmp_path: Path) -> None:
    hashes = set()
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        write_stage(tmp_path / name, content)
        manifest = load_manifest(tmp_path / name)
        assert manifest is not None
        hashes.add(manifest.outputs_sha256())
    assert len(hashes) == 2


def test_changed_inputs_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    assert find_change(directory, INPUTS, FileHasher()) == "it never ran"
    write_stage(directory)
    new = INPUTS | {"setting target.dtype": '"bfloat16"'}
    assert find_change(directory, new, FileHasher()) == 'setting target.dtype changed from "float32" to "bfloat16"'
    assert find_change(directory, INPUTS | {"code": "b" * 64}, FileHasher()) == "code changed"
    assert find_change(directory, INPUTS | {"package x": "1"}, FileHasher()) == "package x changed from None to 1"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "a.bin").write_text("weighty"), "output a.bin was changed"),
        (lambda path: os.truncate(path / "deep" / "b.bin", 3), "output deep/b.bin was changed"),
        (lambda path: (path / "a.bin").unlink(), "output a.bin is gone"),
        (lambda path: (path / "c.bin").touch(), "output c.bin was added"),
        (lambda path: (path / "manifest.json").write_text("{"), "it has a damaged manifest.json"),
        (
            lambda path: (path / "manifest.json").write_text('{"draftline_version": 1}'),
            "it has a damaged manifest.json",
        ),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: object, reason: str) -> None:
    write_stage(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")  # type: ignore[operator]
    assert find_change(tmp_path / "checkpoint", INPUTS, FileHasher()) == reason


def test_copies_and_new_times_are_no_damage(tmp_path: Path) -> None:
    write_stage(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "checkpoint" / "a.bin", ns=(1, 1))
    for name in ("checkpoint", "copy"):
        assert is_current(tmp_path / name, INPUTS, FileHasher())


def test_a_known_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stage(tmp_path / "checkpoint")

    def refuse(descriptor: int) -> str:
        raise AssertionError("a file was hashed")

    monkeypatch.setattr("draftline.manifest._sha256", refuse)
    hasher = FileHasher()
    assert is_current(tmp_path / "checkpoint", INPUTS, hasher)
    (tmp_path / "link").hardlink_to(tmp_path / "checkpoint" / "a.bin")
    hasher.record(tmp_path / "link")
    os.utime(tmp_path / "link", ns=(1, 1))
    with pytest.raises(AssertionError, match="hashed"):
        hasher.record(tmp_path / "link")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_error_keeps_the_old_directory(tmp_path: Path, error: type[BaseException]) -> None:
    write_stage(tmp_path / "checkpoint")

    def fail_halfway() -> None:
        with replace_directory(tmp_path / "checkpoint") as partial:
            (partial / "half").touch()
            raise error

    with pytest.raises(error):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert is_current(tmp_path / "checkpoint", INPUTS, FileHasher())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fill() -> None:
        with replace_directory(tmp_path / "checkpoint"), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC


def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    assert load_manifest(tmp_path / "engine") is None, "an empty directory is nobody's"
    (tmp_path / "engine" / "holiday.jpg").touch()
    for content in (None, "{}"):  # the second: somebody else's manifest.json
        if content is not None:
            (tmp_path / "engine" / "manifest.json").write_text(content)
        with pytest.raises(ArtifactError, match=r"engine: a directory that draftline replaces has a manifest\.json"):
            find_change(tmp_path / "engine", INPUTS, FileHasher())


def test_leftovers_of_known_stages_go(tmp_path: Path) -> None:
    for name in (
        "engine.partial-12",
        "engine.old-3",
        "engine.partial-4.partial",
        "engine.partial-x",
        "other.partial-12",
        "engine",
    ):
        (tmp_path / name / "deep").mkdir(parents=True)
    remove_leftovers(tmp_path, ["engine", "smoke"])
    assert {path.name for path in tmp_path.iterdir()} == {"engine.partial-x", "other.partial-12", "engine"}


def _hold_lock(directory: Path, locked: object, release: object) -> None:
    with lock_directory(directory):
        locked.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    locked, release = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=_hold_lock, args=(tmp_path / "builds", locked, release))
    holder.start()
    assert locked.wait(30)
    with pytest.raises(ArtifactError, match="one run at a time"), lock_directory(tmp_path / "builds"):
        pass
    holder.kill()
    holder.join()
    with lock_directory(tmp_path / "builds"):
        pass


@pytest.mark.parametrize("name", ["file", "file/builds"])
def test_a_file_in_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="the output is a directory"), lock_directory(tmp_path / name):
        pass


def test_a_manifest_is_json_for_people(tmp_path: Path) -> None:
    write_stage(tmp_path / "checkpoint")
    data = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    assert list(data)[:3] == ["stage", "draftline_version", "inputs"]
