"""The sampler of the graph, portable and native, run by ONNX Runtime, against ``sample_reference``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import PORTABLE, SamplingOperators
from draftline.graphs.sampler import NUCLEUS_GUESS, emit_edit_inputs
from draftline.graphs.step_inputs import emit_sampling_inputs
from draftline.logit_edits import BANNED, NO_EDITS, LogitEdits, edited_logits
from draftline.sampling import kept_probabilities, sample_reference
from tests.plugins.native import open_session

NEAR_ONE = float(np.float32(1 - 2.0**-24))  # the largest number that `uniform` gives
ROUNDING = 1e-5  # of float32 probabilities and their sums


class Rule(NamedTuple):
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.5


@lru_cache(maxsize=16)
def session(operators: SamplingOperators, vocab_size: int, num_threads: int = 1) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    logits = graph.input("logits", TensorProto.FLOAT, ["R", vocab_size])
    sampling, edits = emit_sampling_inputs(graph), emit_edit_inputs(graph)
    sampled = operators.sample(graph, logits, sampling, edits, vocab_size)
    graph.output(sampled, "sampled_ids", TensorProto.INT64, ["R"])
    return open_session(graph.model("sampler", []), num_threads)


def sample(
    operators: SamplingOperators,
    logits: NDArray[np.float32],
    rules: list[Rule],
    num_threads: int = 1,
    edits: LogitEdits = NO_EDITS,
) -> list[int]:
    temperature, top_k, top_p, uniform = zip(*rules, strict=True)
    feeds = {
        "logits": logits,
        "temperature": np.array(temperature, np.float32),
        "top_k": np.array(top_k, np.int32),
        "top_p": np.array(top_p, np.float32),
        "uniform": np.array(uniform, np.float32),
        **{f"edit_{name}": value for name, value in vars(edits).items()},
    }
    ids: list[int] = session(operators, logits.shape[1], num_threads).run(None, feeds)[0].tolist()
    return ids


def check_row(logits: NDArray[np.float32], rule: Rule, token: int) -> None:
    """The token is the reference's, or rounding explains it.

    Rounding may move ``uniform`` x mass across a boundary of the cumulated mass, or ``top_p`` across the mass above a
    token (which takes that token's ties in or out). Both are asserted in float64, for the token that was drawn.
    """
    temperature, top_p, uniform = (float(np.float32(value)) for value in (rule.temperature, rule.top_p, rule.uniform))
    if token == sample_reference(logits, temperature, rule.top_k, top_p, uniform):
        return
    assert temperature > 0, "greedy has no rounding"
    for nucleus in {top_p, max(top_p - ROUNDING, 1e-30), min(top_p + ROUNDING, 1.0)}:
        kept = kept_probabilities(logits, temperature, rule.top_k, nucleus)
        cumulated = np.cumsum(kept) / kept.sum()
        before = cumulated[token] - kept[token] / kept.sum()
        if kept[token] > 0 and before - ROUNDING <= uniform <= cumulated[token] + ROUNDING:
            return
    pytest.fail(f"token {token} is not within rounding of {rule}")


def check(operators: SamplingOperators, logits: NDArray[np.float32], rules: list[Rule]) -> list[int]:
    tokens = sample(operators, logits, rules)
    for row, rule in enumerate(rules):
        check_row(logits[row], rule, tokens[row])
    return tokens


both_forms = pytest.mark.parametrize("operators", [PORTABLE, NATIVE], ids=["portable", "native"])

rules = st.builds(
    Rule,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    uniform=st.one_of(st.sampled_from([0.0, 2.0**-24, NEAR_ONE]), st.floats(0, NEAR_ONE, width=32)),
)


@both_forms
@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 7, 128, 267]), st.lists(rules, min_size=2, max_size=6), st.integers(0, 2**32 - 1), st.data())
def test_a_row_without_a_distribution_draws_nothing(
    operators: SamplingOperators, vocab_size: int, rules: list[Rule], seed: int, data: st.DataObject
) -> None:
    """And changes no draw of another row; -inf alone is no defect, unless there is nothing else."""
    logits = np.random.default_rng(seed).standard_normal((len(rules), vocab_size)).astype(np.float32)
    logits[:, data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from([0.0, -np.inf, 1e30]))
    expected = np.array(sample(operators, logits, rules))
    expected[np.isneginf(logits).all(axis=1)] = -1
    place, row = data.draw(st.integers(0, vocab_size - 1)), data.draw(st.integers(0, len(rules) - 1))
    logits[row, place if data.draw(st.booleans()) else slice(None)] = data.draw(st.sampled_from([np.nan, np.inf]))
    expected[row] = -1
    assert sample(operators, logits, rules) == expected.tolist()


@both_forms
@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([1, 7, 127, 128, 129, 267, 1500, 4096]),
    st.lists(rules, min_size=1, max_size=8),
    st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    st.integers(0, 2**32 - 1),
)
def test_agrees_with_the_reference(
    operators: SamplingOperators, vocab_size: int, rules: list[Rule], spread: float, seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(rules), vocab_size)) * spread).astype(np.float32)
    check(operators, logits, rules)


@both_forms
@settings(deadline=None, max_examples=60)
@given(st.lists(rules, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_ties_stay_together(operators: SamplingOperators, rules: list[Rule], seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-3, 3, (len(rules), 300)).astype(np.float32)
    check(operators, logits, rules)


@both_forms
@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999])
def test_nuclei_larger_than_the_guess(operators: SamplingOperators, top_p: float) -> None:
    """A flat distribution keeps more tokens than are sorted first; beside it a row whose nucleus is one token."""
    vocab_size = 4 * NUCLEUS_GUESS + 5
    random = np.random.default_rng(0)
    logits = (random.standard_normal((6, vocab_size)) * 0.1).astype(np.float32)
    logits[3:, 77] = 60.0
    uniforms = random.random(6).tolist()
    kept = kept_probabilities(logits[0], 1.0, 0, top_p)
    assert np.count_nonzero(kept) > NUCLEUS_GUESS
    tokens = check(operators, logits, [Rule(1.0, 0, top_p, u) for u in uniforms])
    assert tokens[3:] == [77, 77, 77]
    assert sample(operators, logits[3:], [Rule(1.0, 0, top_p, u) for u in uniforms[3:]]) == [77, 77, 77]


@both_forms
def test_extremes_of_the_random_number_stay_inside_the_kept_tokens(operators: SamplingOperators) -> None:
    logits = np.full((4, 267), -np.inf, np.float32)
    logits[:, [5, 200]] = 0.0
    tokens = check(
        operators, logits, [Rule(1.0, 0, 1.0, 0.0), Rule(1.0, 0, 1.0, NEAR_ONE), Rule(1.0, 9, 0.9, NEAR_ONE), Rule()]
    )
    assert tokens == [5, 200, 200, 5]


@both_forms
def test_greedy_takes_the_lowest_id_among_equals(operators: SamplingOperators) -> None:
    logits = np.zeros((2, 130), np.float32)
    logits[1, [129, 64]] = 1.0
    assert sample(operators, logits, [Rule(), Rule(0.0, 3, 0.2, NEAR_ONE)]) == [0, 64]


@both_forms
@pytest.mark.parametrize("vocab_size", [267, 4096, 9000])
def test_a_row_is_drawn_alike_whatever_its_neighbours(operators: SamplingOperators, vocab_size: int) -> None:
    """Other rows and threads decide which parts of the sampler run and how; a row's own token must not move.

    The random numbers are boundaries between two tokens as float32 has them: one bit of a sum moves a token.
    """
    random = np.random.default_rng(3)
    num_rows = 96
    logits = (random.standard_normal((num_rows, vocab_size)) * 2).astype(np.float32)
    flat_and_peaked = [Rule(t, k, p) for t in (0.8, 6.0) for k in (0, 0, 7, 2000) for p in (1.0, 0.9, 0.3)]
    rules = []
    for row, rule in enumerate(flat_and_peaked * (num_rows // len(flat_and_peaked))):
        kept = np.cumsum(kept_probabilities(logits[row], rule.temperature, rule.top_k, rule.top_p))
        boundary = np.float32(random.choice(kept[:-1]) / kept[-1])
        rules.append(rule._replace(uniform=min(float(boundary), NEAR_ONE)))
    together = sample(operators, logits, rules, num_threads=8)
    assert together == [sample(operators, logits[row : row + 1], [rule])[0] for row, rule in enumerate(rules)]
    for row, rule in enumerate(rules):
        check_row(logits[row], rule, together[row])


@both_forms
def test_frequencies_follow_the_distribution(operators: SamplingOperators) -> None:
    """Chi-squared over 6 tokens; the random numbers are a regular grid, so the counts are nearly exact."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32))
    grid = ((np.arange(2000) + 0.5) / 2000).tolist()
    tokens = sample(operators, np.tile(logits, (2000, 1)), [Rule(1.0, 0, 1.0, u) for u in grid])
    counts = np.bincount(tokens, minlength=6)
    assert np.abs(counts - 2000 * np.exp(logits)).max() <= 1


def random_edits(random: np.random.Generator, num_rows: int, vocab_size: int, num_edits: int) -> LogitEdits:
    """Neutral and strong ones, in an order of their own."""
    chosen = random.permutation(num_rows * vocab_size)[:num_edits]
    rows, token_ids = np.divmod(chosen, vocab_size)
    return LogitEdits(
        rows=rows.astype(np.int32),
        token_ids=token_ids.astype(np.int32),
        bias=random.choice([0.0, 1.5, -2.0, 9.0], len(chosen)).astype(np.float32),
        divisor=random.choice([1.0, 1.3, 0.7], len(chosen)).astype(np.float32),
        offset=random.choice([0.0, -0.4, 0.9, BANNED], len(chosen)).astype(np.float32),
    )


@both_forms
@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([1, 7, 128, 267, 1500]),
    st.lists(rules, min_size=1, max_size=6),
    st.sampled_from([1, 2, 50, 10_000]),
    st.integers(0, 2**32 - 1),
)
def test_edits_come_before_the_rules(
    operators: SamplingOperators, vocab_size: int, rules: list[Rule], num_edits: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((len(rules), vocab_size)) * 2).astype(np.float32)
    edits = random_edits(random, len(rules), vocab_size, num_edits)
    edited = edited_logits(logits, edits)
    tokens = sample(operators, logits, rules, edits=edits)
    for row, rule in enumerate(rules):
        check_row(edited[row], rule, tokens[row])


