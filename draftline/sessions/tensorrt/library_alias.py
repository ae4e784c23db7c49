"""A name under which the vendor's parser finds the vendor's library.

When a plugin is added, the ONNX parser opens its own library by the name without a version (``libtensorrt_rtx.so``),
which the wheel of TensorRT-RTX 1.7 does not ship; then the process aborts ("terminate called without an active
exception"). The dynamic linker also finds a library that is already loaded under that SONAME. So an empty library is
loaded whose SONAME is the missing name and whose one dependency is the library that is loaded already. The user's
installation stays as it is, and no file is left behind.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import tempfile
from pathlib import Path

from draftline.errors import BuildError
from draftline.sessions.tensorrt.vendor import Vendor

MACHINES = {"x86_64": 62, "aarch64": 183}  # EM_X86_64, EM_AARCH64
_PAGE = 0x1000


def ensure_parser_finds_library(vendor: Vendor) -> None:
    """Give the loaded library of ``vendor`` its unversioned name, where the linker does not know it.

    Raises: BuildError where that cannot be done.
    """
    name = f"lib{vendor.facts.library}.so"
    if _opens(name):
        return
    loaded = _loaded_soname(vendor.facts.library)
    if loaded is not None and platform.machine() in MACHINES:
        with tempfile.TemporaryDirectory() as scratch:
            alias = Path(scratch) / name
            alias.write_bytes(build_alias_library(name, loaded, MACHINES[platform.machine()]))
            _opens(str(alias))  # the mapping outlives the file
        if _opens(name):
            return
    cure = f"link {name} to the {loaded or vendor.facts.library} of the package, in a folder of LD_LIBRARY_PATH"
    raise BuildError(vendor.backend, f"the ONNX parser finds {name} by this name", "no such library", cure)


def build_alias_library(soname: str, needed: str, machine: int) -> bytes:
    """Build a shared library for 64-bit Linux that has no symbols, the name ``soname``, and the one dependency
    ``needed``: an ELF header, one segment to load, and the dynamic section in it."""
    strings = b"\0" + soname.encode() + b"\0" + needed.encode() + b"\0"
    header_bytes, segment_bytes = 64, 56
    text_at = header_bytes + 2 * segment_bytes
    symbols_at = -(-(text_at + len(strings)) // 8) * 8
    hash_at = symbols_at + 24  # one symbol: the undefined one that every table begins with
    dynamic_at = hash_at + 24
    entries = [
        (1, 1 + len(soname) + 1),  # DT_NEEDED
        (14, 1),  # DT_SONAME
        (5, text_at),  # DT_STRTAB
        (10, len(strings)),  # DT_STRSZ
        (6, symbols_at),  # DT_SYMTAB
        (11, 24),  # DT_SYMENT
        (4, hash_at),  # DT_HASH
        (0, 0),
    ]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = dynamic_at + len(dynamic)
    identity = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little-endian
    header = identity + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, header_bytes, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, _PAGE)  # readable and writable, as glibc relocates it
    section = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
    table = struct.pack("<IIIIII", 1, 1, 0, 0, 0, 0)  # one bucket, one symbol, none in it
    content = bytearray(size)
    pieces = ((0, header + load + section), (text_at, strings), (hash_at, table), (dynamic_at, dynamic))
    for offset, piece in pieces:
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def _opens(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOW)
    except OSError:
        return False
    return True


def _loaded_soname(stem: str) -> str | None:
    """Return the file name of the library ``stem`` that this process has mapped, such as ``libtensorrt_rtx.so.1``."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(rf"/(lib{re.escape(stem)}\.so\.\d+)(?:[.\d]*)$", maps, re.MULTILINE)
    return None if found is None else found.group(1)
