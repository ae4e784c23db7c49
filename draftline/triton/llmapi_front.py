"""The classic names before TensorRT-LLM's ``llmapi`` model: renames tensors, and refuses what that model has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import RequestError
from draftline.triton.contract import Tensor
from draftline.triton.llmapi_contract import FRONT, INPUT_NAMES, INPUTS, OUTPUT_NAMES, OUTPUTS
from draftline.triton.tensors import Arrays, decode_text, read_either, read_scalar, refuse_unsupported

_DTYPES: dict[str, Any] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_WANTED: dict[str, Tensor] = {tensor.name: tensor for tensor in INPUTS}
_GIVEN: dict[str, Tensor] = {tensor.name: tensor for tensor in OUTPUTS}


def tell_request(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return the inputs of the ``llmapi`` model for one request of a classic client.

    **Shapes**: every input has one row, ``[1, n]``; the model's are ``[n]``. Empty stop words are left out, as there.
    **Raises** RequestError for several rows, and for an input that the model has no word for, by its name.
    """
    refuse_unsupported(arrays, FRONT.inputs)
    for name, array in arrays.items():
        if array.ndim and array.shape[0] != 1:
            raise RequestError(name, "must have one row", array.shape[0], "send one request for each prompt")
    told: dict[str, NDArray[Any]] = {"text_input": np.array([_text(arrays)], np.object_)}
    words = [decode_text(word, "stop_words") for word in arrays.get("stop_words", np.zeros((1, 0))).ravel()]
    if any(words):
        told[INPUT_NAMES["stop_words"]] = np.array([word.encode() for word in words if word], np.object_)
    values = {
        name: read_scalar(arrays, name, 0)
        for name in INPUT_NAMES
        if name not in ("text_input", "stop_words", "seed", "random_seed")
    }
    values["seed"] = read_either(arrays, "seed", "random_seed", 0)
    for name, value in values.items():
        if value is not None:
            theirs = INPUT_NAMES[name]
            told[theirs] = np.array([value], _DTYPES[_WANTED[theirs].datatype])
    return told


def _text(arrays: Arrays) -> bytes:
    text: bytes | str | None = read_scalar(arrays, "text_input", 0)
    if text is None:
        raise RequestError("text_input", "must hold one prompt", "nothing", "send some text")
    return decode_text(text, "text_input").encode()


class Answer:
    """Turns the model's responses to one request into classic ones.

    Streamed responses of the model carry the text so far; classic ones carry what is new. Its numbers come as text.
    """

    def __init__(self, *, is_streamed: bool) -> None:
        self._is_streamed = is_streamed
        self._told = ""

    def tell_response(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the classic outputs ``[1, n]`` of the model's outputs ``[n]``; numbers that it has not are absent."""
        told: dict[str, NDArray[Any]] = {}
        for theirs, name in OUTPUT_NAMES.items():
            values = arrays.get(theirs)
            if values is None:
                continue
            if theirs == "text_output":
                texts = [self._new_part(decode_text(text, theirs)) for text in values.ravel()]
                told[name] = np.array([[text.encode() for text in texts]], np.object_)
            elif not any(value in (b"None", "None") for value in values.ravel().tolist()):
                told[name] = values.astype(_DTYPES[_GIVEN[theirs].datatype]).reshape(1, -1)
        return told

    def _new_part(self, text: str) -> str:
        if not self._is_streamed:
            return text
        num_same = len(self._told)
        if not text.startswith(self._told):  # its last character was not complete
            pairs = zip(self._told, text + "\0", strict=False)
            num_same = next(place for place, (old, new) in enumerate(pairs) if old != new)
        self._told = text
        return text[num_same:]
