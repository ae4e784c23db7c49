"""Inputs of a Triton request as numpy arrays by name, and the rules every declared input obeys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import RequestError
from draftline.triton.contract import CLIENT_NAMES, Tensor

Arrays = Mapping[str, NDArray[Any]]


def read_inputs(request: Any) -> dict[str, NDArray[Any]]:
    """Return the inputs of a ``pb_utils.InferenceRequest`` by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def decode_text(value: bytes | str, where: str) -> str:
    """Decode a STRING element. Raises RequestError if it is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            where, "must be valid UTF-8", f"byte 0x{value[error.start]:02x} at offset {error.start}", "encode as UTF-8"
        ) from None


def read_scalar(arrays: Arrays, name: str, row: int) -> Any:
    """Return the element of a one-element-per-row input, or None where the client did not send it."""
    array = arrays.get(name)
    if array is None or array.size == 0:
        return None
    values = array.reshape(array.shape[0] if array.ndim else 1, -1)
    if values.shape[1] != 1 or row >= values.shape[0]:
        raise RequestError(
            client_name(name), "must hold one value per row", f"shape {list(array.shape)}", "send [1, 1]"
        )
    return values[row, 0].item() if isinstance(values[row, 0], np.generic) else values[row, 0]


def read_either(arrays: Arrays, name: str, old_name: str, row: int) -> int | None:
    """Return an input that has an old spelling too. Raises RequestError where the two disagree."""
    value, old_value = read_scalar(arrays, name, row), read_scalar(arrays, old_name, row)
    if value is not None and old_value is not None and value != old_value:
        raise RequestError(old_name, f"is the old spelling of {name} and must equal it", old_value, f"send only {name}")
    either: int | None = value if value is not None else old_value
    return either


def client_name(name: str) -> str:
    """Return the name a client of the ensemble knows an input by."""
    return CLIENT_NAMES.get(name, name)


def refuse_unsupported(arrays: Arrays, declared: Iterable[Tensor]) -> None:
    """Raise RequestError for an input that this version declares but does not serve, unless its value is neutral."""
    for tensor in declared:
        array = arrays.get(tensor.name)
        if tensor.neutral is None or array is None:
            continue
        for value in array.ravel().tolist():
            if value in (b"", "") or any(_same(value, neutral) for neutral in tensor.neutral):
                continue
            name = client_name(tensor.name)
            got = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
            neutral = " or ".join(str(choice) for choice in tensor.neutral)
            cure = f"leave it out or send {neutral}" if tensor.neutral else "leave it out"
            raise RequestError(name, "is not supported by this version", repr(got), cure)


def _same(value: Any, neutral: Any) -> bool:
    # FP32 arrives as the nearest float32: 1e-6 is not exactly the Python float.
    return bool(value == neutral or (isinstance(neutral, float) and np.float32(value) == np.float32(neutral)))
