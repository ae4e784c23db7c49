"""The target answers prompts, and its answers and features are kept: the same ones whatever is killed."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import ArtifactError, CheckpointError, DraftlineError, PipelineError
from draftline.generation import load_engine
from draftline.manifest import lock_directory
from draftline.runtime.request import FinishReason, SamplingParameters
from draftline.training.answers import AnswersSummary, answer_prompts
from draftline.training.examples import INDEX_FILE, Examples, open_examples
from draftline.training.prompts import HeldOutTexts, Prompt
from draftline.training.turns import Turns, derive_seed
from tests.sessions.draft_references import TargetReference
from tests.sessions.tiny_engines import build_tiny_engine
from tests.training.answering import describe_tiny, make_prompts, write_converted_target

MANY = 10**9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted_target(tmp_path_factory.mktemp("answers"))


def by_name(examples: Examples) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return tokens, masks and features of every sequence."""
    starts = examples.sequence_starts.tolist()
    return {
        name: tuple(array[start:end].tobytes() for array in (examples.token_ids, examples.is_answer, examples.features))
        for name, start, end in zip(examples.names, starts[:-1], starts[1:], strict=True)
    }


def test_answers_are_those_of_any_engine_and_features_those_of_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    """More prompts than places, longer than a step: chunks, and places that are taken again."""
    prompts = make_prompts(24)
    description = describe_tiny(checkpoint)
    summary = answer_prompts(
        prompts, checkpoint, tmp_path / "data", description, num_answer_tokens=MANY, max_repeats=1, max_batch_size=4
    )
    examples = open_examples(tmp_path / "data")
    assert sorted(examples.names) == sorted(prompt.name for prompt in prompts)
    tokenizer = load_tokenizer(checkpoint)
    turns = Turns(tokenizer)
    with load_engine(build_tiny_engine(tmp_path, checkpoint.parent / "target")) as loaded:
        sampling = [SamplingParameters(0.8, seed=derive_seed(5, prompt.name)) for prompt in prompts]
        asked = [turns.asking(prompt.text) for prompt in prompts]
        answers = loaded.generate(asked, 24, sampling)
    reference = TargetReference(checkpoint.parent / "target")
    starts = dict(zip(examples.names, itertools.pairwise(examples.sequence_starts), strict=True))
    num_ends = 0
    for prompt, prompt_ids, answer in zip(prompts, asked, answers, strict=True):
        rows = slice(*starts[prompt.name])
        ended = [2] if answer.finish_reason == "end_id" else []
        num_ends += len(ended)
        token_ids = [*prompt_ids, *answer.token_ids, *ended]
        assert examples.token_ids[rows].tolist() == token_ids
        is_answer = [False] * len(prompt_ids) + [True] * (len(answer.token_ids) + len(ended))
        assert examples.is_answer[rows].tolist() == is_answer
        hidden = reference.hidden(token_ids[:-1])
        expected = np.concatenate([hidden[1], hidden[2], hidden[-1]], axis=-1)
        found = examples.features[rows]
        np.testing.assert_allclose(found[:-1], expected, rtol=1e-3, atol=1e-3)
        assert not found[-1].any()
    assert num_ends > 0
    assert summary == AnswersSummary(
        24, len(examples.token_ids), int(examples.is_answer.sum()), {}, int(examples.is_answer.sum()), summary.seconds
    )
    assert not (tmp_path / "data" / "engine").exists()


KILLED = """
import sys
from pathlib import Path
from draftline.training import asking
from draftline.training.answers import answer_prompts
from tests.training.answering import describe_tiny, make_prompts
asking._COMMIT_SECONDS = 0.05
checkpoint, directory = map(Path, sys.argv[1:])
answer_prompts(
    make_prompts(200), checkpoint, directory, describe_tiny(checkpoint), num_answer_tokens=10**9, max_repeats=1,
    max_batch_size=4, num_threads=1, quiet=True,
)
"""


