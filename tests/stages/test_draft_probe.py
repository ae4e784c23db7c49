"""A probe measures what references of drafts say of the target's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import load_head_config
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.sessions.draft_builder import DraftSource
from draftline.stages.answers import NUM_CANDIDATES as NUM_TARGET_CANDIDATES
from draftline.stages.draft_probe import NUM_CANDIDATES, DraftProbe, open_probe
from tests.sessions.draft_references import EagleReference, TargetReference, medusa_log_probs
from tests.sessions.tiny_engines import convert_tiny_draft
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_layouts import NUM_LAYERS, ROWS

PROMPTS = [list(range(5, 25)), list(range(60, 75)), [7, 9]]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probe")
    published = write_tiny_checkpoint(directory / "published", num_layers=NUM_LAYERS)
    convert_checkpoint(published, directory / "converted", "float32", lambda done, total: None)
    return directory / "converted"


@contextmanager
def opened(
    target: Path, scratch: Path, method: str, folder: Path, readings: tuple[HeadConfig, ...] = ()
) -> Iterator[DraftProbe]:
    source = DraftSource(method, folder, "float32")  # type: ignore[arg-type]
    with open_probe(target, source, PROMPTS, (), 64, scratch, readings=readings, num_threads=1) as probe:
        yield probe


def test_a_target_is_accepted_everywhere_by_itself(target: Path, tmp_path: Path) -> None:
    with opened(target, tmp_path, "draft_model", target) as probe:
        assert probe.guesses().proposed.tolist() == [token for ids in PROMPTS for token in ids[1:]]
        probe.go_on(5)
        found = probe.measure(None)
        probe.go_on(20)
        more = probe.measure(None)
    assert (found.lengths, more.lengths) == ((5, 5, 5), (20, 20, 20))
    assert found.acceptance_rate == more.acceptance_rate == 1.0
    assert more.choices.reshape(3, 20)[:, :5].tolist() == found.choices.reshape(3, 5).tolist(), "answers go on"
    assert list(tmp_path.iterdir()) == [], "the engine is gone"


def test_answers_end_where_they_may_not_go_on(target: Path, tmp_path: Path) -> None:
    with opened(target, tmp_path, "draft_model", target) as probe:
        probe.go_on(1000)
        found = probe.measure(None)
    assert found.lengths == tuple(64 - len(ids) for ids in PROMPTS)
    end = int(found.choices[3])
    source = DraftSource("draft_model", target, "float32")
    with open_probe(target, source, PROMPTS, {end}, 64, tmp_path, num_threads=1) as probe:
        probe.go_on(1000)
        assert probe.measure(None).lengths[0] == 1 + found.choices.tolist().index(end)


@pytest.mark.parametrize("row", ["specforge", "eagle1"])
def test_heads_propose_what_their_reference_does(target: Path, tmp_path: Path, row: str) -> None:
    """Other layers and another base are measured on the same answers, as heads of those configurations."""
    published = target.parent / "published"
    source = ROWS[row].write(tmp_path / "source", published)
    folder = convert_tiny_draft(tmp_path, ROWS[row].method, source, target, "float32")
    head = load_head_config(folder)
    readings = [head, replace(head, rotary_base=300.0)]
    if head.captured_layers:
        readings.append(replace(head, captured_layers=(2, 3, 5)))
    reference = TargetReference(published)
    texts = answers(reference)
    with opened(target, tmp_path, ROWS[row].method, folder, tuple(readings)) as probe:
        probe.go_on(NUM_TOKENS)
        for reading in readings:
            found = probe.measure(reading)
            assert found.lengths == (NUM_TOKENS,) * 3
            expected = EagleReference(source, reference, reading.captured_layers)
            expected.config["rope_theta"] = reading.rotary_base
            position = 0
            for prompt, ids in zip(PROMPTS, texts, strict=True):
                for row_number in range(len(prompt) - 1, len(ids) - 1):
                    assert found.choices[position] == ids[row_number + 1]
                    log_probs = expected.log_probs(ids[: row_number + 1], row_number)
                    assert found.proposed[position] == log_probs.argmax()
                    overlap = overlap_of(reference.log_probs(ids[: row_number + 1])[-1], log_probs)
                    np.testing.assert_allclose(found.overlap[position], overlap, atol=1e-5)
                    position += 1


def test_medusa_proposes_what_its_first_head_does(target: Path, tmp_path: Path) -> None:
    published = target.parent / "published"
    source = ROWS["medusa-v1"].write(tmp_path / "source", published)
    folder = convert_tiny_draft(tmp_path, "medusa", source, target, "float32")
    head, reference = load_head_config(folder), TargetReference(published)
    with opened(target, tmp_path, "medusa", folder, (head,)) as probe:
        probe.go_on(NUM_TOKENS)
        found = probe.measure(head)
    expected = [
        medusa_log_probs(source, reference, ids[:-2], 1)[len(prompt) - 2 :, 0].argmax(-1)
        for prompt, ids in zip(PROMPTS, answers(reference), strict=True)
    ]
    assert found.proposed.tolist() == np.concatenate(expected).tolist()


def test_offsets_are_read_as_ids(target: Path, tmp_path: Path) -> None:
    """A draft id's target is d2t itself then, and every probability stays."""
    source = ROWS["specforge"].write(tmp_path / "source", target.parent / "published")
    folder = convert_tiny_draft(tmp_path, "eagle3", source, target, "float32")
    head = load_head_config(folder)
    with opened(target, tmp_path, "eagle3", folder, (head,)) as probe:
        probe.go_on(NUM_TOKENS)
        found, of_ids = probe.measure(head), probe.measure(head, has_ids=True)
    path = folder / "rank0.safetensors"
    offsets = np.array(map_tensor(path, tensor_locations(path)["d2t"]))
    draft_ids = {int(draft_id + offset): int(offset) for draft_id, offset in enumerate(offsets)}
    assert of_ids.proposed.tolist() == [draft_ids[token] for token in found.proposed.tolist()]
    assert of_ids.choices.tolist() == found.choices.tolist()


def answers(reference: TargetReference) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            ids.append(int(reference.log_probs(ids)[-1].argmax()))
        texts.append(ids)
    return texts


def overlap_of(target: NDArray[np.float64], draft: NDArray[np.float64]) -> float:
    """The sum of the smaller probabilities over tokens that are among the best of both."""
    best = set(np.argsort(-target)[:NUM_TARGET_CANDIDATES]) & set(np.argsort(-draft)[:NUM_CANDIDATES])
    return float(sum(np.exp(min(target[token], draft[token])) for token in best))
