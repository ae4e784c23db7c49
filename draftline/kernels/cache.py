"""Compiled kernels by the hash of everything that they are made from."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftline.errors import ArtifactError
from draftline.kernels.arguments import compiler_options, constants, signature
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.compiler import compile_kernel
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import import_triton, source_hash
from draftline.whole_file import replace_file


def kernel_key(name: str, shape: KernelShape, configuration: KernelConfiguration, architecture: int) -> str:
    """Return the hash of a kernel's source, constants, types and compiler."""
    made_from = {
        "source": source_hash(),
        "triton": import_triton().__version__,
        "name": name,
        "signature": signature(name, shape),
        "constants": constants(name, shape, configuration),
        "configuration": asdict(configuration),
        "options": compiler_options(name, configuration),
        "architecture": architecture,
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def load_or_compile(
    name: str, shape: KernelShape, configuration: KernelConfiguration, architecture: int, cache: Path | None
) -> CompiledKernel:
    """Return the kernel in ``cache``, or compile it and leave it there, whole or not at all."""
    if cache is None:
        return compile_kernel(name, shape, configuration, architecture)
    key = kernel_key(name, shape, configuration, architecture)
    path = cache / f"{name}-sm_{architecture}-{key[:32]}.json"
    if path.is_file():
        return _decode(path, path.read_text(encoding="utf-8"))
    kernel = compile_kernel(name, shape, configuration, architecture)
    cache.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial:
        partial.write_text(_encode(kernel), encoding="utf-8")
    return kernel


def _encode(kernel: CompiledKernel) -> str:
    content = {**asdict(kernel), "cubin": base64.b64encode(kernel.cubin).decode()}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "kernel": content})


def _decode(path: Path, text: str) -> CompiledKernel:
    try:
        document: dict[str, Any] = json.loads(text)
        content = document["kernel"]
        is_whole = document["sha256"] == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ArtifactError(path, "holds a whole kernel", "a damaged file", "remove it; it is compiled anew")
    content["cubin"] = base64.b64decode(content["cubin"])
    content["configuration"] = KernelConfiguration(**content["configuration"])
    content["arguments"] = tuple(content["arguments"])
    content["argument_types"] = tuple(content["argument_types"])
    return CompiledKernel(**content)
