"""A user's prompts, as a benchmark asks them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.bench.prompts import prompts_workload, read_prompts, render_prompts
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import DraftlineError
from draftline.training.prompts.__main__ import main
from draftline.training.prompts.held_out import load_held_out
from tests.tiny_checkpoints import write_tiny_checkpoint


def test_a_published_set_is_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mt-bench"]) == 0
    (tmp_path / "mt-bench.jsonl").write_text(capsys.readouterr().out)
    assert read_prompts(tmp_path / "mt-bench.jsonl") == [prompt.text for prompt in load_held_out("mt-bench")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "prompts.jsonl: holds prompts; got none; write a line"),
        ("\n\n", "prompts.jsonl: holds prompts; got none"),
        ('{"prompt": "one"}\nWhat is two?\n', "prompts.jsonl:2: holds a prompt; got What is two?; write a line"),
        ('{"text": "one"}', "prompts.jsonl:1: holds a prompt"),
        ('{"prompt": " "}', "prompts.jsonl:1: holds a prompt"),
        ('{"prompt": 3}', "prompts.jsonl:1: holds a prompt"),
        ("[]", "prompts.jsonl:1: holds a prompt"),
        ("3", "prompts.jsonl:1: holds a prompt"),
    ],
)
def test_what_holds_no_prompts_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(DraftlineError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{tmp_path}/{expected}")


def test_an_absent_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        with pytest.raises(DraftlineError, match="is a readable file of prompts"):
            read_prompts(tmp_path / name)


def test_prompts_become_turns_where_the_model_chats(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    (rendered,) = render_prompts(load_tokenizer(model), ["one"])
    assert rendered == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert render_prompts(load_tokenizer(model), ["one", "two"]) == ["one", "two"]


def test_rounds_ask_prompts_from_all_over_the_list() -> None:
    prompts = [str(number) for number in range(40)]
    workload = prompts_workload(prompts, 2, 8, num_rounds=4)
    assert [workload.prompts(number) for number in range(5)] == [
        ["0", "4"],
        ["8", "12"],
        ["16", "20"],
        ["24", "28"],
        ["32", "36"],
    ]
    few = prompts_workload(["a", "b", "c"], 2, 8, num_rounds=2)
    assert [few.prompts(number) for number in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]
