"""The safetensors reader and writer against the safetensors package, and files that break a rule of the format."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import (
    TensorEntry,
    map_tensor,
    read_chunks,
    tensor_locations,
    write_safetensors,
)
from draftline.errors import CheckpointError

DTYPES = ("float32", "float16", "bfloat16", "int64", "int8", "bool")


def entry_of(name: str, dtype: str, values: NDArray[Any]) -> TensorEntry:
    return TensorEntry(name, dtype, values.shape, lambda: [values])


def write_raw(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@settings(max_examples=25, deadline=None)
@given(tensors=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5))
def test_what_is_written_is_read_by_the_package_and_by_us(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("round") / "t.safetensors"
    generator = np.random.default_rng(0)
    arrays = {
        f"t{index}": (dtype, (generator.standard_normal(shape) * 10).astype(numpy_dtype(dtype)))
        for index, (dtype, shape) in enumerate(tensors)
    }
    write_safetensors(path, [entry_of(name, dtype, values) for name, (dtype, values) in arrays.items()], {"k": "v"})
    by_package = safetensors.numpy.load_file(path)
    locations = tensor_locations(path)
    assert set(by_package) == set(locations) == set(arrays)
    for name, (dtype, values) in arrays.items():
        location = locations[name]
        assert (location.dtype, location.shape, location.num_bytes) == (dtype, values.shape, values.nbytes)
        np.testing.assert_array_equal(by_package[name], values)
        np.testing.assert_array_equal(map_tensor(path, location), values)
        pieces = [chunk.copy() for chunk in read_chunks(path, location)]
        np.testing.assert_array_equal(np.concatenate(pieces or [values.reshape(-1)]), values.reshape(-1))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_float8_is_what_torch_reads(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    octets = np.arange(127, dtype=np.uint8)
    write_safetensors(tmp_path / "t", [entry_of("t", dtype, octets.view(numpy_dtype(dtype)))])
    (chunk,) = read_chunks(tmp_path / "t", tensor_locations(tmp_path / "t")["t"])
    with safetensors.safe_open(tmp_path / "t", framework="pt") as file:
        by_torch = file.get_tensor("t")
    assert by_torch.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(chunk.astype(np.float32), by_torch.to(torch.float32).numpy())


def test_tensors_keep_their_order_and_start_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    names = ["z", "a", "m" * 37]
    write_safetensors(path, [entry_of(name, "float32", np.ones((4, 16), np.float32)) for name in names])
    locations = tensor_locations(path)
    assert list(locations) == names
    assert [location.byte_offset % 64 for location in locations.values()] == [0, 0, 0]


def test_a_large_tensor_comes_in_chunks(tmp_path: Path) -> None:
    values = np.arange(700_001, dtype=np.int64)
    write_safetensors(tmp_path / "t", [entry_of("t", "int64", values)])
    chunks = [chunk.copy() for chunk in read_chunks(tmp_path / "t", tensor_locations(tmp_path / "t")["t"])]
    assert len(chunks) == 6
    np.testing.assert_array_equal(np.concatenate(chunks), values)


F32 = {"dtype": "F32", "shape": [2]}
BROKEN: dict[str, tuple[object, bytes, str]] = {
    "hole": ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [12, 20]}}, b"0" * 20, "starts where"),
    "overlap": ({"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 12]}}, b"0" * 12, "starts where"),
    "truncated": ({"a": F32 | {"data_offsets": [0, 8]}}, b"0" * 7, "bytes its header announces"),
    "trailing": ({"a": F32 | {"data_offsets": [0, 8]}}, b"0" * 9, "bytes its header announces"),
    "dtype": ({"a": F32 | {"dtype": "F4", "data_offsets": [0, 2]}}, b"00", "one of the dtypes"),
    "length": ({"a": F32 | {"data_offsets": [0, 4]}}, b"0" * 4, "spans 8 bytes"),
    "negative": ({"a": F32 | {"shape": [-2], "data_offsets": [0, 8]}}, b"0" * 8, "a shape and data_offsets"),
    "not json": (b"{nothing", b"", "header is JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "header is JSON"),
    "list": ([], b"", "JSON object"),
    "twice": (b'{"a":{},"a":{}}', b"", "names a tensor once"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_header_that_breaks_a_rule_is_refused(tmp_path: Path, case: str) -> None:
    header, data, rule = BROKEN[case]
    path = write_raw(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rule) as caught:
        tensor_locations(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"short", "starts with 8 bytes"),
        ((10**9).to_bytes(8, "little"), "at most 100000000 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "holds its header"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, rule: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=rule):
        tensor_locations(tmp_path / "f")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        tensor_locations(tmp_path / "absent")


def test_a_disk_known_to_be_too_small_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    monkeypatch.setattr(os, "write", lambda *_: pytest.fail("wrote to a full disk"))
    with pytest.raises(CheckpointError, match=r"room for 4192 bytes; got 10 bytes free"):
        write_safetensors(tmp_path / "t", [entry_of("t", "float32", np.zeros(1016, np.float32))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail_at_the_tensor(descriptor: int, view: memoryview, write: Any = os.write) -> int:
        if len(view) > 4000:
            raise OSError(number, os.strerror(number))
        return int(write(descriptor, view))

    monkeypatch.setattr(os, "write", fail_at_the_tensor)
    with pytest.raises(CheckpointError, match=r"t: the disk has room for 4192 bytes") as caught:
        write_safetensors(tmp_path / "t", [entry_of("t", "float32", np.zeros(1016, np.float32))])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tensor_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"old")

    def fail() -> list[bytes]:
        raise CheckpointError("x", "y", "z", "w")

    with pytest.raises(CheckpointError):
        write_safetensors(tmp_path / "t", [TensorEntry("t", "float32", (1,), fail)])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("t", b"old")]
