"""Which kernels an engine is built for, and what is said where the library is not to be had."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from draftline.errors import ArtifactError, BuildError
from draftline.sessions import native_kernels
from draftline.sessions.engine_config import load_engine_config, write_engine_config
from draftline.sessions.native_kernels import choose_kernels, describe_kernels, find_library
from draftline.sessions.opening import open_session
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(params=["none", "one that does not load", "a processor with neither AVX2 nor NEON"])
def reason(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine without native operators, and why they are missing."""
    found = find_library()
    damaged = tmp_path / "cpu_kernels.so"
    damaged.write_bytes(b"MZ")
    path = {"none": None, "one that does not load": damaged}.get(request.param, found)
    monkeypatch.setattr(native_kernels, "find_library", lambda: path)
    if path is found:
        monkeypatch.setattr(native_kernels, "_load", lambda path: (None, request.param))
    assert isinstance(request.param, str)
    return request.param


def test_auto_takes_what_there_is() -> None:
    assert choose_kernels("auto") == choose_kernels("native") == "native"
    assert choose_kernels("onnxruntime") == "onnxruntime"


def test_auto_falls_back_and_native_does_not(reason: str) -> None:
    assert choose_kernels("auto") == choose_kernels("onnxruntime") == "onnxruntime"
    with pytest.raises(BuildError, match=rf"engine\.kernels: native needs .*; got {re.escape(reason)}.*C\+\+ compiler"):
        choose_kernels("native")
    assert describe_kernels("auto") == "no native library"


def test_another_library_asks_for_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library()
    assert library is not None
    before = describe_kernels("auto")
    assert before == describe_kernels("native")
    other = Path(shutil.copy(library, tmp_path / "other.so"))
    monkeypatch.setattr(native_kernels, "find_library", lambda: other)
    assert describe_kernels("auto") == before
    with other.open("ab") as file:
        file.write(b"\0")
    assert describe_kernels("auto") != before
    assert describe_kernels("onnxruntime") == "onnxruntime"


def test_a_native_engine_is_refused_where_its_operators_are_missing(tmp_path: Path, reason: str) -> None:
    engine = build_tiny_engine(tmp_path, write_tiny_checkpoint(tmp_path / "checkpoint"), kernels="onnxruntime")
    write_engine_config(engine, replace(load_engine_config(engine), kernels="native"))
    rule = "an engine of native kernels needs the compiled library"
    with pytest.raises(ArtifactError, match=rf"{rule}; got {re.escape(reason)}.*; install draftline from a wheel"):
        open_session(engine, load_engine_config(engine))
