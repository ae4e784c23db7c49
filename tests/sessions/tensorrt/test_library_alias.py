"""The name under which the ONNX parser finds the vendor's library."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.sessions.tensorrt.library_alias import MACHINES, build_alias_library


@pytest.mark.parametrize("soname", ["libdraftline_alias_a.so", "libdraftline_alias_longer_name.so"])
def test_a_loaded_alias_leads_to_the_library_it_needs(tmp_path: Path, soname: str) -> None:
    """In a process of its own: libraries stay loaded. The linker finds it by its SONAME, though no file has it."""
    path = tmp_path / "alias"
    path.write_bytes(build_alias_library(soname, "libm.so.6", MACHINES[platform.machine()]))
    program = f"""
import ctypes, os
try:
    ctypes.CDLL({soname!r})
except OSError:
    pass
else:
    raise SystemExit("there is one already")
ctypes.CDLL({str(path)!r})
os.remove({str(path)!r})
library = ctypes.CDLL({soname!r})
library.cos.restype, library.cos.argtypes = ctypes.c_double, [ctypes.c_double]
print(library.cos(0.0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.0"


def test_an_alias_needs_its_library(tmp_path: Path) -> None:
    path = tmp_path / "alias"
    path.write_bytes(build_alias_library("libdraftline_alias_b.so", "libdraftline_absent.so.1", 62))
    with pytest.raises(OSError, match="libdraftline_absent"):
        ctypes.CDLL(str(path))


def test_the_parser_takes_the_plugin_in_a_fresh_process() -> None:
    """Without the alias the process would abort, and print no word."""
    program = """
from draftline.sessions.tensorrt.library_alias import ensure_parser_finds_library
from draftline.sessions.tensorrt.vendor import import_vendor
import ctypes
ensure_parser_finds_library(import_vendor("tensorrt_rtx"))
ctypes.CDLL("libtensorrt_rtx.so").getInferLibVersion
print("found")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "found"
