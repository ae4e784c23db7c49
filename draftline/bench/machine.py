"""The machine and the versions that numbers belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "draftline",
    "numpy",
    "onnxruntime",
    "torch",
    "transformers",
    "openvino-genai",
    "nncf",
    "tritonclient",
    "nvidia-pytriton",
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def describe_machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return the processor, the flags that decide which kernels run, the cores this process may use, the versions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name", platform.machine()),
        "flags": {flag: flag in flags for flag in CPU_FLAGS},
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
