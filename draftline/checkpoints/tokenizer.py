"""Load the tokenizer that lies in a checkpoint, without transformers."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """Text to token ids and back, and chat messages to a prompt.

    ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` are None where the checkpoint names no such token.
    ``vocab_size`` counts the tokenizer's own ids, which may be fewer than the model's.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: JsonObject, chat_template: str | None) -> None:
        self._backend = backend
        self._special_tokens = {name: _token_text(settings, name) for name in ("bos_token", "eos_token", "pad_token")}
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            None if text is None else self._token_id(text, settings) for text in self._special_tokens.values()
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; ``add_special_tokens`` adds what the tokenizer puts around a text (bos)."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, added ones included."""
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return ids

    def tokens_without_rows(self, vocab_size: int) -> dict[str, int]:
        """Return the special tokens that were added with ids which a model of ``vocab_size`` has not.

        Gemma 3 adds one that stands for a part of an image to the tokenizer of its model of text, too.
        """
        own: dict[str, int] = self._backend.get_vocab(with_added_tokens=False)
        added = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: token_id
            for token_id, token in added
            if token_id >= vocab_size and token.special and token.content not in own
        }

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render messages (``role``, ``content``) with the checkpoint's chat template, as transformers does.

        The template runs in a sandbox. The result holds the special tokens, so encode it without adding them again.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError("messages", "the model has a chat template", "none", "send text instead")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        variables = {name: text for name, text in self._special_tokens.items() if text is not None}
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            cure = "send messages the template accepts"
            raise RequestError("messages", "the chat template renders them", str(error), cure) from error

    def _token_id(self, text: str, settings: JsonObject) -> int:
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None:
            cure = "save the tokenizer again with save_pretrained"
            raise CheckpointError(settings.where, "special tokens are in tokenizer.json", repr(text), cure)
        return token_id


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load ``tokenizer.json`` with the special tokens and chat template that lie beside it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        cure = "write one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise CheckpointError(path, "the checkpoint has its tokenizer", "no such file", cure)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises this very class and no narrower one
        if type(error) is not Exception:
            raise
        cure = "save the tokenizer again with save_pretrained"
        raise CheckpointError(path, "the tokenizers package can read it", str(error), cure) from error
    settings_path = directory / TOKENIZER_CONFIG_FILE
    settings = load_json(settings_path) if settings_path.exists() else JsonObject(settings_path, {})
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, settings, _chat_template(directory, settings))


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Raise CheckpointError unless the tokenizer loads and all its ids are below ``vocab_size``.

    Those of ``tokens_without_rows`` are left out when the tokenizer is copied.
    """
    tokenizer = load_tokenizer(directory)
    vocabulary = tokenizer.vocabulary().items() - tokenizer.tokens_without_rows(vocab_size).items()
    token, token_id = max(vocabulary, key=lambda item: item[1], default=("", -1))
    if token_id >= vocab_size:
        cure = "use the tokenizer of this very checkpoint"
        got = f"id {token_id} of {token!r}"
        raise CheckpointError(directory / TOKENIZER_FILE, f"token ids are below vocab_size {vocab_size}", got, cure)


def copy_tokenizer(source: Path, destination: Path, vocab_size: int) -> None:
    """Copy ``tokenizer.json`` into a folder, for a model of ``vocab_size``: without tokens that it has no rows for.

    Text that names one of these is then text, and makes no id that the embedding has not.
    """
    dropped = load_tokenizer(source).tokens_without_rows(vocab_size).values()
    if not dropped:
        shutil.copyfile(source / TOKENIZER_FILE, destination / TOKENIZER_FILE)
        return
    values = dict(load_json(source / TOKENIZER_FILE).values)
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] not in dropped]
    (destination / TOKENIZER_FILE).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _chat_template(directory: Path, settings: JsonObject) -> str | None:
    path = directory / CHAT_TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise settings.error("chat_template", "a string", template)
    return template


def _token_text(settings: JsonObject, name: str) -> str | None:
    value = settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise settings.error(name, "a string or an object with content", value)
    return text


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
