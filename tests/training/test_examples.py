"""The store of training data: what was committed stays, what was not leaves no trace, and damage is found."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.errors import ArtifactError, CheckpointError
from draftline.training import examples_writer
from draftline.training.description import Description
from draftline.training.examples import (
    FEATURES_FILE,
    INDEX_FILE,
    IS_ANSWER_FILE,
    TOKENS_FILE,
    hash_examples,
    open_examples,
)
from draftline.training.examples_writer import ExamplesWriter

DESCRIPTION = Description("t", "k", 320, 4, (0, 2), "int8", "float16", ("own", "topics"), 0.8, 64, 16, 3)
Sequence = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float16]]


def make_sequence(num_tokens: int, seed: int) -> Sequence:
    random = np.random.default_rng(seed)
    is_answer = np.arange(num_tokens) >= random.integers(1, num_tokens)
    features = random.standard_normal((num_tokens - 1, DESCRIPTION.feature_size)).astype(np.float16)
    return random.integers(0, 320, num_tokens).astype(np.int32), is_answer, features


def write(directory: Path, *names: str, description: Description = DESCRIPTION) -> None:
    directory.mkdir(exist_ok=True)
    with ExamplesWriter(directory, description) as writer:
        for name in names:
            writer.append(name, *make_sequence(5 + len(name), seed=sum(name.encode())))


def check(directory: Path, *names: str) -> None:
    examples = open_examples(directory)
    assert examples.names == names
    for number, name in enumerate(names):
        first, end = examples.sequence_starts[number : number + 2]
        token_ids, is_answer, features = make_sequence(5 + len(name), seed=sum(name.encode()))
        np.testing.assert_array_equal(examples.token_ids[first:end], token_ids)
        np.testing.assert_array_equal(examples.is_answer[first:end], is_answer)
        np.testing.assert_array_equal(examples.features[first : end - 1], features)
        assert not examples.features[end - 1].any()
    assert examples.sequence_starts[-1] == len(examples.token_ids) == len(examples.is_answer) == len(examples.features)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a", "bb")
    with ExamplesWriter(tmp_path, DESCRIPTION) as writer:
        assert writer.names == {"a", "bb"}
        writer.skip("c", "too long")
        writer.skip("d", "too long")
        writer.append("eee", *make_sequence(8, seed=sum(b"eee")))
        assert writer.num_sequences == 3
        assert writer.num_tokens == 21
    check(tmp_path, "a", "bb", "eee")
    examples = open_examples(tmp_path)
    assert examples.num_skipped == {"too long": 2}
    assert examples.description == DESCRIPTION
    assert (examples.captured_layers, examples.hidden_size) == ((0, 2), 4)
    assert examples.token_ids.dtype == np.int32
    assert examples.is_answer.dtype == np.bool_
    assert examples.features.dtype == np.float16
    assert not examples.features.flags.writeable


def test_the_first_answers_are_the_same_however_many_follow(tmp_path: Path) -> None:
    write(tmp_path / "few", "a", "bb")
    write(tmp_path / "many", "a", "bb", "eee")
    with ExamplesWriter(tmp_path / "few", DESCRIPTION) as writer:
        writer.skip("c", "too long")
    few, many = open_examples(tmp_path / "few"), open_examples(tmp_path / "many")
    wanted = int(few.is_answer.sum())
    assert (
        open_examples(tmp_path / "many", wanted).names
        == open_examples(tmp_path / "many", wanted - 1).names
        == few.names
    )
    assert open_examples(tmp_path / "many", wanted + 1).names == many.names
    assert hash_examples(tmp_path / "many", wanted) == hash_examples(tmp_path / "few", wanted)
    assert hash_examples(tmp_path / "many") != hash_examples(tmp_path / "many", wanted)
    write(tmp_path / "others", "a", "dd")
    assert hash_examples(tmp_path / "others", wanted) != hash_examples(tmp_path / "few", wanted)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_killed_run_leaves_what_it_committed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every file may have grown by any part of what was being written: rows first, the index line last."""
    directory = tmp_path_factory.mktemp("killed")
    write(directory, "a", "bb")
    sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    write(directory, "ccc")
    for name in (TOKENS_FILE, IS_ANSWER_FILE, FEATURES_FILE, INDEX_FILE):
        path = directory / name
        whole = path.stat().st_size - (name == INDEX_FILE)
        os.truncate(path, data.draw(st.integers(sizes[name], whole)))
    check(directory, "a", "bb")
    write(directory, "dddd")
    check(directory, "a", "bb", "dddd")


