"""What is no Python module is found in a checkout and in a wheel: shared folders, and the native library."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from draftline.share import share_path

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("model_repo", "pipelines", "plugins")
LIBRARY = "draftline/sessions/cpu_kernels.so"


def build(directory: Path, *options: str, **environment: str) -> Path:
    """Build a source distribution or a wheel, or a wheel from a source distribution, and return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), *options]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ, **environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("draftline-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"), "-C", "wheel.cmake=true")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(installed: Path, program: str) -> list[str]:
    # -S: an editable installation in this environment would redirect the imports.
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(installed), *sys.path]!r}; {program}"]
    done = subprocess.run(command, cwd=installed.parent, env={}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_checkout_has_them_at_its_top() -> None:
    assert [share_path(name) for name in FOLDERS] == [REPOSITORY / name for name in FOLDERS]  # type: ignore[arg-type]


def test_a_wheel_by_way_of_the_source_distribution_has_them_inside(installed: Path) -> None:
    share = installed / "draftline" / "share"
    for name in FOLDERS:
        expected = [path for path in sorted((REPOSITORY / name).rglob("*")) if path.is_file()]
        expected = [path for path in expected if "__pycache__" not in path.parts]
        assert {path.relative_to(REPOSITORY) for path in expected} <= {
            path.relative_to(share) for path in share.rglob("*")
        }, name
    lines = run_installed(
        installed,
        "from draftline.share import share_path; from draftline.cli import main; print(share_path('plugins')); "
        "sys.exit(main(['validate', str(share_path('pipelines') / 'smollm2-135m.yaml')]))",
    )
    assert lines[0] == str(share / "plugins")


def test_trained_drafts_stay_in_the_repository(wheel: Path) -> None:
    (source,) = wheel.parent.glob("draftline-*.tar.gz")
    with tarfile.open(source) as archive:
        files = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    with zipfile.ZipFile(wheel) as built:
        files += map(Path, built.namelist())
    assert Path("draftline/checkpoints/drafts/eagle.py") in files
    assert not [
        file for file in files if file.parts[:1] == ("drafts",) or file.parts[:3] == ("draftline", "share", "drafts")
    ]


def test_a_wheel_is_for_one_platform_and_every_python(wheel: Path, installed: Path) -> None:
    assert "-py3-none-linux_" in wheel.name
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: numpy<2,>=1.26" in metadata
    assert "License-File: LICENSE" in metadata


def test_a_wheel_finds_the_native_library_that_it_carries(installed: Path) -> None:
    program = "from draftline.sessions.native_kernels import find_library; print(find_library())"
    assert run_installed(installed, program) == [str(installed / LIBRARY)]


def test_without_a_compiler_the_wheel_has_all_but_the_library(wheel: Path, tmp_path: Path) -> None:
    bare = build(tmp_path, "--wheel", CXX="/bin/false")
    assert bare.name.endswith("-py3-none-any.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) - set(zipfile.ZipFile(bare).namelist()) == {LIBRARY}
