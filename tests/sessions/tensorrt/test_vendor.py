"""Which vendors there are, and what is said where one is absent or too old."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from draftline.errors import BuildError, MissingPackageError
from draftline.sessions.tensorrt import plan_builder
from draftline.sessions.tensorrt.plan_builder import choose_architectures
from draftline.sessions.tensorrt.vendor import VENDORS, Vendor, import_vendor
from tests.sessions.tensorrt.plans import rtx

COMPILED_FOR = (80, 86, 89, 90, 100, 120)


class FakeDriver:
    def architecture(self, device: int) -> int:
        return {0: 90}[device]


def test_the_installed_vendor_is_recent() -> None:
    assert rtx().title.startswith("TensorRT-RTX 1.7")
    assert rtx().dtype_names[rtx().module.DataType.HALF] == "float16"


def test_an_absent_package_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingPackageError, match=r"engine.backend: tensorrt: .*pip install 'tensorrt-cu13>=10.14'"):
        import_vendor.__wrapped__("tensorrt")


@pytest.mark.parametrize("version", ["10.13.2", "9.9", "no version"])
def test_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("tensorrt")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(BuildError, match=f"needs TensorRT 10.14 or later; got {version}; "):
        import_vendor.__wrapped__("tensorrt")


def test_rtx_builds_for_all_that_is_known_or_for_what_is_asked() -> None:
    assert choose_architectures(rtx(), (), COMPILED_FOR) == (80, 86, 89, 120)
    assert choose_architectures(rtx(), (89,), COMPILED_FOR) == (89,)
    with pytest.raises(BuildError, match=r"TensorRT-RTX builds for 75, 80, 86, 89, 120, 121; got 90; .*tensorrt"):
        choose_architectures(rtx(), (89, 90), COMPILED_FOR)


def test_tensorrt_builds_for_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = Vendor("tensorrt", ModuleType("tensorrt"), VENDORS["tensorrt"])
    monkeypatch.setattr(plan_builder, "load_driver", lambda: None)
    with pytest.raises(BuildError, match=r"engine.backend: tensorrt: .*; got no GPU; .*tensorrt_rtx"):
        choose_architectures(vendor, (), COMPILED_FOR)
    monkeypatch.setattr(plan_builder, "load_driver", FakeDriver)
    assert choose_architectures(vendor, (), COMPILED_FOR) == (90,)
    with pytest.raises(BuildError, match=r"an engine with these weights runs on 80, 86; got 90; "):
        choose_architectures(vendor, (), (80, 86))