@pytest.mark.parametrize(
    "change",
    [
        {"target_sha256": "other"},
        {"tokenizer_sha256": "other"},
        {"captured_layers": (0, 1)},
        {"weights_dtype": "float32"},
        {"pool_dtype": "float32"},
        {"prompts": ("own",)},
        {"temperature": 1.0},
        {"max_tokens": 65},
        {"max_user_tokens": 17},
        {"seed": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_answers_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, "a")
    (name,) = change
    with pytest.raises(ArtifactError, match=rf"description.json: {name}: is that of the answers to add"):
        write(tmp_path, "bb", description=dataclasses.replace(DESCRIPTION, **change))
    check(tmp_path, "a")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_are_numbers(tmp_path: Path, value: float) -> None:
    write(tmp_path, "a")
    token_ids, is_answer, features = make_sequence(6, 0)
    features[3, 1] = value
    with (
        pytest.raises(ArtifactError, match=r"bb: features of a sequence are numbers of float16, 65504 at most"),
        ExamplesWriter(tmp_path, DESCRIPTION) as writer,
    ):
        writer.append("bb", token_ids, is_answer, features)
    check(tmp_path, "a")
    rows = np.fromfile(tmp_path / FEATURES_FILE, np.float16)
    rows[7] = value
    rows.tofile(tmp_path / FEATURES_FILE)
    with pytest.raises(ArtifactError, match=rf"{FEATURES_FILE}: features are finite; got NaN or infinity in rows 0..5"):
        open_examples(tmp_path)


def test_the_largest_number_of_float16_is_kept(tmp_path: Path) -> None:
    token_ids, is_answer, features = make_sequence(6, 0)
    features[3, 1] = -65504
    with ExamplesWriter(tmp_path, DESCRIPTION) as writer:
        writer.append("a", token_ids, is_answer, features)
    assert open_examples(tmp_path).features.min() == -65504


@pytest.mark.parametrize("num_writes", range(7))
def test_a_full_disk_leaves_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int) -> None:
    """Whatever is being written when the disk is full, half of it gets there. What was whole is kept if it can be."""
    write(tmp_path, "a")
    real, left = os.write, num_writes

    def fill(descriptor: int, data: memoryview) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            return real(descriptor, data)
        real(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(examples_writer.os, "write", fill)
    with pytest.raises(CheckpointError, match=r"the disk has room for [0-9]+ bytes; got No space left on device; free"):
        write(tmp_path, "bb", "ccc")
    monkeypatch.undo()
    check(tmp_path, "a")  # the disk is still full when the index is to be written
    write(tmp_path, "bb", "ccc")
    check(tmp_path, "a", "bb", "ccc")


def test_a_disk_that_is_full_for_one_sequence_keeps_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = examples_writer.check_free_space
    write(tmp_path, "a")

    def refuse(path: Path, num_bytes: int) -> None:
        real(path, 2**60 if num_bytes == 8 * examples_bytes() else num_bytes)

    monkeypatch.setattr(examples_writer, "check_free_space", refuse)
    with pytest.raises(CheckpointError, match=f"{FEATURES_FILE}: the disk has room for .* bytes free"):
        write(tmp_path, "bb", "ccc")
    check(tmp_path, "a", "bb")


def examples_bytes() -> int:
    return 4 + 1 + 2 * DESCRIPTION.feature_size


def test_a_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"a folder of training data has a description; got none"):
        open_examples(tmp_path)
    write(tmp_path)
    with pytest.raises(ArtifactError, match=r"holds answers; got none; let the target answer"):
        open_examples(tmp_path)


def replace_line(number: int, line: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        lines = (directory / INDEX_FILE).read_text().splitlines(keepends=True)
        lines[number] = line
        (directory / INDEX_FILE).write_text("".join(lines))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - 1)


def describe(**values: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "description.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut(TOKENS_FILE), f"{TOKENS_FILE}: has the 52 bytes that sequences.jsonl tells of; got 51"),
        (cut(IS_ANSWER_FILE), f"{IS_ANSWER_FILE}: has the 13 bytes"),
        (cut(FEATURES_FILE), f"{FEATURES_FILE}: has the 312 bytes"),
        (lambda directory: (directory / FEATURES_FILE).unlink(), f"{FEATURES_FILE}: has the 312 bytes .* got 0"),
        (replace_line(0, "{}\n"), "sequences.jsonl:1: is a sequence's name and its numbers of tokens; got {}"),
        (replace_line(0, '{"name": "a", "num_tokens": 6, "num_answer_tokens": 6}\n'), "sequences.jsonl:1: "),
        (replace_line(0, '{"name": 1, "num_tokens": 6, "num_answer_tokens": 2}\n'), "sequences.jsonl:1: "),
        (replace_line(0, '{"name": "a", "num_tokens": "6", "num_answer_tokens": 2}\n'), "sequences.jsonl:1: "),
        (replace_line(0, '{"name": "a", "num_tokens": 6, "skipped": "x"}\n'), "sequences.jsonl:1: "),
        (replace_line(0, "\xff\n"), "sequences.jsonl:1: "),
        (replace_line(1, '{"name": "a", "num_tokens": 6, "num_answer_tokens": 1}\n'), "jsonl:2: names a sequence once"),
        (describe(format_version=0), "description.json: format_version: is 1; got 0"),
        (describe(seed="3"), "description.json: seed: is of type int; got 3"),
        (describe(pool_dtype="int8"), "description.json: pool_dtype: is float32 or float16; got int8"),
        (describe(more=1), "description.json: more: is no field of a description; got 1"),
        (describe(vocab_size=100), rf"{TOKENS_FILE}: token ids lie in 0..99; got [0-9]+ in row [0-9]+"),
        (lambda directory: (directory / "description.json").write_text("{"), "description.json: is JSON"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write(tmp_path, "a", "bb")
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        open_examples(tmp_path)