@both_forms
def test_a_row_without_edits_is_drawn_as_in_a_step_without(operators: SamplingOperators) -> None:
    """Also with the random number on a boundary between two tokens, where one bit would show."""
    random = np.random.default_rng(1)
    logits = random.standard_normal((40, 267)).astype(np.float32)
    rules = [Rule(0.8, 0, 1.0, float(u)) for u in random.random(40)]
    edits = random_edits(random, 20, 267, 300)
    assert sample(operators, logits, rules, edits=edits)[20:] == sample(operators, logits, rules)[20:]
    neutral = LogitEdits(*(np.array([value], kind) for value, kind in zip((0, 5, 0, 1, 0), "iifff", strict=True)))
    assert sample(operators, logits, rules, edits=neutral) == sample(operators, logits, rules)


@both_forms
@pytest.mark.parametrize("temperature", [1e-4, 0.5, 1.0, 100.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9), (3, 0.5)])
def test_a_banned_token_is_never_drawn_and_a_row_of_banned_ones_is_uniform(
    operators: SamplingOperators, temperature: float, top_k: int, top_p: float
) -> None:
    vocab_size = 130
    logits = np.random.default_rng(2).standard_normal((9, vocab_size)).astype(np.float32)
    logits[:4, 77] = -40.0  # the only one that is left
    rows, token_ids = np.nonzero(
        np.broadcast_to(np.arange(vocab_size) != 77, logits.shape) | (np.arange(9) > 3)[:, None]
    )
    ones = np.ones(len(rows), np.float32)
    ban = LogitEdits(rows.astype(np.int32), token_ids.astype(np.int32), 0 * ones, ones, BANNED * ones)
    uniforms = [0.0, 0.305, 0.605, NEAR_ONE]
    rules = [Rule(temperature, top_k, top_p, u) for u in (*uniforms, *uniforms)] + [Rule()]
    tokens = sample(operators, logits, rules, edits=ban)
    assert tokens[:4] == [77] * 4
    assert tokens[4:] == [0, 39, 78, 129, 0]
