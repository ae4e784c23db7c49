"""Candidates of draft sessions equal those of independent references, in trees, ragged batches and later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.sessions.batch_split import StepCost
from draftline.sessions.engine_config import DraftMethod, load_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.protocol import DraftResult
from draftline.speculation import TreeShape
from tests.sessions.draft_references import EagleReference, TargetReference
from tests.sessions.draft_steps import DraftSteps
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3

pytestmark = pytest.mark.usefixtures("_one_torch_thread")

K = 4
TREE = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=K)
TOLERANCE = 1e-4  # both sides sum in other orders; 1e-5 in practice
PROMPT_LENGTHS = (3, 17, 40)  # inside a block, over one border, over two; the chunks end at 1, 15 and 33
FIRST_CHUNKS = (1, 15, 33)


class Case(NamedTuple):
    method: DraftMethod
    options: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "eagle1": Case("eagle1"),
    "eagle1-no-bias": Case("eagle1", {"bias": False, "own_embedding": False}),
    "eagle2-two-layers": Case("eagle2", {"num_layers": 2, "qkv_bias": True}),
    "eagle3": Case("eagle3"),
    "eagle3-rotary": Case(
        "eagle3", {"extra_config": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}}
    ),
    "eagle3-whole-vocabulary": Case("eagle3", {"draft_vocab_size": None, "own_lm_head": False}),
    "eagle3-wider": Case("eagle3", {"hidden_size": 96, "own_embedding": True, "captured_layers": (0, 1, 2)}),
    "draft-model": Case("draft_model"),
    "draft-model-padded": Case("draft_model", {"vocab_size": 336, "tie": True}),
    "draft-model-less-padded": Case("draft_model", {"vocab_size": 300}),
}


class Opened(NamedTuple):
    target: OnnxRuntimeSession
    draft: OnnxRuntimeDraftSession
    log_probs: Callable[[list[int], int], NDArray[np.float64]]  # behind a text, whose first rows are known
    lag: int  # 1: row t of the drafter holds token t + 1


def open_case(directory: Path, case: Case, kernels: Kernels, **options: Any) -> Opened:
    checkpoint = write_tiny_checkpoint(directory / "target", num_layers=4)
    source = directory / "draft"
    if case.method == "draft_model":
        write_tiny_checkpoint(source, seed=5, **case.options)
    elif case.method == "eagle3":
        write_tiny_eagle3(source, checkpoint, **{"captured_layers": (0, 2), **case.options})
    else:
        write_tiny_eagle1(source, checkpoint, **case.options)
    drafts: list[tuple[DraftMethod, Path | None]] = [("ngram", None), (case.method, source)]
    engine = build_tiny_engine(directory, checkpoint, kernels=kernels, drafts=drafts, tree=TREE, **options)
    config = load_engine_config(engine)
    target = OnnxRuntimeSession(engine, config)
    draft = OnnxRuntimeDraftSession(engine, config, 1, target)
    if case.method == "draft_model":
        model = TargetReference(source)
        return Opened(target, draft, lambda tokens, known: _log_probs_of(model.log_probs(tokens)[-1]), 0)
    captured = case.options.get("captured_layers", (0, 2)) if case.method == "eagle3" else ()
    head = EagleReference(source, TargetReference(checkpoint), captured)
    return Opened(target, draft, head.log_probs, 1)


def _log_probs_of(logits: NDArray[np.float64], vocab_size: int = 320) -> NDArray[np.float64]:
    kept = logits[:vocab_size]
    values: NDArray[np.float64] = kept - np.logaddexp.reduce(kept)
    return values


def check(result: DraftResult, row: int, expected: NDArray[np.float64]) -> None:
    best = np.sort(expected)[::-1][:K]
    np.testing.assert_allclose(result.log_probs[row], best, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(expected[result.token_ids[row]], best, rtol=0, atol=TOLERANCE)


class Run:
    """Three texts under a target session and a draft session that share slots."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        blocks = [list(range(6)), [40, 9, 30, 31, 12, 13], list(range(20, 26))]
        self.target_texts = [Text(list(ids)) for ids in blocks]
        self.draft_texts = [Text(list(ids)) for ids in blocks]
        self.steps = DraftSteps(opened.draft, self.draft_texts, is_head=opened.lag == 1)

    def extend(self, chunks: list[list[int]], following: list[int], with_candidates: bool = True) -> DraftResult:
        """Run and commit ``chunks`` in the target, then in the drafter; ``following[b]`` is the token behind them."""
        batch = make_batch(self.target_texts, chunks)
        self.opened.target.forward(batch)
        counts = [len(chunk) for chunk in chunks]
        slots = [text.slots(text.num_committed, count) for text, count in zip(self.target_texts, counts, strict=True)]
        self.opened.target.commit(np.arange(sum(counts)), np.concatenate(slots))
        for text, count in zip(self.target_texts, counts, strict=True):
            text.num_committed += count
        rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        shifted = [[*chunk, token][self.opened.lag :] for chunk, token in zip(chunks, following, strict=True)]
        shifted = [chunk[: len(ids)] for chunk, ids in zip(shifted, chunks, strict=True)]
        result = self.steps.first(shifted, [part.tolist() for part in rows], with_candidates)
        self.steps.commit(counts)
        return result


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, 260, length).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("name", CASES)
def test_candidates_equal_the_references(tmp_path: Path, kernels: Kernels, prompts: list[list[int]], name: str) -> None:
    opened = open_case(tmp_path, CASES[name], kernels)
    run = Run(opened)
    heads = [prompt[:count] for prompt, count in zip(prompts, FIRST_CHUNKS, strict=True)]
    tails = [prompt[count:] for prompt, count in zip(prompts, FIRST_CHUNKS, strict=True)]
    nothing = run.extend(heads, [tail[0] for tail in tails], with_candidates=False)
    assert nothing.token_ids.shape == (0, K)
    texts = [list(prompt) for prompt in prompts]
    drawn = [11, 12, 13]
    check_a_step(run, texts, tails, drawn)
    # The next step begins with rows of accepted tokens: what was in-step before has left no trace.
    accepted = [[drawn[0]], [drawn[1], 21, 22], [drawn[2], 31]]
    texts = [text + tokens for text, tokens in zip(texts, accepted, strict=True)]
    check_a_step(run, texts, accepted, [14, 15, 16])
    opened.draft.close()
    opened.target.close()


