"""What docs/cpu.md says: its numbers are those of docs/bench/cpu.json, its blocks validate and run, its names exist."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import onnx
import pytest

from draftline.bench.cpu_page import NUMBERS, PAGES, fill_page
from draftline.bench.report import load_report
from draftline.config import load_pipeline
from draftline.config.schema import Check, Engine, KvCache
from draftline.graphs.onnx_graph import DRAFTLINE
from draftline.sessions.native_kernels import CURE, Kernels, find_library, instruction_set
from draftline.stages.perplexity_text import PASSAGES
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
ENGINE = "builds/smollm2-135m/engine"
ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "gemma", "mixtral")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_numbers_are_those_of_the_run(page: Path) -> None:
    """``python -m draftline.bench.cpu_page`` writes them anew."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- cpu.json: " in text
    assert text == fill_page(text, load_report(NUMBERS) if NUMBERS.exists() else None)


def test_perplexities_are_those_of_the_log() -> None:
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:float32|int\d), float\d+ \|.*$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        name, *numbers = [cell.strip() for cell in row.strip("|").split("|")]
        (line,) = [line for line in log.splitlines() if line.startswith(f"| {name} | ")]
        assert all(number in line for number in numbers), name


@pytest.mark.parametrize("block", find_blocks("yaml"))
def test_blocks_of_pipelines_are_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "my-model.yaml"
    file.write_text(f"name: my-model\ntarget: {{checkpoint: checkpoints/my-model}}\n{block}", encoding="utf-8")
    load_pipeline(file, [])


def test_fields_exist() -> None:
    blocks = {"engine": Engine, "kv_cache": KvCache, "check": Check}
    named = re.findall(r"`(engine|kv_cache|check)\.(\w+)\b", PAGE)
    assert len(named) > 10
    for block, field in named:
        assert field in blocks[block].model_fields or field == "json", f"{block}.{field}"


def test_operators_are_those_of_the_graphs(tmp_path: Path) -> None:
    """Every native operator of an engine is in the tables, and none that no engine has; portable ones likewise."""
    used: dict[str, set[str]] = {}
    for architecture, kernels, dtype in itertools.product(ARCHITECTURES, get_args(Kernels), ("float32", "int8")):
        folder = tmp_path / f"{architecture}-{kernels}-{dtype}"
        checkpoint = write_tiny_checkpoint(folder / "checkpoint", architecture=architecture)
        engine = build_tiny_engine(folder, checkpoint, kernels=kernels, weights_dtype=dtype)
        nodes = onnx.load(engine / "model.onnx", load_external_data=False).graph.node
        used.setdefault(kernels, set()).update(node.op_type for node in nodes)
        used.setdefault(DRAFTLINE, set()).update(node.op_type for node in nodes if node.domain == DRAFTLINE)
    tables = PAGE.split("## What a step is made of")[1].split("## ")[0]
    rows = [line.split("|")[2:4] for line in tables.splitlines() if line.startswith("| ")]
    native, portable = ({name for row in rows for name in re.findall(r"`(\w+)`", row[side])} for side in range(2))
    assert native - {"TopCandidates"} <= used["native"]
    assert used[DRAFTLINE] <= native
    assert portable - {"LogSoftmax", "TopK"} <= used["onnxruntime"]


def test_lines_of_stages_are_the_real_ones() -> None:
    source = (ROOT / "draftline" / "stages" / "build.py").read_text(encoding="utf-8")
    (line,) = re.findall(r"^build: (no native .*)$", PAGE, re.MULTILINE)
    said = re.search(r'call\.say\(f"(no native .*)"\)', source)
    assert said is not None
    assert line == said[1].replace("{why_not_native()}", "none").replace("{CURE}", CURE)
    assert len(PASSAGES) == 5
    assert "text of five registers" in PAGE


def test_sections_are_those_of_the_benchmark() -> None:
    from draftline.bench.cpu import SECTIONS

    assert (
        tuple(re.findall(r"^\| `(\w+)` \| ", PAGE.split("| section |")[1], re.MULTILINE)[: len(SECTIONS)]) == SECTIONS
    )
    for named in re.findall(r"--sections (\S+)", PAGE):
        assert set(named.split(",")) <= set(SECTIONS)


def test_instruction_sets_are_those_that_are_compiled() -> None:
    cmake = (ROOT / "plugins" / "CMakeLists.txt").read_text(encoding="utf-8")
    compiled = [name for names in re.findall(r"set\(instruction_sets ([\w ]+)\)", cmake) for name in names.split()]
    table = PAGE.split("| instruction set |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == compiled


def test_command_names_the_library() -> None:
    (command,) = re.findall(r"^python (-c .*)$", PAGE, re.MULTILINE)
    run = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == f"{find_library()} {instruction_set()}\n", run.stderr


def test_floor_example_runs(tmp_path: Path) -> None:
    engine = build_tiny_engine(tmp_path, write_tiny_checkpoint(tmp_path / "checkpoint"))
    (example,) = find_blocks("python")
    assert ENGINE in example
    program = "import draftline.bench.cpu_bandwidth as bandwidth\nbandwidth.NUM_BYTES = 2**22\n"
    program += example.replace(ENGINE, str(engine))
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^batch \d+: \d+ MB a step, \d+ tokens/s at most$", run.stdout, re.MULTILINE)) == 3


def test_the_run_is_that_of_the_demo() -> None:
    """Numbers of a quick run, or of a part of the sections, are not published."""
    if not NUMBERS.exists():
        return
    settings = json.loads(NUMBERS.read_text(encoding="utf-8"))["settings"]
    assert settings["sections"] == ["decode", "curve", "attention", "profile"]
    assert settings["num_rounds"] >= 4
