"""Run graphs with native operators, on any instruction set of the library that this processor has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnxruntime

from draftline.sessions.native_kernels import find_library


def open_session(model: onnx.ModelProto, num_threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a session that knows the native operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 4  # tests provoke errors
    options.register_custom_ops_library(str(find_library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(find_library()))
    library.draftline_instruction_set.restype = ctypes.c_char_p
    library.draftline_use_instruction_set.argtypes = [ctypes.c_char_p]
    return library


@contextmanager
def instruction_set(name: str) -> Iterator[bool]:
    """Let every session of this process use an instruction set; gives whether the processor has it."""
    library = _library()
    before = library.draftline_instruction_set()
    try:
        yield bool(library.draftline_use_instruction_set(name.encode()))
    finally:
        library.draftline_use_instruction_set(before)
