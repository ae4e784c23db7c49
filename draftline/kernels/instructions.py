"""What a cubin is made of: its instructions by kind, as the disassembler that Triton carries lists them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from draftline.kernels.source import import_triton

KINDS = {  # by the first part of an opcode's name; what is not here counts as "other": integers, moves, branches
    "products": ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCMMA"),
    "global": ("LDG", "STG", "LDGSTS", "UBLKCP", "UTMALDG"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "LDTM", "STTM", "UTCCP"),
    "local": ("LDL", "STL"),
    "special": ("MUFU",),
    "floats": ("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2",
               "HFMA2", "F2FP", "F2F", "FSET"),
    "barriers": ("BAR", "SYNCS", "DEPBAR", "WARPSYNC", "WARPGROUP", "UTCBAR"),
}  # fmt: skip
_KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}


def count_instructions(cubin: bytes) -> dict[str, int]:
    """Return the number of instructions of each kind; ``local`` ones are spills, of a kernel without local arrays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [import_triton().knobs.nvidia.nvdisasm.path, "--print-code", str(path)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return count_listing(listing)


def count_listing(listing: str) -> dict[str, int]:
    """Count the instructions of a listing.

    >>> count_listing("/*0010*/ @!P0 LDG.E R2, [R4] ; /*0020*/ IMAD R1, R1 ;")["global"]
    1
    """
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", listing)
    counts = Counter(_KIND_OF.get(opcode, "other") for opcode in opcodes if opcode != "NOP")
    return {kind: counts[kind] for kind in (*KINDS, "other")}
