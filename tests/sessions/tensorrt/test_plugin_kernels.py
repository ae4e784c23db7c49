"""The archive of kernels that a plugin carries, and which of them a GPU runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import ArtifactError, BuildError
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt import plugin_kernels
from draftline.sessions.tensorrt.plugin_kernels import (
    ATTENTION_KERNELS,
    KERNEL_ARGUMENTS,
    KernelShelf,
    compile_plugin_kernels,
    read_archive,
)
from tests.sessions.tensorrt.plans import fake_kernels

SHAPE = KernelShape(9, 3, 64, 16)


def test_an_archive_holds_all_but_ptx() -> None:
    kernels = fake_kernels(SHAPE, (80, 89, 120))
    read = read_archive(kernels.archive)
    assert (read.shape, read.compiled) == (kernels.shape, kernels.compiled)
    assert read.sha256 == kernels.sha256
    assert read.architectures == (80, 89, 120)


def test_other_kernels_have_another_hash() -> None:
    hashes = [
        fake_kernels(SHAPE).sha256,
        fake_kernels(SHAPE, (80,)).sha256,
        fake_kernels(KernelShape(4, 2, 64, 16)).sha256,
    ]
    assert len(set(hashes)) == 3
    assert fake_kernels(SHAPE).sha256 == hashes[0]


@pytest.mark.parametrize(
    "damage", [lambda a: a[:-1], lambda a: a + b"x", lambda a: b"x" + a, lambda a: b"", lambda a: a[:40]]
)
def test_a_damaged_archive_is_refused(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ArtifactError, match=r"reads the kernels it was built with"):
        read_archive(damage(fake_kernels(SHAPE).archive))


@pytest.mark.parametrize(
    ("built", "device", "expected"),
    [
        ((80, 86, 89), 89, 89),
        ((80,), 89, 80),
        ((80, 86), 87, 86),
        ((90, 120), 120, 120),
    ],
)
def test_code_runs_on_its_generation(built: tuple[int, ...], device: int, expected: int) -> None:
    assert fake_kernels(SHAPE, built).fitting(device) == expected


@pytest.mark.parametrize(("built", "device"), [((80, 120), 90), ((86,), 80), ((120,), 121), ((90,), 100)])
def test_a_gpu_without_code_is_named(built: tuple[int, ...], device: int) -> None:
    with pytest.raises(ArtifactError, match=f"got a GPU of {device}; add it to engine.compute_capabilities"):
        fake_kernels(SHAPE, built).fitting(device)


def test_a_shelf_names_one_carrier_and_knows_kernels_by_hash() -> None:
    shelf, kernels = KernelShelf(), fake_kernels(SHAPE)
    assert [shelf.is_carrier(layer, "00") for layer in ("b", "a", "b")] == [True, False, True]
    assert [shelf.is_carrier(layer, "01") for layer in ("a", "b")] == [True, False], "of other kernels"
    with pytest.raises(ArtifactError, match=f"none with the hash {kernels.sha256[:12]}"):
        shelf.find(kernels.sha256)
    assert shelf.find(shelf.put(kernels)) is kernels


def test_kernels_may_ask_for_what_a_call_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of the real kernels are among those of a call; a new one is found when kernels are compiled."""
    from draftline.kernels.arguments import SIGNATURES

    for name in ATTENTION_KERNELS:
        assert set(SIGNATURES[name]) <= KERNEL_ARGUMENTS
    compiled = fake_kernels(SHAPE).compiled
    monkeypatch.setattr(plugin_kernels, "compile_kernels", lambda *arguments: compiled)
    assert compile_plugin_kernels(SHAPE, (80, 120), tmp_path).compiled == compiled
    monkeypatch.setattr(plugin_kernels, "KERNEL_ARGUMENTS", KERNEL_ARGUMENTS - {"num_sections"})
    with pytest.raises(BuildError, match=r"kernel tree_attention: .*; got num_sections; "):
        compile_plugin_kernels(SHAPE, (80, 120), tmp_path)
