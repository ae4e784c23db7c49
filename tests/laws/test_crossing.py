"""Borders inside a run: the draft's last position, the target's, and those of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.runtime.request import SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.likely_models import write_likely_eagle1, write_likely_eagle3, write_perturbed
from tests.laws.traffic import AUTO, CHAIN, DYNAMIC, assert_said_plainly, make_request

SAMPLED = [SamplingParameters(), SamplingParameters(0.8, top_k=20, seed=3)]
SHORT = 24  # positions of the drafts
LENGTH = 120  # of prompt and answer


@pytest.fixture(scope="module")
def short_drafts(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Drafts that know no position behind 23."""
    directory, target = tmp_path_factory.mktemp("short"), engines.target("llama")
    limit = {"max_position_embeddings": SHORT}
    return {
        "itself": ("draft_model", write_perturbed(directory / "itself", target, noise=0.0, **limit)),
        "eagle1": ("eagle1", write_likely_eagle1(directory / "eagle1", target, **limit)),
        "eagle3": ("eagle3", write_likely_eagle3(directory / "eagle3", target, **limit)),
    }


@pytest.mark.parametrize("drafts", ["itself", "eagle1", "eagle3", "itself+eagle1"])
@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC, AUTO], ids=["chain", "dynamic", "auto"])
def test_decoding_goes_on_behind_the_drafts_last_position(
    engines: Engines, short_drafts: dict[str, tuple[Any, Path]], drafts: str, shape: TreeShape
) -> None:
    """Prompts before, at and behind the draft's last position, whose prefixes are found again."""
    extra = tuple(short_drafts[name] for name in drafts.split("+"))
    requests = [
        make_request(f"{again}{length}", range(3, 3 + length), LENGTH - length, sampling=SAMPLED[length % 2])
        for again in ("", "again-")
        for length in (1, 18, 20, 21, 22, 23, 24, 25, 60)
    ]
    plain = engines.open().serve().run_all(requests)
    traffic = engines.open("llama", "", shape, extra=extra).serve(max_num_tokens=40, max_batch_size=8)
    traffic.run_all(requests)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
        numbers = traffic.said(name).last.metrics
        assert numbers is not None
        # A head's last row predicts the token behind the next, and the prompt's last token may be a root.
        room = SHORT - (LENGTH - int(numbers.num_output_tokens))
        assert numbers.speculation.num_drafted_tokens <= max(0, room + 2) * (shape.max_nodes - 1)
    statistics = traffic.core.statistics()
    assert statistics.speculation.num_accepted_tokens > 0
    assert statistics.num_cached_tokens > 0


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
@pytest.mark.parametrize("drafts", ["itself", "eagle1", "medusa", "ngram+eagle3"])
def test_requests_end_exactly_at_max_seq_len(engines: Engines, drafts: str, shape: TreeShape) -> None:
    """The last tokens stand on positions that no tree may leave; every offset of a run meets the end."""
    engine = engines.open("llama", drafts, shape, max_seq_len=64, block_size=8, max_blocks=8)
    requests = [make_request(str(length), range(3, 3 + length), 64 - length) for length in range(40, 64)]
    plain = engines.open().serve().run_all(requests)
    traffic = engine.serve(max_batch_size=1)
    for name, said in traffic.run_all(requests).items():
        assert_said_plainly(said, plain[name])
        assert said.last.finish_reason == "max_tokens"
        assert len(said.token_ids) == 64 - int(name)


@pytest.mark.parametrize("drafts", ["itself", "itself+eagle1", "eagle1", "eagle3"])
def test_runs_cross_blocks_at_every_offset(engines: Engines, drafts: str) -> None:
    """Chains of 4 behind prompts of 1..16 tokens, in blocks of 8, so that a run is split after each of its tokens."""
    engine = engines.open("llama", drafts, CHAIN, block_size=8)
    requests = [make_request(str(length), range(3, 3 + length), 30) for length in range(1, 17)]
    plain = engines.open().serve().run_all(requests)
    traffic = engine.serve()
    splits = set()
    for request in requests:
        traffic.add(request)
    while not traffic.core.is_idle:
        for sequence, output in traffic.step():
            if output.num_accepted_tokens == 4:
                splits.add((sequence.num_tokens - 5) % 8)
    traffic.run()
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert len(splits) == 8 or drafts != "itself"
