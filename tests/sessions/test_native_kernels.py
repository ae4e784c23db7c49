"""Whoever develops draftline has its native operators: a build that lost them is no build to test."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from draftline.sessions.native_kernels import find_library, instruction_set

INSTRUCTION_SETS = {"x86_64": {"avx512_vnni", "avx2"}, "aarch64": {"neon_dotprod", "neon"}}


def test_the_library_was_compiled_and_this_processor_runs_it() -> None:
    assert find_library() is not None, "scripts/kernels compiles it"
    assert instruction_set() in INSTRUCTION_SETS[platform.machine()]


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_the_best_that_the_processor_has_is_taken() -> None:
    (flags, *_) = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert instruction_set() == ("avx512_vnni" if wide <= set(flags.split()) else "avx2")


def test_onnxruntime_takes_it() -> None:
    ort.SessionOptions().register_custom_ops_library(str(find_library()))


def test_an_older_onnxruntime_is_refused_by_an_error() -> None:
    """A stand-in for version 1.17, which has the entries of API version 17 and none of 18."""
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
    messages: list[str] = []
    version = ctypes.create_string_buffer(b"1.17.3")

    def keep_message(code: int, message: bytes) -> int:
        messages.append(message.decode())
        return 1

    entries = (create_status * 1)(create_status(keep_message))

    class ApiBase(ctypes.Structure):
        _fields_ = [("get_api", get_api), ("get_version", get_version)]

    base = ApiBase(
        get_api(lambda number: ctypes.addressof(entries) if number < 18 else None),
        get_version(lambda: ctypes.addressof(version)),
    )
    register = ctypes.CDLL(str(find_library())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert messages == ["draftline: needs ONNX Runtime 1.18 or later; got 1.17.3"]


def test_it_is_found_from_any_folder(tmp_path: Path) -> None:
    program = "from draftline.sessions.native_kernels import find_library; print(find_library())"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == f"{find_library()}\n"
