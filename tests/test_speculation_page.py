"""What docs/speculation.md and the README say of speculation: blocks validate, the example runs, names exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftline.cli import _parse, main
from draftline.config import load_pipeline
from draftline.generation import LoadedEngine
from draftline.runtime.request import Request
from draftline.runtime.speculation_numbers import SpeculationNumbers
from draftline.triton import contract, metrics
from tests.tiny_checkpoints import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
INPUTS = {tensor.name for tensor in contract.ENSEMBLE_INPUTS}
OUTPUTS = {tensor.name for tensor in contract.ENSEMBLE_OUTPUTS}
ENGINE = "builds/smollm2-135m-ngram/engine"


def find_blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def find_rows(title: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this title."""
    lines = PAGE.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {title} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def find_names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


@pytest.mark.parametrize("block", find_blocks("yaml", PAGE))
def test_blocks_of_pipelines_are_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "my-model.yaml"
    file.write_text(f"name: my-model\ntarget: {{checkpoint: checkpoints/my-model}}\n{block}", encoding="utf-8")
    assert load_pipeline(file, []).draft


def test_numbers_have_their_names_everywhere() -> None:
    rows = find_rows("`SpeculationNumbers`")
    fields, wire, kinds = ([name for row in rows for name in find_names(row[column])] for column in range(3))
    assert {name for name in dir(SpeculationNumbers()) if not name.startswith("_")} == set(fields)
    assert set(wire) <= OUTPUTS
    families = {metrics.SPECULATION, metrics.ACCEPTED_AT}
    assert set(kinds) == {*metrics.SPECULATION_KINDS, metrics.ACCEPTED_AT, "depth"}
    assert families <= set(re.findall(r"\bdraftline_\w+", PAGE))
    for row in rows:
        kind, field = find_names(row[2]), find_names(row[0])
        assert metrics.SPECULATION_KINDS.get(kind[0] if kind else "", field[0]) == field[0]


def test_options_have_their_names_everywhere() -> None:
    for wire, options, request, _ in find_rows("over the wire"):
        assert set(find_names(wire)) <= INPUTS
        for option in re.findall(r"`(--[\w-]+)`", options):
            value = ["3"] if option == "--max-draft-tokens" else []
            _parse(["generate", "Hello", option, *value])
        for name in find_names(request):
            assert name in Request.__dataclass_fields__
            assert name in LoadedEngine.generate.__annotations__


def test_curl_commands_name_real_tensors() -> None:
    (console,) = find_blocks("console", README)
    commands = re.findall(r"-d '(.+?)'", console, re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        assert set(json.loads(command)) <= INPUTS
    answers = [set(json.loads(line)) for line in console.splitlines() if line.startswith("{")]
    assert len(answers) == 2
    for answer in answers:
        assert answer <= OUTPUTS | {"model_name", "model_version", "sequence_end", "sequence_id", "sequence_start"}
    assert sorted(re.findall(r'kind="(\w+)"', console)) == sorted(metrics.SPECULATION_KINDS)


def test_example_runs(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "checkpoint")
    pipeline = yaml.safe_load((ROOT / "pipelines" / "smollm2-135m-ngram.yaml").read_text(encoding="utf-8"))
    pipeline |= {
        "target": {"checkpoint": "checkpoint"},
        "engine": {"max_batch_size": 4, "max_seq_len": 256, "max_num_tokens": 64, "num_threads": 1},
        "kv_cache": {"max_blocks": 64},
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
    assert main(["run", str(file), "--until", "build", "--output", str(tmp_path / "build")]) == 0
    (example,) = find_blocks("python", PAGE)
    assert ENGINE in example
    program = example.replace(ENGINE, str(tmp_path / "build" / "engine"))
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3
    assert len({line.split(") ", 1)[1] for line in lines}) == 1, "drafts change no text"
    assert lines[2].split()[1] == "0"
