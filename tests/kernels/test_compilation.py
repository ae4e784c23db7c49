"""Kernels are compiled here, without a GPU: what comes out, and the cache."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import draftline.kernels.compiler
import draftline.kernels.instructions
from draftline.errors import ArtifactError, BuildError, MissingPackageError
from draftline.kernels import cache as kernel_cache
from draftline.kernels import source
from draftline.kernels.arguments import QUICK
from draftline.kernels.cases import load_contract
from draftline.kernels.compilation import ARCHITECTURES, compile_kernels
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.compiler import compile_kernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import SHARED_BYTES
from draftline.kernels.report import main
from draftline.kernels.shape import KernelConfiguration, KernelShape

CONTRACT = load_contract()
SHAPE = KernelShape(32, 8, 64, 16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def kernels(cache: Path) -> tuple[CompiledKernel, ...]:
    return compile_kernels(SHAPE, ARCHITECTURES, cache)


def test_examples() -> None:
    for module in (draftline.kernels.compiler, draftline.kernels.instructions):
        assert doctest.testmod(module).failed == 0


def test_every_architecture_has_every_kernel_without_spills(kernels: tuple[CompiledKernel, ...]) -> None:
    assert [(kernel.architecture, kernel.name) for kernel in kernels] == [
        (architecture, name) for architecture in ARCHITECTURES for name in CONTRACT["kernels"] if name != QUICK
    ]
    for kernel in kernels:
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.entry.encode() in kernel.cubin
        assert f".target sm_{kernel.architecture}" in kernel.ptx
        assert kernel.spill_bytes == 0
        assert 0 < kernel.num_registers <= 255


@pytest.mark.parametrize(("head_size", "architecture"), [(96, 80), (128, 90)])
def test_a_softcap_spills_nothing(head_size: int, architecture: int) -> None:
    """Heads of 96 would on 8.0, with the tile that they have without."""
    shape = KernelShape(32, 8, head_size, 16, softcap=50.0)
    kernel = compile_kernel("tree_attention", shape, default_configuration(shape, architecture), architecture)
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize(("window", "architecture"), [(0, 100), (128, 80)])
def test_sinks_spill_nothing(window: int, architecture: int) -> None:
    """Of gpt-oss's layers; the first would on 10.0 with two stages, as without sinks."""
    shape = KernelShape(64, 8, 64, 16, "bfloat16", "bfloat16", window, has_sinks=True)
    kernel = compile_kernel("tree_attention", shape, default_configuration(shape, architecture), architecture)
    assert kernel.spill_bytes == 0


def test_arguments_are_those_of_the_contract(kernels: tuple[CompiledKernel, ...]) -> None:
    """And the PTX has as many parameters, of these sizes."""
    sizes = {"pointer": ".u64", "int64": ".u64", "int32": ".u32", "float32": ".f32"}
    for kernel in kernels:
        declared = [(argument["name"], argument["type"]) for argument in CONTRACT["kernels"][kernel.name]]
        scratch = [("global_scratch", "pointer"), ("profile_scratch", "pointer")]
        assert list(zip(kernel.arguments, kernel.argument_types, strict=True)) == declared + scratch
        entry = kernel.ptx[kernel.ptx.index(".entry") : kernel.ptx.index(".reqntid")]
        assert re.findall(r"\.param (\.\w+)", entry) == [sizes[kind] for kind in kernel.argument_types]
        assert f".reqntid {32 * kernel.num_warps}" in kernel.ptx


def test_no_path_of_this_machine_is_inside(kernels: tuple[CompiledKernel, ...]) -> None:
    for kernel in kernels:
        assert str(source.source_path()).encode() not in kernel.cubin
        assert str(source.source_path()) not in kernel.ptx


def test_a_kernel_in_the_cache_is_not_compiled_again(
    kernels: tuple[CompiledKernel, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> CompiledKernel:
        raise AssertionError(f"compiled {arguments}")

    monkeypatch.setattr(kernel_cache, "compile_kernel", fail)
    assert compile_kernels(SHAPE, ARCHITECTURES, cache) == kernels
    assert not list(cache.glob("*.partial-*"))
    with pytest.raises(AssertionError, match="compiled"):
        compile_kernels(KernelShape(32, 8, 64, 32), [80], cache)


def test_another_source_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = KernelConfiguration(64, 64, 256, 32, 16, 64, 4, 2)
    key = kernel_cache.kernel_key("commit_rows", SHAPE, configuration, 80)
    assert key == kernel_cache.kernel_key("commit_rows", SHAPE, configuration, 80)
    assert key != kernel_cache.kernel_key("commit_rows", SHAPE, configuration, 86)
    monkeypatch.setattr(kernel_cache, "source_hash", lambda: "of another source")
    assert key != kernel_cache.kernel_key("commit_rows", SHAPE, configuration, 80)


def test_a_damaged_file_in_the_cache_is_refused(
    kernels: tuple[CompiledKernel, ...], cache: Path, tmp_path: Path
) -> None:
    for path in cache.glob("commit_rows-sm_80-*.json"):
        (tmp_path / path.name).write_text(path.read_text().replace(".reqntid", ".reqntld", 1))
    for path in cache.glob("tree_attention*-sm_80-*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    with pytest.raises(
        ArtifactError, match=r"commit_rows-sm_80-.*: holds a whole kernel; got a damaged file; remove it"
    ):
        compile_kernels(SHAPE, [80], tmp_path)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(BuildError, match="architecture is one of 80, 86, 89, 90, 100, 120; got 75"):
        compile_kernels(SHAPE, [80, 75])


def test_too_much_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARED_BYTES, 80, 100)
    with pytest.raises(BuildError, match="commit_rows for sm_80: a block has 100 bytes of shared memory at most; got"):
        compile_kernel("commit_rows", SHAPE, default_configuration(SHAPE, 80), 80)


def test_the_report_shows_what_was_compiled(
    kernels: tuple[CompiledKernel, ...], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--variants", "float16", "--head-sizes", "64", "--architectures", "80,90", "--cache", str(cache)]
    assert main(options) == 0
    header, _, *lines, verdict = capsys.readouterr().out.splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    rows = [dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)) for line in lines]
    attention = rows[0]
    assert (attention["kernel"], attention["sm"], attention["head"]) == ("tree_attention", "80", "64")
    assert int(attention["registers"]) == kernels[0].num_registers
    assert int(attention["products"]) > 0
    assert int(attention["local"]) == 0
    assert rows[2]["products"] == "0"
    assert verdict == "0 of these kernels spill registers."


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("draftline.kernels.source.importlib.import_module", missing)
    with pytest.raises(MissingPackageError, match=r'the package triton.*pip install "draftline\[kernels\]"'):
        source.import_triton()
