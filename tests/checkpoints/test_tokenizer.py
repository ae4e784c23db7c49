"""The thin tokenizer against transformers, and its own errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import CheckpointError, RequestError
from tests.tiny_checkpoints import NUM_TOKENS, write_tiny_tokenizer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello\n"}]
TEXTS = ("hello the inn", "", "naïve 日本 🎉", "<|im_start|>user\nhi<|im_end|>\n", "  two  spaces\n\n\t")


def edit_settings(directory: Path, **changes: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tmp_path: Path, text: str) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(token_ids) == plain


def test_special_tokens_have_ids(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    edit_settings(tmp_path, pad_token={"content": "<|endoftext|>", "lstrip": False}, bos_token=None)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 2, 0)
    assert tokenizer.vocab_size == NUM_TOKENS


def test_everything_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tiny_tokenizer(tmp_path)
    edit_settings(tmp_path, chat_template="{% for m in messages %}\n  {{ m | tojson }}{{ eos_token }}\n{% endfor %}x")
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids
    for add in (True, False):
        expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
        assert tokenizer.render_chat(MESSAGES, add_generation_prompt=add) == expected
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")  # wins over the other
    assert load_tokenizer(tmp_path).render_chat(MESSAGES) == "<|im_start|>Be brief."


def test_the_chatml_template(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).render_chat(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_named_templates_offer_the_default_one(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit_settings(tmp_path, chat_template=named)
    assert load_tokenizer(tmp_path).render_chat(MESSAGES) == "yes"


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (None, "the model has a chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "the chat template renders them"),
        ("{{ ''.__class__.__mro__ }}", "the chat template renders them"),
        ("{{ messages.append(1) }}", "the chat template renders them"),
    ],
)
def test_templates_that_fail_make_a_request_error(tmp_path: Path, template: str | None, rule: str) -> None:
    write_tiny_tokenizer(tmp_path)
    edit_settings(tmp_path, chat_template=template)
    with pytest.raises(RequestError, match=rule):
        load_tokenizer(tmp_path).render_chat(MESSAGES)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the checkpoint has its tokenizer"):
        load_tokenizer(tmp_path)
    write_tiny_tokenizer(tmp_path)
    edit_settings(tmp_path, eos_token="<|never|>")
    with pytest.raises(CheckpointError, match=r"special tokens are in tokenizer.json; got '<|never|>'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizers package can read it"):
        load_tokenizer(tmp_path)
