"""What is no Python module is found in a checkout and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from draftline.share import share_path

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("model_repo", "pipelines", "plugins")


def test_a_checkout_has_them_at_its_top() -> None:
    assert [share_path(name) for name in FOLDERS] == [REPOSITORY / name for name in FOLDERS]  # type: ignore[arg-type]


def test_a_wheel_has_them_inside(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("draftline-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    share = installed / "draftline" / "share"
    for name in FOLDERS:
        expected = [path for path in sorted((REPOSITORY / name).rglob("*")) if path.is_file()]
        expected = [path for path in expected if "__pycache__" not in path.parts]
        assert {path.relative_to(REPOSITORY) for path in expected} <= {
            path.relative_to(share) for path in share.rglob("*")
        }, name
    script = (
        "import sys; from draftline.share import share_path; from draftline.cli import main; "
        "print(share_path('plugins')); "
        "sys.exit(main(['validate', str(share_path('pipelines') / 'smollm2-135m.yaml')]))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == str(share / "plugins")
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: numpy<2,>=1.26" in metadata
