"""The kernels that a plugin runs: one archive per engine, named by its hash, with code for every architecture."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from draftline.errors import ArtifactError, BuildError
from draftline.kernels.compilation import compile_kernels
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.launches import workspace_bytes
from draftline.kernels.shape import KernelConfiguration, KernelShape

MAGIC = b"draftline-kernels-1\n"
ATTENTION_KERNELS = ("tree_attention", "tree_attention_reduce")
INPUTS = (
    "q", "k_new", "v_new", "kv_pool", "block_table", "context_lengths", "sequence_starts", "packed_mask", "sinks"
)  # fmt: skip
POINTERS = (*INPUTS, "out", "workspace")
SCRATCH = ("global_scratch", "profile_scratch")  # the compiler's; null
FLOATS = ("scale", "key_scale", "value_scale")
INTEGERS = ("num_tokens", "num_sequences", "max_blocks", "mask_words", "num_sections")
KERNEL_ARGUMENTS = frozenset({*POINTERS, *SCRATCH, *FLOATS, *INTEGERS})  # as draftline.kernels.arguments names them
NEVER_BINARY_COMPATIBLE = 90  # from here on the compiler writes "a" variants, which run on their own architecture alone
_AGAIN = "build the engine again"


def find_fitting(compiled_for: Sequence[int], architecture: int) -> int | None:
    """Return the one of ``compiled_for`` whose code runs best on a GPU of ``architecture``, None where none does.

    >>> find_fitting((80, 86, 90), 89), find_fitting((80, 90), 100)
    (86, None)
    """
    return max(
        (
            own
            for own in compiled_for
            if own == architecture
            or (own < NEVER_BINARY_COMPATIBLE and own // 10 == architecture // 10 and own < architecture)
        ),
        default=None,
    )


@dataclass(frozen=True, eq=False)
class PluginKernels:
    """The attention kernels of one shape, for each architecture that an engine is built for. Equal are one object's."""

    shape: KernelShape
    compiled: tuple[CompiledKernel, ...]

    @cached_property
    def archive(self) -> bytes:
        """All that a launch needs, as bytes that are equal for equal kernels: lines of JSON, then the cubins."""
        records = [
            {
                **{name: value for name, value in dataclasses.asdict(kernel).items() if name not in ("cubin", "ptx")},
                "cubin_bytes": len(kernel.cubin),
            }
            for kernel in self.compiled
        ]
        parts = (dataclasses.asdict(self.shape), records)
        header = "".join(json.dumps(part, sort_keys=True) + "\n" for part in parts).encode()
        return MAGIC + header + b"".join(kernel.cubin for kernel in self.compiled)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()

    @property
    def architectures(self) -> tuple[int, ...]:
        return tuple(sorted({kernel.architecture for kernel in self.compiled}))

    def fitting(self, architecture: int) -> int:
        """Return whose kernels run on a device of ``architecture`` (89 = compute capability 8.9).

        Code of 8.x runs on a later 8.y as well. Raises: ArtifactError where there is none.
        """
        fitting = find_fitting(self.architectures, architecture)
        if fitting is None:
            built = ", ".join(map(str, self.architectures))
            rule, cure = f"runs on a GPU of one of the architectures {built}", "add it to engine.compute_capabilities"
            raise ArtifactError("engine", rule, f"a GPU of {architecture}", f"{cure} and {_AGAIN}")
        return fitting

    def find(self, name: str, architecture: int) -> CompiledKernel:
        """Return the kernel ``name`` of one of the ``architectures``."""
        return next(kernel for kernel in self.compiled if (kernel.name, kernel.architecture) == (name, architecture))

    def workspace_bytes(self, num_tokens: int, num_sequences: int, max_blocks: int) -> int:
        """Return the bytes of scratch memory that calls of these sizes at most need, on any of the architectures."""
        sizes = (
            workspace_bytes(self.shape, kernel.configuration, num_tokens, num_sequences, max_blocks)
            for kernel in self.compiled
        )
        return max(sizes)

    def check_shape(self, shape: KernelShape, layer: str) -> None:
        """Raise BuildError where a layer is of another shape than the kernels."""
        if shape != self.shape:
            raise BuildError(layer, f"has the shape of the kernels, {self.shape}", shape, _AGAIN)


def read_archive(archive: bytes) -> PluginKernels:
    """Read what ``PluginKernels.archive`` wrote; PTX is not in it.

    Raises: ArtifactError for anything else.
    """
    try:
        magic, shape, records, cubins = archive.split(b"\n", 3)
        if magic + b"\n" != MAGIC:
            raise ValueError(f"bytes that begin with {magic[:20]!r}")
        compiled, position = [], 0
        for record in json.loads(records):
            num_bytes = record.pop("cubin_bytes")
            for name in ("arguments", "argument_types"):
                record[name] = tuple(record[name])
            record["configuration"] = KernelConfiguration(**record["configuration"])
            cubin = cubins[position : position + num_bytes]
            compiled.append(CompiledKernel(**record, cubin=cubin, ptx=""))
            position += num_bytes
        if position != len(cubins):
            raise ValueError(f"{len(cubins)} bytes of code instead of {position}")
        return PluginKernels(KernelShape(**json.loads(shape)), tuple(compiled))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError("plugin TreeAttention", "reads the kernels it was built with", error, _AGAIN) from error


def compile_plugin_kernels(shape: KernelShape, architectures: Sequence[int], cache: Path) -> PluginKernels:
    """Compile the attention kernels of ``shape`` for each of ``architectures``; ``cache`` keeps them.

    Raises: what ``compile_kernels`` raises; BuildError where a kernel asks for what a call of the plugin has not.
    """
    compiled = compile_kernels(shape, architectures, cache)
    kernels = PluginKernels(shape, tuple(kernel for kernel in compiled if kernel.name in ATTENTION_KERNELS))
    for kernel in kernels.compiled:
        unknown = [name for name in kernel.arguments if name not in KERNEL_ARGUMENTS]
        if unknown:
            rule = f"asks for what a call of the plugin has: {', '.join(sorted(KERNEL_ARGUMENTS))}"
            raise BuildError(f"kernel {kernel.name}", rule, ", ".join(unknown), "let plugin and kernels agree")
    return kernels


def kernels_of_window(kernels: Sequence[PluginKernels], window: int) -> PluginKernels:
    """Return those of a network's kernels that are for layers with ``window``.

    Where there are none, the first: the layer's shape is checked against theirs.
    """
    return next((own for own in kernels if own.shape.window == window), kernels[0])


@dataclass
class KernelShelf:
    """Kernels by hash, for all plugins of a process.

    Of the layers of an engine that run the same kernels only one carries their archive, whichever is serialised first;
    ``carriers`` has its name by their hash.
    """

    by_hash: dict[str, PluginKernels] = field(default_factory=dict)
    carriers: dict[str, str] = field(default_factory=dict)

    def put(self, kernels: PluginKernels) -> str:
        """Keep ``kernels``; return their hash."""
        self.by_hash.setdefault(kernels.sha256, kernels)
        return kernels.sha256

    def find(self, sha256: str) -> PluginKernels:
        """Return the kernels of a hash. Raises: ArtifactError where no layer of an engine brought them."""
        if sha256 not in self.by_hash:
            rule = "one layer of an engine carries the kernels"
            raise ArtifactError("plugin TreeAttention", rule, f"none with the hash {sha256[:12]}", _AGAIN)
        return self.by_hash[sha256]

    def is_carrier(self, layer: str, sha256: str) -> bool:
        """Tell whether ``layer`` carries the archive of its kernels; the first to be asked about does."""
        return self.carriers.setdefault(sha256, layer) == layer
