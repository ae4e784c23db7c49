"""What the convert stage returns, and what it says of a target, whichever route it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.stages.stage import StageCall


@dataclass(frozen=True)
class ConvertResult:
    """``draft_layers``: of each draft, 0 for one without weights."""

    architecture: str
    dtype: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    draft_layers: tuple[int, ...]


def say_notes(call: StageCall, what: str, source: Path) -> None:
    """Say what is to be known of a published checkpoint whose quantisation was undone."""
    from draftline.checkpoints.convert import open_source

    if (source / "config.json").is_file():
        for note in open_source(source, call.pipeline.target.dtype).notes:
            call.say(f"{what}: {note}")


def say_unused_heads(call: StageCall) -> None:
    """Medusa heads among the target's tensors are no part of the target: nothing else says that they are left out."""
    from draftline.checkpoints.drafts.medusa import holds_medusa_heads
    from draftline.checkpoints.huggingface import open_weights

    reads_them = any(draft.method == "medusa" for draft in call.pipeline.draft)
    if not reads_them and (call.source / "config.json").is_file() and holds_medusa_heads(open_weights(call.source)):
        call.say(
            "the target holds Medusa heads, which are left out; a draft of method medusa from its folder reads them"
        )


def say_dropped_tokens(call: StageCall, vocab_size: int) -> None:
    """Say which special tokens of the target's tokenizer the converted one does not have."""
    from draftline.checkpoints.tokenizer import TOKENIZER_FILE, load_tokenizer

    if (call.source / TOKENIZER_FILE).is_file():
        for token in load_tokenizer(call.source).tokens_without_rows(vocab_size):
            call.say(f"the tokenizer's {token} is left out: the model has no row for it")
