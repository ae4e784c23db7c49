"""The optimisation loop, on a head of a few weights."""

from __future__ import annotations

import doctest
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftline.training.schedule
from draftline.errors import ArtifactError, TrainingError
from draftline.training.checkpoint import STATE_FILE, load_state
from draftline.training.examples import Examples
from draftline.training.loading import load_batch
from draftline.training.processes import Processes, choose_precision
from draftline.training.report import LOG_FILE, load_log, write_plots, write_table
from draftline.training.schedule import rate_share_at, ttt_steps_at
from draftline.training.trainer import Trainer
from tests.training.small_training import SmallHead, small_examples, small_settings, small_trainer, train_small

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from draftline.training.processes import Processes
from tests.training.small_training import SmallHead, small_settings, train_small
torch.set_num_threads(1)
directory, pause, noise = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
losses = SmallHead.losses
def slow(head, batch, num_depths=None):
    time.sleep(pause)
    return losses(head, batch, num_depths)
SmallHead.losses = slow
train_small(directory, small_settings(checkpoint_minutes=1e-6), noise=noise)
Processes().leave()
"""


def curve(directory: Path) -> list[dict[str, Any]]:
    """Return the log without what depends on the clock."""
    entries = [json.loads(line) for line in (directory / LOG_FILE).read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def run_script(directory: Path, *words: str, pause: float = 0.0, noise: float = 0.0) -> list[str]:
    return [sys.executable, *words, "-c", SCRIPT, str(directory), str(pause), str(noise)]


def test_training_lowers_the_loss_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    trainer = small_trainer(tmp_path, small_settings(epochs=20))
    assert trainer.describe().startswith("0.0 M weights, matrices in float32, 1 process(es), 3")
    place = trainer.run(lambda done, total: None, said.append)
    steps, validations = load_log(tmp_path / LOG_FILE)
    assert (place.step, place.is_finished) == (len(steps), True)
    assert steps[-1]["loss"] < 0.2 * steps[0]["loss"]
    assert validations[-1]["accuracy"] == [1.0, 1.0]
    assert [entry["tokens"] for entry in validations][0 :: len(validations) - 1] == [0, place.tokens]
    assert said[-1].startswith(f"{place.tokens} tokens, held back: loss 0.")
    assert write_table(tmp_path).splitlines()[-1].endswith(" 1.000 1.000")
    assert [path.read_bytes()[:4] for path in write_plots(tmp_path)] == [b"\x89PNG", b"\x89PNG"]


def test_a_validation_reads_a_tenth_of_what_is_trained_between_two(tmp_path: Path) -> None:
    num_held_back = len(small_trainer(tmp_path, small_settings(validation_share=0.5))._held_back)
    for tokens, expected in ((1000, range(2, num_held_back)), (1, [1]), (10**6, [num_held_back])):
        trainer = small_trainer(tmp_path, small_settings(validation_share=0.5, validation_tokens=tokens))
        watched = np.concatenate(trainer._validation)
        assert len(watched) in expected
        assert len(watched) == 1 or trainer._lengths[watched].sum() <= tokens / 10


def test_the_rate_rises_and_falls_to_nothing(tmp_path: Path) -> None:
    train_small(tmp_path, small_settings(warmup_share=0.25))
    rates = [entry["learning_rate"] for entry in load_log(tmp_path / LOG_FILE)[0]]
    top = int(np.argmax(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.15 < top / len(rates) < 0.35
    assert (rates[0], rates[-1] < 0.02 * max(rates)) == (0.0, True)
    assert doctest.testmod(draftline.training.schedule).failed == 0
    assert rate_share_at(0.5, 1.0) == 0.5


def test_the_unrolled_steps_grow_during_their_share_of_the_training(tmp_path: Path) -> None:
    def depths(directory: str, **changes: Any) -> list[int]:
        train_small(tmp_path / directory, small_settings(**changes))
        return [len(entry["acceptance"]) for entry in load_log(tmp_path / directory / LOG_FILE)[0]]

    grown = depths("grown", method="eagle3", ttt_steps=2, ttt_growth=0.8)
    assert grown == sorted(grown)
    assert 0.3 < grown.count(1) / len(grown) < 0.5
    assert set(depths("published", method="eagle3", ttt_steps=2)) == {2}
    assert set(depths("other", method="eagle1")) == {2}
    assert ttt_steps_at(0.0, 5, 0.0) == 5
    assert [ttt_steps_at(share, 3, 1.0) for share in (0.0, 0.34, 0.67, 1.0)] == [1, 2, 3, 3]


def test_minutes_end_a_training_early_with_a_low_rate(tmp_path: Path) -> None:
    seconds = 1.0
    started = time.monotonic()
    trainer = train_small(tmp_path, small_settings(epochs=100000, budget_minutes=seconds / 60))
    assert time.monotonic() - started < 10
    rates = [entry["learning_rate"] for entry in load_log(tmp_path / LOG_FILE)[0]]
    assert trainer.position.seconds >= seconds
    assert rates[-1] < 0.05 * max(rates)


def test_a_killed_training_goes_on_with_the_identical_curve(tmp_path: Path) -> None:
    whole = train_small(tmp_path / "whole", noise=0.1)
    killed = tmp_path / "killed"
    process = subprocess.Popen(run_script(killed, pause=0.05, noise=0.1), cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while (state := load_state(killed) if killed.exists() else None) is None or state.position.step < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(curve(killed)) < len(curve(tmp_path / "whole"))
    torch.set_num_threads(1)
    resumed = train_small(killed, small_settings(checkpoint_minutes=1e-6), noise=0.1)
    assert curve(killed) == curve(tmp_path / "whole")
    assert torch.equal(resumed._head.weight, whole._head.weight)


def test_two_processes_give_the_curve_of_one(tmp_path: Path) -> None:
    """The tolerance is what another order of float32 additions costs: 1e-4 of the loss."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), str(tmp_path / "two"), "0", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    train_small(tmp_path / "one")
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [entry["tokens"] for entry in one] == [entry["tokens"] for entry in two]
    losses = [[entry["loss"] for entry in entries] for entries in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4, atol=1e-6)


