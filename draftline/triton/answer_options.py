"""What a client may ask of an answer, in the client's words, as inputs of the ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, tuple[str, Sequence[Any] | None]]  # name -> datatype and values; None = leave it out


@dataclass(frozen=True)
class AnswerOptions:
    """None and empty mean the server's own choice, and are not sent.

    ``temperature`` 0 = greedy. Penalties: ``repetition_penalty`` 1 = off; ``presence_penalty`` and
    ``frequency_penalty`` 0 = off. ``bad_words`` never appear, ``embedding_bias`` adds to the logits of every token of a
    word; both are tokenised as they are given, so ``" no"`` differs from ``"no"``. The answer has at least
    ``min_tokens`` tokens and ends before the first of ``stop_words``.

    ``speculate`` False decodes plainly; ``max_draft_tokens`` caps the draft tokens of a step. ``return_acceptance``
    asks which tokens were drafted: ``Chunk.pieces`` and ``Chunk.speculation``.
    """

    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_words: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    embedding_bias: Mapping[str, float] = field(default_factory=dict)
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    speculate: bool | None = None
    max_draft_tokens: int | None = None
    return_acceptance: bool = False

    def build_inputs(self, prompt: str) -> Inputs:
        """Return the inputs of a streamed answer."""
        return {
            "text_input": ("BYTES", [prompt.encode("utf-8")]),
            "max_tokens": ("INT32", [self.max_tokens]),
            "temperature": ("FP32", _optional(self.temperature)),
            "top_k": ("INT32", _optional(self.top_k)),
            "top_p": ("FP32", _optional(self.top_p)),
            "seed": ("UINT64", _optional(self.seed)),
            "stop_words": ("BYTES", _words(self.stop_words)),
            "bad_words": ("BYTES", _words(self.bad_words)),
            "embedding_bias_words": ("BYTES", _words(self.embedding_bias)),
            "embedding_bias_weights": ("FP32", list(self.embedding_bias.values()) or None),
            "repetition_penalty": ("FP32", _optional(self.repetition_penalty)),
            "presence_penalty": ("FP32", _optional(self.presence_penalty)),
            "frequency_penalty": ("FP32", _optional(self.frequency_penalty)),
            "min_tokens": ("INT32", _optional(self.min_tokens)),
            "speculate": ("BOOL", _optional(self.speculate)),
            "max_draft_tokens": ("INT32", _optional(self.max_draft_tokens)),
            "return_acceptance": ("BOOL", _optional(self.return_acceptance or None)),
            "stream": ("BOOL", [True]),
            "exclude_input_in_output": ("BOOL", [True]),
            "return_num_output_tokens": ("BOOL", [True]),
        }


def _optional(value: float | None) -> list[float] | None:
    return None if value is None else [value]


def _words(words: Sequence[str] | Mapping[str, float]) -> list[bytes] | None:
    return [word.encode("utf-8") for word in words] or None