def check_a_step(run: Run, texts: list[list[int]], chunks: list[list[int]], drawn: list[int]) -> None:
    """Extend by ``chunks``, the ends of ``texts``; draw ``drawn``; then check a tree of two depths behind them."""
    opened, steps = run.opened, run.steps
    log_probs = opened.log_probs
    result = run.extend(chunks, drawn)
    known = [len(text) for text in texts]
    roots = [text + [token] * opened.lag for text, token in zip(texts, drawn, strict=True)]
    for row, (root, count) in enumerate(zip(roots, known, strict=True)):
        check(result, row, log_probs(root, count))
    best = result.token_ids
    lasts = (np.cumsum([len(chunk) for chunk in chunks]) - 1).tolist()
    first_nodes = [[(int(best[0, 0]), -1, lasts[0])], [], [(int(best[2, rank]), -1, lasts[2]) for rank in (0, 1, 2)]]
    paths = {(b, n): [*roots[b], node[0]] for b, nodes in enumerate(first_nodes) for n, node in enumerate(nodes)}
    empty = [b for b, nodes in enumerate(first_nodes) if not nodes]
    assert empty == [1]
    # Sequence 1 drafts nothing: it is not part of the step.
    steps.texts, steps.in_step = [run.draft_texts[0], run.draft_texts[2]], [steps.in_step[0], steps.in_step[2]]
    result = steps.later([first_nodes[0], first_nodes[2]])
    for row, (b, n) in enumerate([(2, 0), (2, 1), (2, 2), (0, 0)]):  # ids go from the last sequence to the first
        check(result, row, log_probs(paths[b, n], known[b]))
    ids = [in_step.ids for in_step in steps.in_step]
    second_nodes = [[(50, 0, ids[0][0]), (51, 0, ids[0][0])], [(60, 2, ids[1][2]), (61, 0, ids[1][0])]]
    result = steps.later(second_nodes)
    for row, (b, n, token) in enumerate([(2, 2, 60), (2, 0, 61), (0, 0, 50), (0, 0, 51)]):
        check(result, row, log_probs([*paths[b, n], token], known[b]))
    ids = [in_step.ids for in_step in steps.in_step]
    result = steps.later([[(70, 2, ids[0][2])], [(71, 4, ids[1][4])]])
    check(result, 0, log_probs([*paths[2, 0], 61, 71], known[2]))
    check(result, 1, log_probs([*paths[0, 0], 51, 70], known[0]))
    steps.texts = run.draft_texts


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "draft-model"])
def opened(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    case = open_case(tmp_path_factory.mktemp("draft"), CASES[request.param], kernels)
    yield case
    case.draft.close()
    case.target.close()


@pytest.mark.parametrize("kernels", ["onnxruntime"], indirect=True)
def test_a_forward_in_parts_is_the_forward_at_once(
    opened: Opened, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for cost in (StepCost(1e30, 1.0, 1.0), StepCost(0.0, 1.0, 1.0)):
        for session in (opened.target, opened.draft):
            monkeypatch.setattr(session._passes, "cost", cost)
        run = Run(opened)
        results.append(run.extend(prompts, [11, 12, 13]))
        ids = (np.cumsum(PROMPT_LENGTHS) - 1).tolist()
        results.append(run.steps.later([[(5, -1, row_id)] for row_id in ids]))
    for at_once, in_parts in zip(results[:2], results[2:], strict=True):
        np.testing.assert_array_equal(at_once.token_ids, in_parts.token_ids)
        np.testing.assert_allclose(at_once.log_probs, in_parts.log_probs, rtol=0, atol=1e-5)


def test_a_first_forward_may_follow_another(opened: Opened, prompts: list[list[int]]) -> None:
    """The rows of the first one, which nobody committed, are forgotten."""
    run = Run(opened)
    opened.target.forward(make_batch(run.target_texts, prompts))
    features = np.split(np.arange(sum(PROMPT_LENGTHS)), np.cumsum(PROMPT_LENGTHS)[:-1])
    rows = [part.tolist() for part in features]
    once = run.steps.first(prompts, rows)
    again = run.steps.first(prompts, rows)
    np.testing.assert_array_equal(once.token_ids, again.token_ids)
    np.testing.assert_array_equal(once.log_probs, again.log_probs)


@pytest.mark.parametrize("opened", ["eagle1", "eagle3"], indirect=True)
def test_kept_features_outlive_the_forward_of_the_target(opened: Opened, prompts: list[list[int]]) -> None:
    """A row waits for its next token: the target runs other rows meanwhile, whose features go to other places."""
    run = Run(opened)
    opened.target.forward(make_batch(run.target_texts, prompts))
    rows = [part.tolist() for part in np.split(np.arange(sum(PROMPT_LENGTHS)), np.cumsum(PROMPT_LENGTHS)[:-1])]
    before = run.steps.first(prompts, rows)
    batch = run.steps.batch_of_last_forward
    assert batch is not None
    opened.target.forward(make_batch([Text([50])], [[9, 8, 7]]))
    opened.draft.keep_features(np.array([0, 2]), np.array([90, 200]))
    np.testing.assert_array_equal(before.log_probs, opened.draft.forward(batch).log_probs)


def test_more_nodes_than_a_mask_word_has_bits(opened: Opened) -> None:
    """40 nodes behind 120 tokens: two words, and keys over a chunk of 128; of two depths, the deeper ones see both."""
    prompt = np.random.default_rng(1).integers(3, 260, 120).tolist()
    run = Run(opened)
    run.target_texts, run.draft_texts = [Text(list(range(10)))], [Text(list(range(10)))]
    run.steps = DraftSteps(opened.draft, run.draft_texts, is_head=opened.lag > 0)
    result = run.extend([prompt], [11])
    root = prompt + [11] * opened.lag
    check(result, 0, opened.log_probs(root, 120))
    wide = run.steps.later([[(100 + node, -1, 119) for node in range(37)]])
    ids = run.steps.in_step[0].ids
    deep = run.steps.later([[(200 + node, node, ids[node]) for node in (0, 20, 36)]])
    for row in (0, 31, 32, 36):
        check(wide, row, opened.log_probs([*root, 100 + row], 120))
    for row, node in enumerate((0, 20, 36)):
        check(deep, row, opened.log_probs([*root, 100 + node, 200 + node], 120))


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "draft-model"])
@pytest.mark.parametrize("weights_dtype", ["int8", "int4"])
def test_quantised_drafts_stay_near_the_references(
    tmp_path: Path, kernels: Kernels, prompts: list[list[int]], method: str, weights_dtype: str
) -> None:
    """Errors of tiny matrices are large; other candidates than the best lie 4 below them on average."""
    opened = open_case(tmp_path, CASES[method], kernels, weights_dtype=weights_dtype)
    result = Run(opened).extend(prompts, [11, 12, 13])
    errors = []
    for row, (prompt, token) in enumerate(zip(prompts, (11, 12, 13), strict=True)):
        expected = opened.log_probs(prompt + [token] * opened.lag, len(prompt))
        errors.append(np.abs(result.log_probs[row] - expected[result.token_ids[row]]))
    assert np.mean(errors) < {"int8": 0.1, "int4": 1.5}[weights_dtype]
    opened.draft.close()
    opened.target.close()