def test_runs_that_are_killed_give_the_answers_of_one_that_is_not(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(tmp_path / "killed")]
    index = tmp_path / "killed" / INDEX_FILE
    for num_lines in (40, 90):
        with subprocess.Popen(command) as process:
            deadline = time.monotonic() + 60
            while not index.exists() or len(index.read_bytes().splitlines()) < num_lines:
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.kill()
        assert process.returncode == -signal.SIGKILL
    num_kept = len(open_examples(tmp_path / "killed").names)
    assert 90 <= num_kept < 200
    description, prompts = describe_tiny(checkpoint), make_prompts(200)
    options = {"num_answer_tokens": MANY, "max_repeats": 1, "quiet": True}
    summary = answer_prompts(prompts, checkpoint, tmp_path / "killed", description, **options)
    answer_prompts(prompts, checkpoint, tmp_path / "whole", description, **options)
    killed, whole = open_examples(tmp_path / "killed"), open_examples(tmp_path / "whole")
    assert by_name(killed) == by_name(whole)
    assert len(killed.names) == 200
    assert 0 < summary.num_new_tokens < summary.num_answer_tokens == int(killed.is_answer.sum())
    again = answer_prompts(prompts, checkpoint, tmp_path / "killed", description, **options)
    assert (again.num_new_tokens, again.num_sequences) == (0, 200)


def test_prompts_repeat_with_other_seeds_until_there_are_enough(checkpoint: Path, tmp_path: Path) -> None:
    prompts = make_prompts(3)
    options = {"max_batch_size": 2, "quiet": True}
    summary = answer_prompts(
        prompts, checkpoint, tmp_path / "data", describe_tiny(checkpoint), num_answer_tokens=200, **options
    )
    assert 200 <= summary.num_answer_tokens < 200 + 6 * 24
    examples = open_examples(tmp_path / "data")
    assert {"letters/0", "letters/1", "letters/2", "letters/0#2", "letters/1#2", "letters/2#2"} < set(examples.names)
    assert len(set(by_name(examples).values())) == len(examples.names)
    more = answer_prompts(
        prompts, checkpoint, tmp_path / "data", describe_tiny(checkpoint), num_answer_tokens=400, **options
    )
    assert more.num_answer_tokens >= 400
    assert more.num_new_tokens == more.num_answer_tokens - summary.num_answer_tokens
    greedy = describe_tiny(checkpoint, temperature=0)
    assert answer_prompts(prompts, checkpoint, tmp_path / "greedy", greedy, num_answer_tokens=200).num_sequences == 3


def test_time_ends_a_run_with_what_was_asked(checkpoint: Path, tmp_path: Path) -> None:
    prompts, description = make_prompts(2000), describe_tiny(checkpoint)
    summary = answer_prompts(
        prompts, checkpoint, tmp_path, description, num_answer_tokens=MANY, minutes=0.5 / 60, max_batch_size=2
    )
    assert 0 < summary.num_sequences < 2000
    assert summary.seconds < 10
    assert len(open_examples(tmp_path).names) == summary.num_sequences


