"""Read and write safetensors files, streaming.

Source: the safetensors format: eight bytes of header length, a JSON header, then the tensors without holes. A header
may be padded with spaces, so the data section of a file written here starts at a multiple of 64 bytes. Holes between
tensors are forbidden; a tensor therefore starts at a multiple of 64 bytes when the tensors before it are multiples of
64 bytes long (true of the usual layer sizes), and always at a multiple of its element size when all tensors of the
file share one dtype, as in a converted checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.disk_space import check_free_space, disk_full_named
from draftline.checkpoints.dtypes import SAFETENSORS_CODES, SAFETENSORS_NAMES, numpy_dtype
from draftline.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DATA_ALIGNMENT_BYTES = 64
CHUNK_BYTES = 1 << 20  # small enough for the processor's cache, large enough to hide the system call

_FETCH_AGAIN = "fetch the file again"


class TensorLocation(NamedTuple):
    """Where a tensor lies: ``dtype`` in numpy's spelling, ``byte_offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    byte_offset: int
    num_bytes: int


class TensorEntry(NamedTuple):
    """A tensor to write: ``chunks()`` yields its little-endian bytes in row-major order, in pieces of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview | NDArray[Any]]]


def tensor_locations(path: Path) -> dict[str, TensorLocation]:
    """Read the header of a safetensors file; tensors come in the order of their offsets.

    Raises:
        CheckpointError: the file is missing, truncated, too long, or its header breaks a rule of the format.
    """
    if not path.is_file():
        raise CheckpointError(path, "the safetensors file exists", "no such file", "check the checkpoint's folder")
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(path, "a safetensors file starts with 8 bytes", f"{len(prefix)} bytes", _FETCH_AGAIN)
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            rule = f"a safetensors header has at most {MAX_HEADER_BYTES} bytes"
            raise CheckpointError(path, rule, f"{header_bytes} bytes", "check that the file is a safetensors file")
        if 8 + header_bytes > file_bytes:
            rule = f"the file holds its header of {header_bytes} bytes"
            raise CheckpointError(path, rule, f"a file of {file_bytes} bytes", _FETCH_AGAIN)
        header = _parse_header(file.read(header_bytes), path)
    data_start = 8 + header_bytes
    locations = [(name, _parse_entry(name, entry, data_start, path)) for name, entry in header.items()]
    # An empty tensor may share its offset with the next one, so length decides between equal offsets.
    locations.sort(key=lambda item: (item[1].byte_offset, item[1].num_bytes))
    position = data_start
    for name, location in locations:
        if location.byte_offset != position:
            rule = f"tensor {name} starts where the one before it ends (byte {position})"
            raise CheckpointError(path, rule, f"byte {location.byte_offset}", _FETCH_AGAIN)
        position += location.num_bytes
    if position != file_bytes:
        rule = f"the file has the {position} bytes its header announces"
        raise CheckpointError(path, rule, f"{file_bytes} bytes", _FETCH_AGAIN)
    return dict(locations)


def map_tensor(path: Path, location: TensorLocation) -> NDArray[Any]:
    """Map one tensor of a file, read-only, in its stored dtype; pages are read when touched."""
    dtype = numpy_dtype(location.dtype)
    if location.num_bytes == 0:
        return np.empty(location.shape, dtype)
    return np.memmap(path, dtype, "r", offset=location.byte_offset, shape=location.shape)


def read_chunks(path: Path, location: TensorLocation) -> Iterator[NDArray[Any]]:
    """Yield the elements of one tensor as flat arrays of at most ``CHUNK_BYTES``, in row-major order.

    One buffer is reused: an array is valid until the next one is asked for. Nothing is mapped, so memory does not grow.
    """
    dtype = numpy_dtype(location.dtype)
    buffer = bytearray(min(CHUNK_BYTES, location.num_bytes))
    remaining = location.num_bytes
    with path.open("rb", buffering=0) as file:
        file.seek(location.byte_offset)
        while remaining:
            view = memoryview(buffer)[: min(len(buffer), remaining)]
            filled = 0
            while filled < len(view):
                num_read = file.readinto(view[filled:])
                if not num_read:
                    rule = f"the tensor at byte {location.byte_offset} has {location.num_bytes} bytes"
                    raise CheckpointError(path, rule, "a file that shrank while it was read", _FETCH_AGAIN)
                filled += num_read
            remaining -= filled
            yield np.frombuffer(view, dtype)


def write_safetensors(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors in the order given; the file appears under its name only when it is whole and on disk.

    Raises:
        CheckpointError: the disk is too small (found before the first byte is written, or while writing).
    """
    tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    assert len(tensors) == len(entries), "every tensor has another name"
    header, _, total_bytes = lay_out(tensors, metadata)
    check_free_space(path, total_bytes)
    temporary = path.with_name(path.name + ".partial")
    try:
        with disk_full_named(path, total_bytes), temporary.open("wb", buffering=0) as file:
            _write_all(file.fileno(), header)
            for entry in entries:
                written = sum(_write_all(file.fileno(), chunk) for chunk in entry.chunks())
                assert written == _num_bytes(entry.dtype, entry.shape), (entry.name, written)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_all(descriptor: int, chunk: bytes | memoryview | NDArray[Any]) -> int:
    array = chunk if isinstance(chunk, np.ndarray) else np.frombuffer(chunk, np.uint8)
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    num_bytes = len(view)
    while view:
        view = view[os.write(descriptor, view) :]
    return num_bytes


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file of ``tensors`` (dtype and shape by name), their byte offsets, and the file's size."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        offsets[name], end = position, position + _num_bytes(dtype, shape)
        code = SAFETENSORS_CODES[dtype]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
    start = 8 + len(text)
    whole_offsets = {name: start + offset for name, offset in offsets.items()}
    return len(text).to_bytes(8, "little") + text, whole_offsets, start + position


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * numpy_dtype(dtype).itemsize


def _parse_header(text: bytes, path: Path) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(path, "a safetensors header names a tensor once", repr(repeated), _FETCH_AGAIN)
        return parsed

    try:
        header = json.loads(text, object_pairs_hook=refuse_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(path, "a safetensors header is JSON", str(error), _FETCH_AGAIN) from error
    if not isinstance(header, dict):
        got = type(header).__name__
        raise CheckpointError(path, "a safetensors header is a JSON object", got, _FETCH_AGAIN)
    header.pop("__metadata__", None)
    return header


def _parse_entry(name: str, entry: Any, data_start: int, path: Path) -> TensorLocation:
    def is_counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

    if not isinstance(entry, dict) or not is_counts(entry.get("shape")) or not is_counts(entry.get("data_offsets")):
        rule = f"tensor {name} has a dtype, a shape and data_offsets"
        raise CheckpointError(path, rule, json.dumps(entry), _FETCH_AGAIN)
    code, shape, offsets = entry.get("dtype"), tuple(entry["shape"]), entry["data_offsets"]
    if code not in SAFETENSORS_NAMES:
        rule = f"tensor {name} has one of the dtypes {', '.join(SAFETENSORS_NAMES)}"
        raise CheckpointError(path, rule, code, "convert a checkpoint that is not quantised")
    dtype = SAFETENSORS_NAMES[code]
    num_bytes = _num_bytes(dtype, shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        rule = f"tensor {name} of dtype {code} and shape {list(shape)} spans {num_bytes} bytes"
        raise CheckpointError(path, rule, f"data_offsets {offsets}", _FETCH_AGAIN)
    return TensorLocation(dtype, shape, data_start + offsets[0], num_bytes)