def test_a_forward_may_have_more_rows_than_a_text_has_positions(tmp_path: Path, kernels: Kernels) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "target")
    drafts = [("eagle1", write_tiny_eagle1(tmp_path / "eagle1", checkpoint))]
    limits = {"max_seq_len": 24, "max_num_tokens": 64}
    engine = build_tiny_engine(tmp_path, checkpoint, kernels=kernels, drafts=drafts, tree=TREE, **limits)
    config = load_engine_config(engine)
    target = OnnxRuntimeSession(engine, config)
    draft = OnnxRuntimeDraftSession(engine, config, 0, target)
    texts = [Text([first, first + 1]) for first in range(0, 8, 2)]
    chains = [np.random.default_rng(seed).integers(3, 260, 20).tolist() for seed in range(4)]
    together = target.forward(make_batch(texts, chains)).sampled_ids
    features = np.arange(80).reshape(4, 20).tolist()
    candidates = DraftSteps(draft, texts).first(chains, features).token_ids
    for b, (text, chain) in enumerate(zip(texts, chains, strict=True)):
        alone = target.forward(make_batch([text], [chain])).sampled_ids
        np.testing.assert_array_equal(alone, together[20 * b : 20 * b + 20])
        result = DraftSteps(draft, [text]).first([chain], [list(range(20))])
        np.testing.assert_array_equal(result.token_ids[0], candidates[b])
    draft.close()
    target.close()


def test_ids_beyond_a_draft_models_rows_read_its_last_row(tmp_path: Path, kernels: Kernels) -> None:
    opened = open_case(tmp_path, CASES["draft-model-less-padded"], kernels)
    results = []
    for token_id in (299, 319):
        steps = DraftSteps(opened.draft, [Text([0])], is_head=False)
        results.append(steps.first([[5, token_id]], [[0, 1]]))
    np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)
    np.testing.assert_array_equal(results[0].log_probs, results[1].log_probs)