def test_a_target_writes_turns_of_the_user(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random target writes no requests: take what it wrote for one, but for the rules."""
    read = Turns.read
    texts: dict[str, str | None] = {}

    def read_words(turns: Turns, token_ids: Sequence[int], finish_reason: FinishReason) -> tuple[str, str | None]:
        text, rule = read(turns, token_ids, finish_reason)
        if rule == "the user's turn is too long" and len(texts) % 2:
            text, rule = f"please {len(texts)}", None
        texts[text] = rule
        return text, rule

    monkeypatch.setattr(Turns, "read", read_words)
    prompts = [Prompt(f"own/{number}", "") for number in range(30)]
    summary = answer_prompts(
        prompts, checkpoint, tmp_path, describe_tiny(checkpoint), num_answer_tokens=MANY, max_repeats=1, quiet=True
    )
    asked = [text for text, rule in texts.items() if rule is None]
    assert summary.num_sequences == len(asked) > 0
    assert summary.num_skipped == open_examples(tmp_path).num_skipped
    assert sum(summary.num_skipped.values()) == 30 - len(asked)
    examples, tokenizer = open_examples(tmp_path), load_tokenizer(checkpoint)
    found = set()
    for first, end in itertools.pairwise(examples.sequence_starts):
        is_answer = examples.is_answer[first:end]
        prompt_ids = examples.token_ids[first:end][~is_answer]
        found.add(tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert found == {chat.format(text) for text in asked}


def test_a_target_that_writes_no_requests_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "the user's turn is empty"
    monkeypatch.setattr(Turns, "read", lambda turns, token_ids, finish_reason: ("", rule))
    prompts = [Prompt(f"own/{number}", "") for number in range(3)]
    message = rf"train.prompts: `own` has the target write requests; got 64 without one; the last: {rule}; leave `own`"
    with pytest.raises(PipelineError, match=message):
        answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint), num_answer_tokens=MANY, minutes=1)


def test_a_held_out_prompt_that_the_target_wrote_is_left_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = HeldOutTexts({"mt-bench/1": "How old is the sun?"})
    monkeypatch.setattr("draftline.training.asking.installed_held_out", lambda: held_out)
    monkeypatch.setattr(Turns, "read", lambda turns, token_ids, finish_reason: ("how old is the sun", None))
    summary = answer_prompts(
        [Prompt("own/1", "")], checkpoint, tmp_path, describe_tiny(checkpoint), num_answer_tokens=MANY, max_repeats=1
    )
    assert summary.num_skipped == {"the user's turn holds a held-out prompt": 1}


def test_what_cannot_be_asked_is_counted_once(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [Prompt("long", "x" * 600), Prompt("short", "x")]
    options = {"num_answer_tokens": MANY, "max_repeats": 3, "quiet": True}
    summary = answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint), **options)
    assert summary.num_skipped == {"the prompt has more than 488 tokens": 1}
    assert set(open_examples(tmp_path).names) == {"short", "short#2", "short#3"}
    with pytest.raises(PipelineError, match=r"train.max_answer_tokens: leaves room for a prompt within 512 tokens"):
        answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint, max_tokens=512), **options)


def test_a_store_has_answers_of_one_kind_and_one_writer(checkpoint: Path, tmp_path: Path) -> None:
    prompts = make_prompts(2)
    answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint), num_answer_tokens=10, quiet=True)
    with pytest.raises(ArtifactError, match=r"description.json: seed: is that of the answers to add, 6; got 5"):
        answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint, seed=6), num_answer_tokens=10)
    with lock_directory(tmp_path), pytest.raises(ArtifactError, match="one run at a time"):
        answer_prompts(prompts, checkpoint, tmp_path, describe_tiny(checkpoint), num_answer_tokens=20)


def test_a_disk_that_is_too_small_is_found_before_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.training.answers.open_answering_engine", None)
    with pytest.raises(CheckpointError, match=r"the disk has room for 38900000000000 bytes; got [0-9]+ bytes free"):
        answer_prompts(
            make_prompts(2),
            checkpoint,
            tmp_path,
            describe_tiny(checkpoint),
            num_answer_tokens=10**11,
            max_repeats=10**12,
        )


def test_activations_beyond_float16_are_an_error(tmp_path: Path) -> None:
    checkpoint = write_converted_target(tmp_path)
    weights = tmp_path / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e6
    save_file(tensors, weights, {"format": "pt"})
    shutil.rmtree(checkpoint)
    convert_checkpoint(tmp_path / "target", checkpoint, "float32", lambda done, total: None)
    with pytest.raises(ArtifactError, match=r"letters/0\S*: features of a sequence are numbers of float16"):
        answer_prompts(make_prompts(1), checkpoint, tmp_path / "data", describe_tiny(checkpoint), num_answer_tokens=9)


def test_a_target_without_logits_is_an_error(tmp_path: Path) -> None:
    checkpoint = write_converted_target(tmp_path)
    data = bytearray((checkpoint / "rank0.safetensors").read_bytes())
    data[-4:] = np.array([np.nan], np.float32).tobytes()
    (checkpoint / "rank0.safetensors").write_bytes(data)
    with pytest.raises(DraftlineError, match=r"letters/0: a step of the engine succeeds; got .*logits are finite"):
        answer_prompts(make_prompts(1), checkpoint, tmp_path / "data", describe_tiny(checkpoint), num_answer_tokens=9)
