"""The command line: one function per verb, one line per error."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import draftline
from draftline.cli import main
from draftline.config.reference import write_reference
from draftline.training.train import TrainReport
from draftline.triton.answer_options import AnswerOptions
from tests.tiny_checkpoints import write_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text("name: tiny\ntarget: {checkpoint: model}\n")
    return path


def test_validate(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(file), "engine.weights_dtype=int8"]) == 0
    assert capsys.readouterr().out == f"{file}: valid\n"


@pytest.mark.parametrize("command", ["validate", "run"])
@pytest.mark.parametrize("block", ["target", "draft"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"architectures": ["OlmoForCausalLM"]},
            "Olmo.* has layer norms without weights; .*engine.route to llmapi",
        ),
        ({"hidden_act": "relu"}, 'hidden_act is "silu"; got "relu"; choose another model'),
    ],
)
def test_models_that_are_none_of_ours_are_refused_before_any_work(
    file: Path, capsys: pytest.CaptureFixture[str], command: str, block: str, wrong: dict[str, object], message: str
) -> None:
    for name, edit in (("model", {}), ("other", wrong)):
        write_tiny_checkpoint(file.parent / name, extra_config=edit)
    file.write_text("name: tiny\ntarget: {checkpoint: model}\ndraft: {method: draft_model, checkpoint: model}\n")
    output = file.parent / "build"
    words = [command, str(file), f"{block}.checkpoint=other", *(["--output", str(output)] if command == "run" else [])]
    assert main(words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not output.exists()


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_quantisation_that_is_not_read_is_refused_before_any_work(
    file: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (file.parent / "model").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "hqq"}}
    (file.parent / "model" / "config.json").write_text(json.dumps(config))
    file.write_text("name: tiny\ntarget: {checkpoint: model}\n")
    assert main([command, str(file)]) == 2
    assert "quant_method is one of gptq, awq" in capsys.readouterr().err


def test_every_problem_is_a_line_and_the_status_is_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(file), "engine.backend=cuda", "serve.http_port=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["draftline", "override 1", "engine.backend"],
        ["draftline", "override 2", "serve.http_port"],
    ]


def test_show(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file), "serve.http_port=9000"]) == 0
    assert "http_port: 9000\n  grpc_port: 8001\n" in capsys.readouterr().out
    assert main(["show", "--fields"]) == 0
    assert capsys.readouterr().out == write_reference()


def test_show_says_where_the_shipped_pipelines_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--pipelines"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert "smollm2-135m.yaml" in [path.name for path in paths]
    assert all(main(["validate", str(path)]) == 0 for path in paths)


def test_overrides_stand_on_both_sides_of_options(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Any, Any]] = []

    def record(pipeline: Any, output: Any, **options: Any) -> list[object]:
        calls.append((pipeline, {"output": output, **options}))
        return []

    monkeypatch.setattr("draftline.stages.runner.run_pipeline", record)
    words = ["run", str(file), "engine.num_threads=1", "--until", "build", "serve.http_port=9000"]
    assert main(words) == 0
    pipeline, options = calls[0]
    assert (pipeline.engine.num_threads, pipeline.serve.http_port) == (1, 9000)
    assert (options["output"], options["root"], options["until"]) == (Path("builds/tiny"), file.parent, "build")
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--untill", "build"])
    assert "unrecognized arguments: --untill" in capsys.readouterr().err


def test_a_dry_run_prints_the_resolved_pipeline_and_the_stages(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "model").mkdir()
    monkeypatch.chdir(file.parent)
    assert main(["run", str(file), "--dry-run", "--until", "check"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("name: tiny\n")
    assert captured.out.endswith("convert: would run: it never ran\ncheck: would run: it never ran\n")
    assert captured.err == ""
    assert sorted(path.name for path in file.parent.iterdir()) == ["model", "tiny.yaml"]


def test_a_missing_checkpoint(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(file), "--output", str(file.parent / "out")]) == 2
    assert capsys.readouterr().err.startswith("draftline: model: the checkpoint exists; got nothing at ")
    assert not (file.parent / "out").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "draftline: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "draftline: /x/y: the disk has room; got No "),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "draftline: /x: can be read and written; got P"),
        (OSError(errno.EIO, "Input/output error"), 2, "draftline: a file: can be read and written; got Input/output"),
    ],
)
def test_errors_of_the_system_are_one_line(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("draftline.stages.runner.run_pipeline", fail)
    assert main(["run", str(file)]) == status
    captured = capsys.readouterr().err
    assert captured.startswith(message)
    assert captured.count("\n") == 1


def test_train_passes_its_options_and_prints_what_came_of_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def record(pipeline: Any, output: Path, **options: Any) -> TrainReport:
        calls.append({"pipeline": pipeline, "output": output, **options})
        return TrainReport(Path("drafts/mine"), "course", "acceptance")

    monkeypatch.setattr("draftline.training.train.train_draft", record)
    words = ["train.method=medusa", "--until", "export", "train.checkpoint=drafts/mine"]
    assert main(["train", str(file), *words]) == 0
    assert (calls[0]["output"], calls[0]["root"], calls[0]["until"]) == (Path("builds/tiny"), file.parent, "export")
    assert calls[0]["pipeline"].train.num_heads == 4
    assert capsys.readouterr().out == "course\nacceptance\nthe draft is in drafts/mine\n"


def test_train_without_torch_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["train", str(file)]) == 2
    expected = (
        "draftline: draftline train: the package torch is installed; got no such package; pip install 'draftline["
    )
    assert capsys.readouterr().err.startswith(expected)


def test_generate_and_serve_pass_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def record(*arguments: object, **options: object) -> int:
        calls.append((arguments, options))
        return 7

    monkeypatch.setattr("draftline.triton.generate.generate", record)
    monkeypatch.setattr("draftline.triton.server.serve", record)
    assert main(["generate", "Why?", "--top-k", "3", "--stop", "a", "b", "--stop", "c", "--raw"]) == 7
    assert main(["serve", "builds/tiny", "--grpc-port", "9001"]) == 7
    assert calls[0][0] == ("Why?",)
    assert calls[0][1]["stop_words"] == ["a", "b", "c"]
    assert calls[0][1]["top_k"] == 3
    assert calls[0][1]["speculate"] is None
    assert calls[0][1]["show_acceptance"] is False
    assert calls[1] == ((Path("builds/tiny"),), {"http_port": None, "grpc_port": 9001, "metrics_port": None})


def test_generate_passes_every_option_the_client_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("draftline.triton.generate.generate", lambda prompt, **options: calls.append(options) or 0)
    words = (
        "--no-speculate --max-draft-tokens 3 --bad-words a b --repetition-penalty 1.5 --presence-penalty 0.5 "
        "--frequency-penalty -0.5 --min-tokens 4 --show-acceptance"
    )
    assert main(["generate", "Why?", *words.split()]) == 0
    (options,) = calls
    assert options.pop("show_acceptance") is True
    for name in ("url", "raw", "use_colour", "out"):
        del options[name]
    asked = AnswerOptions(**options)
    assert (asked.speculate, asked.max_draft_tokens, asked.bad_words, asked.min_tokens) == (False, 3, ["a", "b"], 4)
    assert (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) == (1.5, 0.5, -0.5)
    assert set(options) == {field.name for field in fields(AnswerOptions)} - {"embedding_bias", "return_acceptance"}


def test_it_runs_as_a_module_and_imports_little(file: Path) -> None:
    heavy = "numpy onnx onnxruntime torch tokenizers tritonclient transformers"
    code = (
        "import sys; from draftline.cli import main; status = main(sys.argv[1:]); "
        f"sys.exit(status or ' '.join(set('{heavy}'.split()) & set(sys.modules)) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    (file.parent / "model").mkdir()
    for words in (["validate", str(file)], ["run", str(file), "--dry-run"]):
        done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), words
    command = [sys.executable, "-m", "draftline", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"draftline {draftline.__version__}\n"
    closed = f"{sys.executable} -m draftline show --fields | head -c 10"
    done = subprocess.run(["bash", "-c", closed], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
