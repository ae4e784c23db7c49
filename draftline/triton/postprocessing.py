"""What the postprocessing model does: the engine's text, or the text of tokens for callers that have only those."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.triton.preprocessing import TextTokenizer
from draftline.triton.tensors import Arrays


class Postprocessor:
    """Turn the arrays of a postprocessing request into the arrays of its response."""

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def postprocess(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return ``OUTPUT [B, beams]``: ``TEXT`` where given, else the decoded tokens.

        **Shapes**: ``TOKENS_BATCH [B, beams, length] int32``, ``SEQUENCE_LENGTH`` and ``TEXT [B, beams]``.
        """
        text = arrays.get("TEXT")
        if text is not None:
            return {"OUTPUT": text}
        tokens, lengths = arrays["TOKENS_BATCH"], arrays["SEQUENCE_LENGTH"]
        output = np.empty(tokens.shape[:2], np.object_)
        for index in np.ndindex(*output.shape):
            ids = tokens[index][: int(lengths[index])].tolist()
            output[index] = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens).encode()
        return {"OUTPUT": output}
