"""Imports go down the floors only."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.stages.code import PACKAGE, imported_modules

FLOORS = {
    "draftline.errors": 0,
    "draftline.config": 0,
    "draftline.manifest": 0.1,
    "draftline.share": 0,
    "draftline.whole_file": 0,
    "draftline.tree": 1,
    "draftline.choices": 1,
    "draftline.speculation": 1.1,
    "draftline.draft_trees": 1.1,
    "draftline.tree_pruning": 1.2,
    "draftline.tree_growth": 1.3,
    "draftline.acceptance": 1.2,
    "draftline.logit_edits": 1.1,
    "draftline.logit_rules": 1.2,
    "draftline.block_pool": 1,
    "draftline.sampling": 1,
    "draftline.quantization": 1,
    "draftline.oracle": 1,
    "draftline.gpu_quantization": 1.1,
    "draftline.checkpoints": 2,
    "draftline.kernels": 2,
    "draftline.graphs": 3,
    "draftline.ops": 3,
    "draftline.sessions": 4,
    "draftline.runtime": 5,
    "draftline.generation": 5.5,
    "draftline.triton": 6,
    "draftline.stages": 7,
    "draftline.bench": 7,
    "draftline.training": 7.5,
    "draftline.cli": 8,
    "draftline.__main__": 9,
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part(module: str) -> str:
    return ".".join(module.split(".")[:2])


def module_name(path: Path) -> str:
    parts = ["draftline", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    here = part(module_name(path))
    assert here in FLOORS, f"{here} needs a floor"
    for module in imported_modules(path):
        there = part(module)
        if there in ("draftline", "draftline.errors", here):  # "draftline" is the version
            continue
        assert FLOORS[there] < FLOORS[here], f"{module_name(path)} imports {module}, which is not below it"
        if here == "draftline.runtime":
            assert FLOORS[there] < 2 or module == "draftline.sessions.protocol", f"the runtime imports {module}"
