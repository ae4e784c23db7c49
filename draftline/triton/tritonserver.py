"""The ``tritonserver`` program: where it is, and the surroundings it needs.

Two sources: a Triton container or installation (``tritonserver`` on PATH), or the PyPI package ``nvidia-pytriton``,
which bundles the binary without its surroundings: those are arranged here in a private directory.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from draftline.errors import MissingPackageError, ServerError

PYTHON_VERSIONS = ((3, 10), (3, 11), (3, 12))  # the bundle has stubs for more, but those need numpy 2 or lack features


@dataclass(frozen=True)
class TritonProgram:
    """A command line prefix and the environment to run it in."""

    arguments: list[str]
    environment: dict[str, str]


def find_tritonserver(run_directory: Path) -> TritonProgram:
    """Find the program; what it needs is written into ``run_directory`` (private, removed by the caller).

    **Raises** MissingPackageError without a server, ServerError for a Python or numpy its Python backend cannot load.
    """
    # The Python backend's stub takes its packages from the first python3 on PATH: it must be this very environment.
    environment = dict(
        os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonProgram([on_path], environment)
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        raise MissingPackageError(
            "serve", "needs tritonserver on PATH or in nvidia-pytriton", "neither", "pip install 'draftline[triton]'"
        )
    _check_python()
    root = Path(package.submodule_search_locations[0])
    backend_directory = _arrange_backend(root / "tritonserver", run_directory)
    libraries = [
        root.parent / "nvidia_pytriton.libs",  # copies of the backend lose their relative library path
        *_find_libpython(),
    ]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, libraries), *([inherited] if inherited else [])])
    binary = root / "tritonserver" / "bin" / "tritonserver"
    caches = root / "tritonserver" / "caches"
    return TritonProgram(
        [str(binary), f"--backend-directory={backend_directory}", f"--cache-directory={caches}"], environment
    )


def _check_python() -> None:
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        found = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ServerError("serve", "the bundled Triton needs Python 3.10 to 3.12", found, "use one of these")
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        # With numpy 2 models load and then send empty tensors.
        raise ServerError("serve", "the bundled Triton needs numpy < 2", numpy_version, "pip install 'numpy<2'")


def _find_libpython() -> list[Path]:
    """Return the folders of this Python's shared library, none where the system's linker knows one.

    Without it the stub does not start, and the server waits for it in silence.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folders = [Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix), Path(sys.base_prefix) / "lib"]
    found = [folder for folder in dict.fromkeys(folders) if (folder / f"libpython{version}.so.1.0").exists()]
    # Ours comes first: the system's would be taken silently, with our standard library.
    if not found and ctypes.util.find_library(f"python{version}") is None:
        cure = f"install libpython{version} or a Python built with --enable-shared"
        raise ServerError("serve", "Triton needs Python's shared library", f"none in {folders[0]}", cure)
    return found


def _arrange_backend(bundle: Path, run_directory: Path) -> Path:
    """Copy the Python backend and this Python's stub together, and show the stub this very draftline package."""
    backend = run_directory / "backends" / "python"
    backend.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy2(bundle / "backends" / "python" / name, backend / name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = "triton_python_backend_stub"
    shutil.copy2(bundle / "python_backend_stubs" / version / stub, backend / stub)
    # The stub ignores PYTHONPATH but searches its backend's folder: a checkout serves itself without installation.
    (backend / "draftline").symlink_to(Path(__file__).resolve().parent.parent, target_is_directory=True)
    return backend.parent
