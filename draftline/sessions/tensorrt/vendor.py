"""The two vendors: which package brings them, which release is needed, how they differ."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass
from typing import Any, Literal

from draftline.errors import BuildError, MissingPackageError

Backend = Literal["tensorrt", "tensorrt_rtx"]

DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "float8_e4m3fn",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class VendorFacts:
    """``library`` is the stem of the shared library, ``oldest`` the first release whose ONNX parser takes plugins of
    IPluginV3 in the place of functions. ``needs_gpu``: the builder measures kernels on the device it builds for.
    ``compiles_at_run_time``: an execution context compiles kernels for the shapes that it runs."""

    title: str
    package: str
    oldest: tuple[int, int]
    library: str
    needs_gpu: bool
    compiles_at_run_time: bool
    compute_capabilities: tuple[int, ...]


VENDORS: dict[Backend, VendorFacts] = {
    "tensorrt": VendorFacts("TensorRT", "tensorrt-cu13", (10, 14), "nvinfer", True, False, ()),
    # Hopper and data-center Blackwell are not among them: 9.0, 10.0 and 10.3 are refused by setComputeCapability.
    "tensorrt_rtx": VendorFacts(
        "TensorRT-RTX", "tensorrt-rtx-cu13", (1, 7), "tensorrt_rtx", False, True, (75, 80, 86, 89, 120, 121)
    ),
}


@dataclass(frozen=True, eq=False)
class Vendor:
    """An imported vendor. ``module`` is ``tensorrt`` or ``tensorrt_rtx``, whose names are the same where both have
    them."""

    backend: Backend
    module: Any
    facts: VendorFacts

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def title(self) -> str:
        return f"{self.facts.title} {self.version}"

    @functools.cached_property
    def dtype_names(self) -> dict[Any, str]:
        """Our name (numpy's spelling) of each of the vendor's element types; types of less than a byte are left out."""
        types = self.module.DataType
        return {getattr(types, theirs): ours for theirs, ours in DTYPE_NAMES.items()}


@functools.cache
def import_vendor(backend: Backend) -> Vendor:
    """Import the package of ``backend``.

    Raises: MissingPackageError without it; BuildError for a release that is too old, or whose libraries do not load.
    """
    facts = VENDORS[backend]
    oldest = ".".join(map(str, facts.oldest))
    cure = f"run `pip install '{facts.package}>={oldest}'`"
    where = f"engine.backend: {backend}"
    try:
        module = importlib.import_module(backend)
    except ModuleNotFoundError as error:
        if error.name not in (backend, f"{backend}_bindings", f"{backend}_libs"):
            raise
        raise MissingPackageError(where, f"needs the package {facts.package}", "none", cure) from None
    except (ImportError, OSError) as error:
        raise BuildError(where, f"the libraries of {facts.package} load", error, cure) from error
    found = re.match(r"(\d+)\.(\d+)", str(module.__version__))
    if found is None or tuple(map(int, found.groups())) < facts.oldest:
        raise BuildError(where, f"needs {facts.title} {oldest} or later", module.__version__, cure)
    return Vendor(backend, module, facts)
