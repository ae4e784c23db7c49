"""A head of a few weights and answers in memory: all that a trainer needs, quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftline.config import Train
from draftline.training.batch import Batch
from draftline.training.description import Description
from draftline.training.examples import Examples
from draftline.training.heads.head import DraftHead, HeadLoss
from draftline.training.processes import Processes
from draftline.training.trainer import Trainer

VOCAB_SIZE, FEATURE_SIZE, DEPTHS = 11, 8, 2
DESCRIPTION = Description(
    target_sha256="",
    tokenizer_sha256="",
    vocab_size=VOCAB_SIZE,
    hidden_size=FEATURE_SIZE // 2,
    captured_layers=(0,),
    weights_dtype="float32",
    pool_dtype="float32",
    prompts=("own",),
    temperature=0.0,
    max_tokens=8,
    max_user_tokens=8,
    seed=0,
)


class SmallHead(DraftHead):
    """Predicts tokens t + 2 and t + 3 from the features of row t and token t + 1, by a matrix each."""

    def __init__(self, seed: int = 0) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(seed)
        shape = (DEPTHS, FEATURE_SIZE + VOCAB_SIZE, VOCAB_SIZE)
        self.weight = nn.Parameter(0.1 * torch.randn(shape, generator=generator))
        self.noise = 0.0

    def losses(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        loss, correct, counted = torch.zeros(()), [], []
        for depth in range(min(num_depths or DEPTHS, DEPTHS)):
            ahead = 2 + depth
            rows = slice(0, max(0, batch.token_ids.shape[1] - ahead))
            one_hot = nn.functional.one_hot(batch.token_ids[:, 1:], VOCAB_SIZE).float()[:, rows]
            inputs = torch.cat([batch.features[:, rows], one_hot], dim=-1)
            if self.training and self.noise:
                inputs = inputs + self.noise * torch.randn_like(inputs)
            logits = (inputs @ self.weight[depth]).float()
            labels, counts = batch.token_ids[:, ahead:], batch.is_answer[:, ahead:] & batch.is_real[:, ahead:]
            loss = loss + nn.functional.cross_entropy(logits[counts], labels[counts], reduction="sum")
            correct.append((logits.argmax(-1) == labels)[counts].sum())
            counted.append(counts.sum())
        right, number = torch.stack(correct), torch.stack(counted)
        return HeadLoss(loss, number[0], right, right, number)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def config(self) -> dict[str, Any]:
        return {}


def small_examples(num_sequences: int = 40, seed: int = 0) -> Examples:
    """Sequences that count up modulo the vocabulary, from a random start, beside random features."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, 20, num_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sequences = [(generator.integers(VOCAB_SIZE) + np.arange(length)) % VOCAB_SIZE for length in lengths]
    token_ids = np.concatenate(sequences).astype(np.int32)
    is_answer = np.concatenate([np.arange(length) >= 2 for length in lengths])
    features = generator.standard_normal((len(token_ids), FEATURE_SIZE)).astype(np.float16)
    names = tuple(f"prompt/{number}" for number in range(num_sequences))
    return Examples(token_ids, is_answer, features, starts, names, {}, DESCRIPTION)


def small_settings(**changes: Any) -> Train:
    values = {
        "method": "eagle1",
        "checkpoint": "draft",
        "epochs": 3,
        "batch_tokens": 64,
        "learning_rate": 0.05,
        "precision": "float32",
        "validation_share": 0.2,
        "validation_tokens": 700,
    }
    return Train.model_validate(values | changes)


def small_trainer(directory: Path, settings: Train | None = None, **changes: Any) -> Trainer:
    """Return a trainer in ``directory``; ``changes`` are those of the head's attributes."""
    directory.mkdir(parents=True, exist_ok=True)
    head = SmallHead()
    for name, value in changes.items():
        setattr(head, name, value)
    settings = settings or small_settings()
    return Trainer(head, small_examples(), settings, directory, {"data": "small"}, Processes())


def train_small(directory: Path, settings: Train | None = None, **changes: Any) -> Trainer:
    trainer = small_trainer(directory, settings, **changes)
    trainer.run(lambda done, total: None, lambda line: None)
    return trainer
