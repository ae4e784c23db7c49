"""The optimisation loop: plain PyTorch in one process, or in as many as a launcher started.

Losses and counts are sums, and so are gradients over processes: whatever the number of processes, a step divides the
same sum by the same count, and the curve is the same up to the order of additions. A step's random numbers follow from
the seed, the step and the process, so that a run that goes on from a checkpoint repeats the curve of one never cut.
Clipping at 0.5 is EAGLE-3's (arXiv 2503.01840, appendix A); what steps are taken by is in ``optimizers``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.config import Train
from draftline.errors import TrainingError
from draftline.stages.stage import Advance, Say
from draftline.training.checkpoint import Position, State, load_state, save_state
from draftline.training.data_order import make_batches, split_sequences
from draftline.training.examples import Examples
from draftline.training.heads.head import DraftHead, HeadLoss
from draftline.training.loading import load_batch
from draftline.training.optimizers import Optimizers
from draftline.training.processes import Processes, choose_precision
from draftline.training.report import Log
from draftline.training.schedule import progress_of, rate_share_at, ttt_steps_at
from draftline.training.sums import Sums

LARGEST_GRADIENT_NORM = 0.5
VALIDATION_WORK = 0.1  # tokens that a validation reads at most, of those trained since the last one
VALIDATION_DEPTHS = 5  # whatever was trained: a head drafts as deep as it is asked to


class Trainer:
    """Trains ``head``; what it leaves in ``directory`` is the log and, every few minutes and at the end, the state.

    ``made_from`` names what the training starts from. A state of the same is continued, another one is replaced.
    """

    def __init__(
        self,
        head: DraftHead,
        examples: Examples,
        settings: Train,
        directory: Path,
        made_from: Mapping[str, str],
        processes: Processes,
    ) -> None:
        self._examples, self._settings, self._directory = examples, settings, directory
        self._made_from, self._processes = dict(made_from), processes
        self._head = head.to(processes.device)
        self._optimizers = Optimizers(head, settings.learning_rate, settings.matrix_learning_rate)
        self._parameters = self._optimizers.parameters
        self._precision = choose_precision(settings.precision, processes.device)
        self._lengths = np.diff(examples.sequence_starts)
        self._training, self._held_back = split_sequences(
            examples.names, examples.is_answer, examples.sequence_starts, settings.validation_share, settings.seed
        )
        self._total_tokens = settings.epochs * int(self._lengths[self._training].sum())
        self._epoch: tuple[int, list[NDArray[np.int64]]] = (-1, [])
        watched = self._held_back[: self._count_watched(self._held_back)]
        self._validation = make_batches(watched, self._lengths, settings.batch_tokens, settings.seed, 0)
        self._check_split()
        self.position = Position()
        self._log = Log(directory / "log.jsonl", is_written=processes.is_main)
        self._continue()

    @property
    def progress(self) -> float:
        budget = self._settings.budget_minutes
        seconds = None if budget is None else 60 * budget
        return progress_of(self.position.tokens, self._total_tokens, self.position.seconds, seconds)

    def describe(self) -> str:
        """Say in one line what is trained on what."""
        num_weights = sum(parameter.numel() for parameter in self._parameters)
        dtype = str(self._precision).removeprefix("torch.")
        return (
            f"{num_weights / 1e6:.1f} M weights, matrices in {dtype}, {self._processes.count} process(es), "
            f"{len(self._training)} sequences of {self._total_tokens // self._settings.epochs} tokens, "
            f"{len(self._held_back)} held back, {sum(map(len, self._validation))} of which are watched"
        )

    def run(self, advance: Advance, say: Say) -> Position:
        """Train to the end of the epochs or minutes, and return where that is.

        Raises: TrainingError where the loss or the gradient is not finite; the last checkpoint stays.
        """
        if self.position.is_finished:
            return self.position
        began, seconds_before, saved = time.monotonic(), self.position.seconds, time.monotonic()
        interval = self._settings.validation_tokens
        if self.position.step == 0:
            self._validate(say)
        while self.progress < 1:
            before = self.position.tokens
            self._step(lambda: seconds_before + time.monotonic() - began)
            advance(round(1000 * self.progress), 1000)
            if self.position.tokens // interval > before // interval and self.progress < 1:
                self._validate(say)
            if time.monotonic() - saved > 60 * self._settings.checkpoint_minutes:
                self._save()
                saved = time.monotonic()
        self._validate(say)
        self.position = replace(self.position, is_finished=True)
        self._save()
        return self.position

    def _step(self, clock: Callable[[], float]) -> None:
        settings, place = self._settings, self.position
        batches = self._batches(place.epoch)
        batch = batches[place.batch]
        rate_share = rate_share_at(self.progress, settings.warmup_share)
        generator = np.random.default_rng([settings.seed, place.step, self._processes.index])
        torch.manual_seed(int(generator.integers(2**62)))
        self._head.train()
        self._optimizers.zero_grad()
        sums = Sums()
        if len(share := self._share(batch)):
            losses = self._losses(share, self._num_depths())
            torch.autograd.backward(losses.loss)
            sums.add(losses)
        seconds = clock() if self._processes.is_main else 0.0
        seconds, *numbers = self._processes.sum_numbers([seconds, *sums.pack()])
        sums = Sums.unpack(numbers)
        self._check_finite(sums.loss, "loss")
        self._processes.sum_gradients(self._parameters)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.div_(max(sums.num_positions, 1.0))
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, LARGEST_GRADIENT_NORM))
        self._check_finite(norm, "gradient")
        self._optimizers.step(rate_share)
        is_last = place.batch + 1 == len(batches)
        self.position = replace(
            place,
            step=place.step + 1,
            epoch=place.epoch + is_last,
            batch=0 if is_last else place.batch + 1,
            tokens=place.tokens + int(self._lengths[batch].sum()),
            seconds=seconds,
        )
        self._log.write(
            self._entry(sums) | {"learning_rate": rate_share * settings.learning_rate, "gradient_norm": norm}
        )

    def _num_depths(self) -> int | None:
        """Return how many depths the next step trains, None = all."""
        settings = self._settings
        if settings.ttt_steps is None or settings.ttt_growth is None:
            return None
        return ttt_steps_at(self.progress, settings.ttt_steps, settings.ttt_growth)

    def _count_watched(self, sequences: NDArray[np.int64]) -> int:
        """Return how many held-back sequences a validation reads: one at least, and few beside what is trained."""
        tokens = np.cumsum(self._lengths[sequences])
        return max(1, int((tokens <= VALIDATION_WORK * self._settings.validation_tokens).sum()))

    def _validate(self, say: Say) -> None:
        self._head.eval()
        sums = Sums()
        with torch.no_grad():
            for batch in self._validation:
                if len(share := self._share(batch)):
                    sums.add(self._losses(share, VALIDATION_DEPTHS))
        sums = Sums.unpack(self._processes.sum_numbers(sums.pack()))
        self._log.write({**self._entry(sums), "is_validation": True})
        rates = " ".join(f"{rate:.3f}" for rate in sums.acceptance)
        say(f"{self.position.tokens} tokens, held back: loss {sums.mean_loss:.4f}, accepted by depth {rates}")

    def _losses(self, sequences: NDArray[np.int64], num_depths: int | None = None) -> HeadLoss:
        batch = load_batch(self._examples, sequences, self._processes.device)
        is_half = self._precision != torch.float32
        with torch.autocast(self._processes.device.type, self._precision, enabled=is_half):
            return self._head.losses(batch, num_depths)

    def _share(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's sequences of a batch, every so many of those sorted by length."""
        return batch[self._processes.index :: self._processes.count]

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        if self._epoch[0] != epoch:
            batches = make_batches(
                self._training, self._lengths, self._settings.batch_tokens, self._settings.seed, epoch
            )
            self._epoch = (epoch, batches)
        return self._epoch[1]

    def _entry(self, sums: Sums) -> dict[str, object]:
        place = self.position
        return {
            "step": place.step,
            "tokens": place.tokens,
            "seconds": round(place.seconds, 3),
            "loss": sums.mean_loss,
            "accuracy": sums.accuracy,
            "acceptance": sums.acceptance,
        }

    def _save(self) -> None:
        if not self._processes.is_main:
            return
        self.position = replace(self.position, log_bytes=self._log.sync())
        head, optimizer = self._head.state_dict(), self._optimizers.state_dict()
        save_state(self._directory, State(self.position, self._made_from, head, optimizer))

    def _continue(self) -> None:
        """Take up the state of this training where there is one, and forget that of another."""
        state = load_state(self._directory)
        if state is not None and dict(state.made_from) == self._made_from:
            self._head.load_state_dict(state.head)
            self._optimizers.load_state_dict(state.optimizer)
            self.position = state.position
        self._processes.wait()
        self._log.cut(self.position.log_bytes)

    def _check_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            where = f"step {self.position.step + 1} ({self.position.tokens} tokens)"
            cure = "lower train.learning_rate and train.matrix_learning_rate, or set train.precision to float32"
            raise TrainingError(where, f"the {name} is finite", value, cure)

    def _check_split(self) -> None:
        cure = "gather more answers (train.answer_tokens), or change train.validation_share"
        for sequences, name in ((self._training, "train on"), (self._held_back, "hold back")):
            if not len(sequences):
                got = f"none of {len(self._lengths)} in which an answer is predicted"
                raise TrainingError("training data", f"there are sequences to {name}", got, cure)
