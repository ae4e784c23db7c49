"""Compare the vocabularies of a target and a separate draft model."""

from __future__ import annotations

from pathlib import Path

from draftline.checkpoints.target_sizes import TargetSizes
from draftline.checkpoints.tokenizer import TOKENIZER_FILE, load_tokenizer
from draftline.errors import CheckpointError

_CURE = "choose a draft model of the target's family, with the very same tokenizer"


def check_same_tokens(target_tokenizer_dir: Path, draft_tokenizer_dir: Path, vocab_size: int) -> dict[str, int]:
    """Return the ids of the target's tokens after checking that the draft's tokenizer gives all of them the same.

    ``vocab_size``: of the model that both are used with; special tokens behind it (``tokens_without_rows``) count not.

    Raises: CheckpointError where a token differs (the message names the one with the lowest id).
    """
    ours, theirs = (_vocabulary(directory, vocab_size) for directory in (target_tokenizer_dir, draft_tokenizer_dir))
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    if differing:
        token = min(differing, key=lambda token: (ours.get(token, theirs.get(token, -1)), token))
        rule = f"the draft's tokenizer gives {token!r} the id {ours.get(token)}"
        if token not in ours:
            rule = f"the draft's tokenizer has no token {token!r}, as the target's has none"
        got = f"id {theirs[token]}" if token in theirs else "no such token"
        got += f", one of {len(differing)} tokens that differ"
        raise CheckpointError(draft_tokenizer_dir / TOKENIZER_FILE, rule, got, _CURE)
    return ours


def _vocabulary(directory: Path, vocab_size: int) -> dict[str, int]:
    tokenizer = load_tokenizer(directory)
    return dict(tokenizer.vocabulary().items() - tokenizer.tokens_without_rows(vocab_size).items())


def check_same_vocabulary(
    target_tokenizer_dir: Path, draft_tokenizer_dir: Path, target: TargetSizes, draft: TargetSizes
) -> None:
    """Check that a draft model's token ids mean what the target's mean.

    The tokenizers map the same tokens to the same ids, and both models have a row for each of them. Rows behind the
    tokenizer's last id are padding, of which models of one family have different numbers.

    Raises:
        CheckpointError: a token differs (the message names the one with the lowest id), or a model has too few rows.
    """
    vocab_size = min(target.vocab_size, draft.vocab_size)
    ours = check_same_tokens(target_tokenizer_dir, draft_tokenizer_dir, vocab_size)
    num_ids = 1 + max(ours.values(), default=-1)
    for where, model in ((target_tokenizer_dir, target), (draft_tokenizer_dir, draft)):
        if model.vocab_size < num_ids:
            rule = f"the model has a row for each of the tokenizer's {num_ids} ids"
            raise CheckpointError(where, rule, f"vocab_size {model.vocab_size}", _CURE)
