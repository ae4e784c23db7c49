"""Chat messages to a prompt on the client's side, by what the server publishes about its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


class ChatTemplate:
    """``bos_token`` is what preprocessing puts before every text, or empty where it puts nothing."""

    def __init__(self, tokenizer: Tokenizer, bos_token: str) -> None:
        self._tokenizer = tokenizer
        self._bos_token = bos_token

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ChatTemplate:
        """Make one from the parameters of preprocessing's configuration (see ``publish_chat_template``)."""
        special_tokens = {name: parameters[name] for name in SPECIAL_TOKENS if parameters[name]}
        # Rendering needs the special tokens only: a tokenizer that knows nothing else is enough.
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.add_special_tokens(list(special_tokens.values()))
        settings = JsonObject(Path("preprocessing/config.pbtxt"), special_tokens)
        tokenizer = Tokenizer(backend, settings, parameters["chat_template"] or None)
        return cls(tokenizer, parameters["bos_token"] if parameters["adds_bos_token"] == "true" else "")

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt; preprocessing adds the first token, so the template's own is taken off."""
        return self._tokenizer.render_chat(messages).removeprefix(self._bos_token)


def publish_chat_template(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the parameters a client needs to render chat messages."""
    token_ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    texts = ["" if token is None else tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
    adds_bos_token = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    return {
        "chat_template": tokenizer.chat_template or "",
        "adds_bos_token": "true" if adds_bos_token else "false",
        **dict(zip(SPECIAL_TOKENS, texts, strict=True)),
    }
