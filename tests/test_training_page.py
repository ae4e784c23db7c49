"""What docs/training.md says: numbers are those of docs/bench/training.json, blocks validate, names exist."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftline.cli import _parse, main
from draftline.config import load_pipeline
from draftline.training.page import BLOCKS, NUMBERS, PAGES, fill_page
from draftline.training.results import FURTHER, TREND_SHARE, load_results
from draftline.training.steps import STEPS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_numbers_are_those_of_the_run(page: Path) -> None:
    """``python -m draftline.training.page`` writes them anew."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- training.json: " in text
    assert text == fill_page(text, load_results(NUMBERS) if NUMBERS.exists() else None)


def test_every_block_is_shown_somewhere() -> None:
    shown = [name for page in PAGES for name in re.findall(r"^<!-- training\.json: (\w+) -->$", page.read_text(), re.M)]
    assert sorted(shown) == sorted(BLOCKS)


def test_the_block_is_valid(tmp_path: Path) -> None:
    (block,) = find_blocks("yaml")
    file = tmp_path / "my-model.yaml"
    file.write_text(f"name: my-model\ntarget: {{checkpoint: checkpoints/my-model}}\n{block}", encoding="utf-8")
    train = load_pipeline(file).train
    assert train is not None
    for name in re.findall(r"\| `(\w+)` \|", PAGE.split("## What happens")[1].split("\n\n")[1]):
        assert name in STEPS


def test_settings_have_their_names() -> None:
    from draftline.config.training import Train

    for name in ("budget_minutes", "checkpoint_minutes", "validation_share", "ttt_decay", "own_lm_heads", "epochs"):
        assert f"`{name}" in PAGE
        assert name in Train.model_fields


def test_commands_parse() -> None:
    lines = [shlex.split(line, comments=True) for line in "".join(find_blocks("sh")).splitlines()]
    commands = [words[words.index("draftline") + 1 :] for words in lines if "draftline" in words]
    assert len(commands) == 5
    for command in commands:
        arguments = _parse(command)
        assert main(["validate", str(ROOT / arguments.file), *arguments.overrides]) == 0
        assert getattr(arguments, "until", None) in (None, *STEPS)
    for words in lines:
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2]) is not None
        else:
            assert not words or words[0] in ("pip", "draftline", "torchrun") or (ROOT / words[0]).is_file()


def test_the_trend_is_that_of_the_code() -> None:
    assert TREND_SHARE == 0.25
    assert "the last three quarters of the tokens" in PAGE
    assert FURTHER == 10
    assert "the line at ten times the tokens" in " ".join(PAGE.split())


def test_a_quick_run_is_not_published() -> None:
    if not NUMBERS.exists():
        return
    settings = load_results(NUMBERS).acceptance.settings
    assert settings["num_prompts"] is None
    assert settings["max_tokens"] >= 128
    assert settings["max_depth"] == 5
