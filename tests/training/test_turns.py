"""Prompts are what the server makes of them, and of a user's turn that the target wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.checkpoints.tokenizer import Tokenizer, load_tokenizer
from draftline.errors import PipelineError
from draftline.runtime.request import FinishReason
from draftline.training.turns import Turns, derive_seed
from tests.tiny_checkpoints import write_tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tiny_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def test_prompts_are_those_of_the_chat_template(tokenizer: Tokenizer) -> None:
    turns = Turns(tokenizer)
    asking = tokenizer.decode(turns.asking("hello"), skip_special_tokens=False)
    assert asking == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turns.opening(), skip_special_tokens=False) == "<|im_start|>user\n"


def test_without_a_chat_template_the_text_is_the_prompt(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = None
    turns = Turns(tokenizer)
    assert turns.asking("hello") == tokenizer.encode("hello")
    with pytest.raises(PipelineError, match=r"train.prompts: `own` needs the target's chat template"):
        turns.opening()


@pytest.mark.parametrize(
    ("text", "finish_reason", "rule"),
    [
        (" hello\n", "end_id", None),
        ("hello", "max_tokens", "the user's turn is too long"),
        ("", "end_id", "the user's turn is empty"),
        (" \n?", "end_id", "the user's turn is empty"),
        ("hello<|im_start|>", "end_id", "the user's turn holds special tokens"),
    ],
)
def test_rules_of_a_users_turn(tokenizer: Tokenizer, text: str, finish_reason: FinishReason, rule: str | None) -> None:
    found, broken = Turns(tokenizer).read(tokenizer.encode(text), finish_reason)
    assert broken == rule
    if rule is None:
        assert found == "hello"


def test_bytes_that_are_no_text_are_no_request(tokenizer: Tokenizer) -> None:
    half_of_a_letter = tokenizer.encode("é")[:1]
    assert Turns(tokenizer).read(half_of_a_letter, "end_id")[1] == "the user's turn is not UTF-8"


def test_seeds_differ_by_name_and_by_the_seed_of_all() -> None:
    seeds = {derive_seed(seed, name) for seed in (0, 1, 2**31 - 1) for name in ("a", "a#2", "a/user", "b")}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)
