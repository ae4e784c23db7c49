"""Heads with random weights beside tiny targets, and batches of texts with the features of an independent target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftline.checkpoints.convert import convert_checkpoint
from draftline.training.batch import Batch
from draftline.training.heads import (
    DraftHead,
    Eagle1Head,
    Eagle3Head,
    MedusaHeads,
    TargetTensors,
    describe_eagle1,
    describe_eagle3,
    describe_medusa,
    load_target_tensors,
)
from draftline.training.heads.head import compute_dtype
from tests.sessions.draft_references import TargetReference
from tests.tiny_checkpoints import write_tiny_checkpoint

HeadName = Literal["eagle3", "eagle1", "medusa", "medusa-shared"]
HEADS: tuple[HeadName, ...] = ("eagle3", "eagle1", "medusa", "medusa-shared")
CAPTURED_LAYERS = (0, 2)
DRAFT_VOCAB_SIZE = 200


@dataclass(frozen=True)
class TinyTarget:
    checkpoint: Path  # Hugging Face's
    tensors: TargetTensors
    reference: TargetReference


def make_target(directory: Path, *, tie: bool = False) -> TinyTarget:
    checkpoint = write_tiny_checkpoint(directory / "target", num_layers=4, tie=tie)
    convert_checkpoint(checkpoint, directory / "tensors", "float32", lambda done, total: None)
    return TinyTarget(checkpoint, load_target_tensors(directory / "tensors", "tiny"), TargetReference(checkpoint))


def make_head(name: HeadName, target: TargetTensors, *, seed: int = 0, steps: int = 3, **options: Any) -> DraftHead:
    """A head whose weights are random and exact in bfloat16; its norms and biases have an effect."""
    random = np.random.default_rng(seed)
    head: DraftHead
    if name == "eagle3":
        config = describe_eagle3(target.config, CAPTURED_LAYERS, DRAFT_VOCAB_SIZE)
        ids = np.sort(random.permutation(target.config.vocab_size)[:DRAFT_VOCAB_SIZE])
        head = Eagle3Head(config, target, ids, **{"ttt_steps": steps, "ttt_decay": 0.8, **options})
    elif name == "eagle1":
        weights = {"feature_noise": 0.2, "regression_weight": 1.0, "classification_weight": 0.1, **options}
        head = Eagle1Head(describe_eagle1(target.config), target, **weights)
    else:
        medusa = describe_medusa(target.config, steps, owns_lm_heads=name == "medusa")
        head = MedusaHeads(medusa, target, **{"decay": 0.8, "are_hard": False, **options})
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
            values = torch.from_numpy(random.standard_normal(parameter.shape)) * scale
            parameter.copy_((values + ("norm" in key)).bfloat16())
    return head.eval()


def make_batch(target: TinyTarget, texts: Sequence[Sequence[int]], answers: Sequence[Sequence[bool]]) -> Batch:
    """Pad ``texts``; features of EAGLE-3's layers and the final hidden row, by the reference of the target."""
    size, longest = target.tensors.config.hidden_size, max(map(len, texts))
    token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    is_answer, is_real = (torch.zeros(len(texts), longest, dtype=torch.bool) for _ in range(2))
    features = torch.full((len(texts), longest, (len(CAPTURED_LAYERS) + 1) * size), torch.nan)
    for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        token_ids[row, : len(text)] = torch.tensor(text)
        is_answer[row, : len(text)] = torch.tensor(answer)
        is_real[row, : len(text)] = True
        hidden = target.reference.hidden(text)
        layers = [*(hidden[layer + 1] for layer in CAPTURED_LAYERS), hidden[-1]]
        features[row, : len(text)] = torch.cat(layers, -1).float()
    return Batch(token_ids, is_answer, is_real, features)


def random_texts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 260, length).tolist() for length in lengths]


def candidates(head: DraftHead, batch: Batch, num_depths: int) -> list[tuple[Tensor, Tensor]]:
    """By depth, the rows where chains start and the log-probabilities ``[R, V]`` there, -inf outside the vocabulary."""
    from draftline.training.heads.rows import draft_rows, real_rows

    rows = real_rows(batch)
    assert compute_dtype(head.target_lm_head) == torch.float32
    found = []
    with torch.no_grad():
        if isinstance(head, MedusaHeads):
            final = rows.features[:, -head.head_config.hidden_size :]
            for depth, chosen in enumerate(draft_rows(rows, num_depths)):
                logits = head.logits(depth, final[chosen])
                found.append((chosen, torch.log_softmax(logits, -1)))
            return found
        assert isinstance(head, Eagle1Head | Eagle3Head)
        for chosen, hidden in head.chains(rows, num_depths):
            logits = torch.full((len(chosen), head.head_config.vocab_size), -torch.inf)
            if isinstance(head, Eagle3Head):
                logits[:, head.target_ids] = head.normed(hidden) @ head.lm_head.T
            else:
                logits = hidden @ head.target_lm_head.T
            found.append((chosen, torch.log_softmax(logits, -1)))
    return found
