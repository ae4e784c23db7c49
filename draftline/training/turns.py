"""A prompt as the target is asked it: chat turns to token ids as the server makes them, and turns of the user that the
target writes itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from draftline.checkpoints.tokenizer import Tokenizer
from draftline.errors import PipelineError
from draftline.runtime.request import FinishReason
from draftline.triton.chat import ChatTemplate, publish_chat_template

_MARK = "draftline-users-turn"


class Turns:
    """Renders and encodes as a client and the server's preprocessing do together.

    A target without a chat template is asked the text itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        has_template = tokenizer.chat_template is not None
        self._template = ChatTemplate.from_parameters(publish_chat_template(tokenizer)) if has_template else None

    def asking(self, text: str) -> list[int]:
        """Return the prompt to which the target answers ``text``."""
        if self._template is not None:
            text = self._template.render([{"role": "user", "content": text}])
        return self._tokenizer.encode(text)

    def opening(self) -> list[int]:
        """Return the prompt behind which the target writes a turn of the user: what stands before such a turn.

        Source: Magpie (arXiv 2406.08464): a model tuned on chats continues the template's opening with a request of the
        kind it was tuned on.

        Raises: PipelineError where the target has no chat template.
        """
        if self._template is None:
            cure = "leave `own` out, or choose a target with a chat template"
            raise PipelineError("train.prompts", "`own` needs the target's chat template", "a target without", cure)
        before, _, _ = self._template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        return self._tokenizer.encode(before)

    def read(self, token_ids: Sequence[int], finish_reason: FinishReason) -> tuple[str, str | None]:
        """Return the text of a user's turn, and the rule by which it is no request; None where it is one."""
        text = self._tokenizer.decode(token_ids)
        if finish_reason != "end_id":
            return text, "the user's turn is too long"
        if text != self._tokenizer.decode(token_ids, skip_special_tokens=False):
            return text, "the user's turn holds special tokens"
        if "\ufffd" in text:
            return text, "the user's turn is not UTF-8"
        text = text.strip()
        return text, None if any(map(str.isalnum, text)) else "the user's turn is empty"


def derive_seed(seed: int, name: str) -> int:
    """Return the 64-bit seed of the request ``name``: the same in every run, whatever was answered before.

    >>> derive_seed(0, "topics/1") == derive_seed(0, "topics/1") != derive_seed(1, "topics/1")
    True
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")
