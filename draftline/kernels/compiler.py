"""One kernel from the Triton language to PTX and cubin."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from types import ModuleType

from draftline.errors import BuildError
from draftline.kernels.arguments import ARGUMENT_TYPES, compiler_options, constants, signature
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.devices import SHARED_BYTES
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import import_triton, load_kernel

# What Triton adds to every kernel: scratch memory that none of ours asks for.
SCRATCH = ("global_scratch", "profile_scratch")
POINTER_ALIGNMENT = 16  # bytes, of every pointer that is passed: loads of whole vectors rely on it


def compile_kernel(
    name: str, shape: KernelShape, configuration: KernelConfiguration, architecture: int
) -> CompiledKernel:
    """Compile one kernel; see ``compile_kernels``."""
    triton = import_triton()
    if triton.knobs.runtime.interpret:
        where, rule = "TreeAttention kernel", "kernels are compiled by a process that does not interpret them"
        raise BuildError(where, rule, "TRITON_INTERPRET is set", "unset it")
    kernel = load_kernel(name)
    types, fixed = signature(name, shape), constants(name, shape, configuration)
    source = triton.compiler.ASTSource(
        kernel,
        {argument: types.get(argument, "constexpr") for argument in kernel.arg_names},
        fixed,
        {
            (kernel.arg_names.index(argument),): [["tt.divisibility", POINTER_ALIGNMENT]]
            for argument, kind in types.items()
            if kind.startswith("*")
        },
    )
    options = {**compiler_options(name, configuration), "enable_fp_fusion": True}
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    with _assembler_log(triton) as log:
        compiled = triton.compile(source, target=target, options=options)
    most = SHARED_BYTES[architecture]
    if compiled.metadata.shared > most:
        where, rule = f"{name} for sm_{architecture}", f"a block has {most} bytes of shared memory at most"
        raise BuildError(where, rule, compiled.metadata.shared, "take smaller tiles or fewer stages")
    registers, spills = read_assembler_log(log.getvalue())
    return CompiledKernel(
        name=name,
        architecture=architecture,
        entry=compiled.metadata.name,
        cubin=compiled.asm["cubin"],
        ptx=compiled.asm["ptx"],
        shared_bytes=compiled.metadata.shared,
        num_warps=options["num_warps"],
        num_registers=registers,
        spill_bytes=spills,
        arguments=(*types, *SCRATCH),
        argument_types=(
            *("pointer" if kind.startswith("*") else ARGUMENT_TYPES[kind] for kind in types.values()),
            *("pointer" for _ in SCRATCH),
        ),
        configuration=configuration,
    )


def read_assembler_log(log: str) -> tuple[int, int]:
    """Return registers of a thread, and bytes that it spills (stores and loads), as ``ptxas -v`` says.

    >>> read_assembler_log("0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads; Used 255 registers")
    (255, 12)
    """
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        where, rule = "TreeAttention kernel", "the assembler tells registers and spills"
        raise BuildError(where, rule, log[:200] or "nothing", "report it with the version of the package triton")
    return int(registers[1]), int(spills[1]) + int(spills[2])


@contextlib.contextmanager
def _assembler_log(triton: ModuleType) -> Iterator[io.StringIO]:
    """Collect what Triton prints of its assembler's log, with a cache of Triton's own that is empty and thrown away."""
    log = io.StringIO()
    knobs = triton.knobs
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.nvidia.scope(),
        knobs.cache.scope(),
        knobs.compilation.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # paths of this machine, and most of the size
        yield log
