"""Whoever develops draftline has its native operators: a build that lost them is no build to test."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort

from draftline.sessions.native_kernels import find_library, instruction_set

INSTRUCTION_SETS = {"x86_64": {"avx512_vnni", "avx2"}, "aarch64": {"neon_dotprod", "neon"}}


def test_the_library_was_compiled_and_this_processor_runs_it() -> None:
    assert find_library() is not None, "scripts/kernels compiles it"
    assert instruction_set() in INSTRUCTION_SETS[platform.machine()]


def test_onnxruntime_takes_it() -> None:
    ort.SessionOptions().register_custom_ops_library(str(find_library()))


def test_it_is_found_from_any_folder(tmp_path: Path) -> None:
    program = "from draftline.sessions.native_kernels import find_library; print(find_library())"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == f"{find_library()}\n"
