"""Read ``pytorch_model.bin`` through torch's weights-only unpickler, which runs no code of the file."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from draftline.checkpoints.dtypes import EXPONENT_BITS, numpy_dtype
from draftline.checkpoints.optional_package import import_optional
from draftline.checkpoints.safetensors_file import CHUNK_BYTES
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

_CURE = "use a safetensors checkpoint, or save it again with save_pretrained(..., safe_serialization=True)"


def open_pytorch_file(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of one ``.bin`` file.

    Raises:
        CheckpointError: the file is damaged, of the old non-zip format, or holds anything but tensors.
        MissingPackageError: torch is not installed.
    """
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in _load(path).items():
        dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        if not isinstance(name, str) or not hasattr(tensor, "untyped_storage"):
            raise CheckpointError(path, "the file maps names to tensors", f"{name!r}: {dtype}", _CURE)
        tensors[name] = SourceTensor(path, dtype, tuple(tensor.shape), partial(_read_chunks, path, name, dtype))
    return tensors


def _read_chunks(path: Path, name: str, dtype: str) -> Iterator[NDArray[Any]]:
    # The file is mapped anew for each tensor and unmapped with it, so resident pages never exceed one tensor.
    tensor = _load(path)[name].reshape(-1)
    integer_dtype = dtype
    if dtype in EXPONENT_BITS or dtype.startswith("float8"):  # numpy has no bfloat16, and no float8
        integer_dtype = {1: "uint8", 2: "int16", 4: "int32"}[numpy_dtype(dtype).itemsize]
    elements = tensor.view(getattr(_torch(), integer_dtype)).numpy().view(numpy_dtype(dtype))
    step = CHUNK_BYTES // elements.itemsize
    for start in range(0, elements.size, step):
        yield elements[start : start + step]


def _load(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise CheckpointError(path, "the file exists", "no such file", "fetch the whole checkpoint")
    torch = _torch()
    if not zipfile.is_zipfile(path):  # cut short, or a bare pickle as torch wrote before 1.6
        raise CheckpointError(path, "a weights-only loader can read the file", "no zip archive", _CURE)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(path, "a weights-only loader can read the file", reason, _CURE) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(path, "the file maps names to tensors", type(loaded).__name__, _CURE)
    return loaded


def _torch() -> Any:
    return import_optional("torch", "pytorch_model.bin", "pip install torch, or use a safetensors checkpoint")
