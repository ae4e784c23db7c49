"""A response of the ensemble in the client's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import InferResult

from draftline.runtime.speculation_numbers import SpeculationNumbers
from draftline.triton.contract import SPECULATION_OUTPUTS


@dataclass(frozen=True)
class Piece:
    """The text of one token, empty where a character is not whole yet, and whether the token was drafted."""

    text: str
    is_draft: bool


@dataclass(frozen=True)
class Chunk:
    """New text of an answer, and how many tokens the answer has so far, None where the server does not count them.

    With ``return_acceptance``, ``pieces`` is the text token by token (text that was held back until the end follows
    as one piece more), and the last chunk has the request's ``speculation``.
    """

    text: str
    num_output_tokens: int | None
    pieces: tuple[Piece, ...] = ()
    speculation: SpeculationNumbers | None = None


def read_chunk(response: Any) -> Chunk:
    """Read one response of the ensemble."""
    result = InferResult(response)
    text, num_tokens = _values(result, "text_output"), _values(result, "num_output_tokens")
    pieces = zip(_values(result, "token_texts"), _values(result, "is_draft"), strict=True)
    return Chunk(
        text[0].decode("utf-8"),
        num_tokens[0] if num_tokens else None,
        tuple(Piece(piece.decode("utf-8"), is_draft) for piece, is_draft in pieces),
        _read_speculation(result),
    )


def _read_speculation(result: InferResult) -> SpeculationNumbers | None:
    """Return the numbers of a last response that was asked for them."""
    counts = {field: _values(result, name) for name, field in SPECULATION_OUTPUTS.items()}
    if not all(counts.values()):
        return None
    histogram = _values(result, "acceptance_histogram")
    return SpeculationNumbers(
        num_steps=sum(histogram),
        num_drafted_tokens=_values(result, "total_draft_tokens")[0],
        num_accepted_tokens=_values(result, "total_accepted_draft_tokens")[0],
        histogram=tuple(histogram),
        **{field: values[0] for field, values in counts.items()},
    )


def _values(result: InferResult, name: str) -> list[Any]:
    """Return the elements of an output, none where it did not come (Triton drops empty ones)."""
    array = result.as_numpy(name)
    return [] if array is None else array.ravel().tolist()
