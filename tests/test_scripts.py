"""The scripts are thin, say how they are used, and refuse what they cannot do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_is_thin_and_executable(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#!/usr/bin/env ")
    assert lines[1].startswith("# ") or lines[1].startswith('"""')
    assert len(lines) <= 40
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_from_any_folder(script: Path, tmp_path: Path) -> None:
    answer = run(script, "--help", cwd=tmp_path)
    assert answer.returncode == 0
    assert re.match(rf"usage: (scripts/)?{script.name}\b", answer.stdout + answer.stderr)
    assert not any(tmp_path.iterdir())


def test_unsuitable_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    answer = run(ROOT / "scripts" / "environment", tmp_path / "environment", "dev", old)
    assert answer.returncode == 2
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"scripts/environment: needs Python 3.10 to 3.12 with venv and pip; got {old}; install one")
    assert not (tmp_path / "environment").exists()


def test_release_refuses_a_version_without_a_date(tmp_path: Path) -> None:
    for name in ("scripts/release", "CHANGELOG.md", "draftline/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    development = tmp_path / "scripts" / "development"
    development.write_text(f"#!/bin/sh\necho {sys.executable}\n")
    development.chmod(0o755)
    (tmp_path / "CHANGELOG.md").write_text("## [0.1.0] - unreleased\n")
    (tmp_path / "draftline" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")

    def release() -> str:
        answer = run(tmp_path / "scripts" / "release", env=environment)
        assert answer.returncode == 1
        return answer.stderr

    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Start"]):
        assert run(*git, *command, cwd=tmp_path).returncode == 0
    assert "got no line '## [0.1.0] - YYYY-MM-DD'" in release()
    (tmp_path / "CHANGELOG.md").write_text("## [0.1.0] - 2026-01-31\n")
    assert "every change is committed" in release()
    assert run(*git, "commit", "-q", "-am", "Date it", cwd=tmp_path).returncode == 0
    assert run(*git, "tag", "v0.1.0", cwd=tmp_path).returncode == 0
    assert "got the tag v0.1.0 already" in release()
