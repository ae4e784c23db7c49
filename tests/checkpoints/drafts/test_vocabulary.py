"""The vocabularies of a target and its draft model agree token for token; the draft may be padded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.drafts import check_same_vocabulary
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import load_json
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import NUM_TOKENS, write_tiny_checkpoint


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "target")


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "draft", "qwen2", hidden_size=32, num_layers=1, seed=1)


def check(target_dir: Path, draft_dir: Path, target_size: int = 320, draft_size: int = 320) -> None:
    def config(directory: Path, vocab_size: int) -> CheckpointConfig:
        parsed = parse_huggingface_config(load_json(directory / "config.json"), None, "float32")
        return dataclasses.replace(parsed, vocab_size=vocab_size)

    check_same_vocabulary(target_dir, draft_dir, config(target_dir, target_size), config(draft_dir, draft_size))


def edit_vocabulary(directory: Path, edit: Callable[[dict[str, int]], object]) -> None:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    edit(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))


def test_equal_tokenizers_agree_and_both_may_be_padded(target_dir: Path, draft_dir: Path) -> None:
    check(target_dir, draft_dir)
    for sizes in ((320, 384), (384, 320), (NUM_TOKENS, NUM_TOKENS), (NUM_TOKENS, NUM_TOKENS + 1)):
        check(target_dir, draft_dir, *sizes)


def test_the_first_token_that_differs_is_named(target_dir: Path, draft_dir: Path) -> None:
    def swap(vocab: dict[str, int]) -> None:
        vocab["A"], vocab["B"], vocab["Y"], vocab["Z"] = vocab["B"], vocab["A"], vocab["Z"], vocab["Y"]

    edit_vocabulary(draft_dir, swap)
    ids = json.loads((target_dir / "tokenizer.json").read_text())["model"]["vocab"]
    with pytest.raises(CheckpointError) as caught:
        check(target_dir, draft_dir)
    message = str(caught.value)
    assert f"gives 'A' the id {ids['A']}; got id {ids['B']}, one of 4 tokens that differ;" in message
    assert message.startswith(str(draft_dir / "tokenizer.json"))


def test_a_token_that_one_lacks_is_named(target_dir: Path, draft_dir: Path) -> None:
    edit_vocabulary(draft_dir, lambda vocab: vocab.update({"<new>": NUM_TOKENS}))
    with pytest.raises(CheckpointError, match=f"has no token '<new>', as the target's has none; got id {NUM_TOKENS}"):
        check(target_dir, draft_dir)
    with pytest.raises(CheckpointError, match=f"gives '<new>' the id {NUM_TOKENS}; got no such token"):
        check(draft_dir, target_dir)


@pytest.mark.parametrize("sizes", [(NUM_TOKENS - 1, 320), (320, NUM_TOKENS - 1)])
def test_both_models_have_a_row_for_every_token(target_dir: Path, draft_dir: Path, sizes: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match=f"each of the tokenizer's {NUM_TOKENS} ids; got vocab_size"):
        check(target_dir, draft_dir, *sizes)
