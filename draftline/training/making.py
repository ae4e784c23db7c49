"""Make the head that a pipeline's block ``train`` asks for, untrained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from draftline.config import Train
from draftline.training.draft_vocabulary import choose_draft_vocabulary
from draftline.training.examples import Examples
from draftline.training.heads import (
    DraftHead,
    Eagle1Head,
    Eagle3Head,
    MedusaHeads,
    describe_eagle1,
    describe_eagle3,
    describe_medusa,
    load_target_tensors,
)

FEATURE_NOISE, REGRESSION_WEIGHT, CLASSIFICATION_WEIGHT = 0.2, 1.0, 0.1  # EAGLE-1's, as published
MEDUSA_DECAY = 0.8


def make_head(
    settings: Train, checkpoint: Path, target_name: str, examples: Examples
) -> tuple[DraftHead, Mapping[str, float]]:
    """Return a head for the converted target in ``checkpoint``, and numbers worth telling about it.

    Its first weights follow from the seed.
    """
    torch.manual_seed(settings.seed)
    target = load_target_tensors(checkpoint, target_name)
    if settings.method == "eagle1":
        return Eagle1Head(
            describe_eagle1(target.config),
            target,
            feature_noise=FEATURE_NOISE,
            regression_weight=REGRESSION_WEIGHT,
            classification_weight=CLASSIFICATION_WEIGHT,
        ), {}
    if settings.method == "medusa":
        assert settings.num_heads is not None
        assert settings.own_lm_heads is not None
        config = describe_medusa(target.config, settings.num_heads, owns_lm_heads=settings.own_lm_heads)
        return MedusaHeads(config, target, decay=MEDUSA_DECAY, are_hard=False), {}
    assert settings.draft_vocab_size is not None
    assert settings.ttt_steps is not None
    assert settings.ttt_decay is not None
    assert settings.ttt_share is not None
    vocab_size = target.config.vocab_size
    draft_vocab_size = min(settings.draft_vocab_size, vocab_size)
    vocabulary = choose_draft_vocabulary(
        examples.token_ids, examples.is_answer, vocab_size, draft_vocab_size, target.config.eos_token_ids
    )
    config = describe_eagle3(target.config, examples.captured_layers, draft_vocab_size)
    head = Eagle3Head(
        config,
        target,
        vocabulary.target_ids,
        ttt_steps=settings.ttt_steps,
        ttt_decay=settings.ttt_decay,
        ttt_share=settings.ttt_share,
    )
    return head, {"draft_vocab_size": draft_vocab_size, "draft_vocab_coverage": round(vocabulary.coverage, 5)}