def test_a_finished_training_does_nothing_and_another_one_starts_anew(tmp_path: Path) -> None:
    train_small(tmp_path)
    before = (tmp_path / LOG_FILE).read_bytes()
    train_small(tmp_path)
    assert (tmp_path / LOG_FILE).read_bytes() == before
    head = SmallHead(seed=1)
    trainer = Trainer(head, small_examples(), small_settings(), tmp_path, {"data": "other"}, Processes())
    assert (trainer.position.step, (tmp_path / LOG_FILE).read_bytes()) == (0, b"")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_no_number_ends_the_training_with_the_step(tmp_path: Path, what: str) -> None:
    trainer = small_trainer(tmp_path)
    trainer._step(lambda: 0.0)
    if what == "loss":
        trainer._head.weight.data.fill_(math.nan)
    else:
        trainer._head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=rf"step 2 \(\d+ tokens\): the {what} is finite; got nan; lower train.lear"):
        trainer._step(lambda: 0.0)


def test_data_of_one_prompt_are_refused(tmp_path: Path) -> None:
    arguments = (small_settings(), tmp_path, {}, Processes())
    with pytest.raises(TrainingError, match="there are sequences to train on; got none of 1"):
        Trainer(SmallHead(), small_examples(num_sequences=1), *arguments)
    assert len(Trainer(SmallHead(), small_examples(num_sequences=2), *arguments)._held_back) == 1


def test_a_damaged_state_and_a_lost_log_are_told(tmp_path: Path) -> None:
    train_small(tmp_path)
    (tmp_path / LOG_FILE).write_text("")
    with pytest.raises(ArtifactError, match=r"the log has the \d+ bytes of its checkpoint; got 0 bytes"):
        small_trainer(tmp_path)
    data = (tmp_path / STATE_FILE).read_bytes()
    (tmp_path / STATE_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match=r"state.pt: is the state of a training; got .*; move it away"):
        small_trainer(tmp_path)


def test_a_batch_is_padded_behind(tmp_path: Path) -> None:
    examples: Examples = small_examples()
    batch = load_batch(examples, np.array([3, 5]), torch.device("cpu"))
    for row, number in enumerate((3, 5)):
        start, end = examples.sequence_starts[number : number + 2]
        assert batch.is_real[row].sum() == end - start
        assert batch.token_ids[row, : end - start].tolist() == examples.token_ids[start:end].tolist()
        assert np.array_equal(batch.features[row, : end - start].numpy(), examples.features[start:end])
        assert not batch.features[row, end - start :].any()


def test_precision() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("float32", cpu) == torch.float32
    assert choose_precision("bfloat16", cpu) == torch.bfloat16
    flags = Path("/proc/cpuinfo").read_text()
    expected = torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32
    assert choose_precision("auto", cpu) == expected
