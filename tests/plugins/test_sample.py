"""``Sample`` beyond what ``tests/graphs/test_sampler.py`` asks of every sampler: large vocabularies, laws, errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.graphs.sampler import emit_edit_inputs
from draftline.graphs.step_inputs import emit_sampling_inputs
from draftline.logit_edits import BANNED, LogitEdits
from draftline.sampling import kept_probabilities
from tests.graphs.test_sampler import NEAR_ONE, Rule, check_row, random_edits, rules, sample
from tests.plugins.native import instruction_set, open_session

FAIL = onnxruntime.capi.onnxruntime_pybind11_state.Fail


def draw(logits: NDArray[np.float32], rules: list[Rule], num_threads: int = 1) -> list[int]:
    return sample(NATIVE, logits, rules, num_threads)


def awkward_logits(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    """Rows of every kind that selection may stumble over: ties, both zeros, -inf, huge values.

    None so near to each other that float64 takes their probabilities for equal: the oracle would call them ties.
    """
    random = np.random.default_rng(seed)
    spread = 10.0 ** random.integers(-4, 30, (shape[0], 1)) if seed % 3 == 0 else random.choice([1e-3, 0.1, 4.0])
    logits = (random.standard_normal(shape) * spread).astype(np.float32)
    if seed % 2:
        logits = np.round(logits)
        logits[random.random(shape) < 0.2] = -0.0
    logits[random.random(shape) < random.choice([0.0, 0.5])] = random.choice([-np.inf, -3e38, 0.0])
    logits[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = random.choice([0.0, 1.0, 5.0])
    return logits


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([1, 2, 15, 63, 64, 65, 200, 1000, 4097]),
    st.lists(rules, min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_awkward_rows_agree_with_the_reference(vocab_size: int, rules: list[Rule], seed: int) -> None:
    logits = awkward_logits((len(rules), vocab_size), seed)
    for row, token in enumerate(draw(logits, rules)):
        check_row(logits[row], rules[row], token)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 3000), st.data(), st.integers(0, 2**32 - 1))
def test_top_k_keeps_exactly_the_k_largest_and_their_ties(vocab_size: int, data: st.DataObject, seed: int) -> None:
    """The random numbers are the middles of the kept tokens' shares, so each of them must come out, and no other."""
    top_k = data.draw(st.integers(1, vocab_size))
    logits = np.random.default_rng(seed).integers(-40, 40, vocab_size).astype(np.float32) / 16
    kept = kept_probabilities(logits, 1.0, top_k, 1.0)
    shares = np.cumsum(kept) - kept / 2
    expected = np.flatnonzero(kept)[:200]
    uniforms = (shares / kept.sum())[expected]
    tokens = draw(np.tile(logits, (len(expected), 1)), [Rule(1.0, top_k, 1.0, float(u)) for u in uniforms])
    assert tokens == expected.tolist()


@pytest.mark.parametrize("spread", [0.01, 0.1, 1.0, 4.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (5000, 1.0), (0, 0.9), (0, 0.9999), (3000, 0.5)])
def test_a_large_vocabulary_agrees_with_the_reference(spread: float, top_k: int, top_p: float) -> None:
    random = np.random.default_rng(5)
    logits = (random.standard_normal((6, 49152)) * spread).astype(np.float32)
    rules = [Rule(0.8, top_k, top_p, float(u)) for u in (0.0, NEAR_ONE, *random.random(4))]
    for row, token in enumerate(draw(logits, rules, num_threads=2)):
        check_row(logits[row], rules[row], token)


@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_shares_are_right_to_three_ten_millionths(spread: float, temperature: float) -> None:
    """Random numbers beside the boundaries of the cumulated mass, as float64 has it."""
    random = np.random.default_rng(1)
    logits = (random.standard_normal(49152) * spread).astype(np.float32)
    kept = kept_probabilities(logits, float(np.float32(temperature)), 0, 1.0)
    cumulated = np.cumsum(kept) / kept.sum()
    uniforms = np.minimum(random.choice(cumulated, 50).astype(np.float32), np.float32(NEAR_ONE))
    tokens = draw(np.tile(logits, (50, 1)), [Rule(temperature, 0, 1.0, float(u)) for u in uniforms], num_threads=2)
    assert (cumulated[tokens] - kept[tokens] / kept.sum() <= uniforms + 3e-7).all()
    assert (cumulated[tokens] >= uniforms - 3e-7).all()


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.8])
def test_a_nucleus_that_ends_among_thousands_of_nearly_equal_tokens(top_p: float) -> None:
    """The draw is the last kept token: it shows where the nucleus ends."""
    logits = np.full(20_000, -9.0, np.float32)
    logits[:12_000] = 1 - np.arange(12_000) * 2.0**-23
    kept = kept_probabilities(logits, 1.0, 0, top_p)
    (token,) = draw(logits[None], [Rule(1.0, 0, top_p, NEAR_ONE)])
    # 1e-5 of the mass: what rounding may move.
    assert np.count_nonzero(kept) == pytest.approx(token + 1, rel=1e-4)
    check_row(logits, Rule(1.0, 0, top_p, NEAR_ONE), token)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2000), st.lists(rules, min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_instruction_sets_and_batches_draw_alike(vocab_size: int, rules: list[Rule], seed: int) -> None:
    """With random numbers on the boundaries between tokens, where one bit of a sum moves a token."""
    logits = (np.random.default_rng(seed).standard_normal((len(rules), vocab_size)) * 3).astype(np.float32)
    for row, rule in enumerate(rules):
        if rule.temperature > 0:
            kept = np.cumsum(kept_probabilities(logits[row], rule.temperature, rule.top_k, rule.top_p))
            boundary = float(np.float32(kept[seed % vocab_size] / kept[-1]))
            rules[row] = rule._replace(uniform=min(boundary, NEAR_ONE))
    together = draw(logits, rules, num_threads=2)
    assert [draw(logits[row : row + 1], [rule])[0] for row, rule in enumerate(rules)] == together
    with instruction_set("avx2"):
        assert draw(logits, rules) == together


def test_a_graph_without_edits_draws_as_one_with_none() -> None:
    graph = OnnxGraph()
    logits = graph.input("logits", TensorProto.FLOAT, ["R", 500])
    ids = NATIVE.sample(graph, logits, emit_sampling_inputs(graph), None, 500)
    graph.output(ids, "ids", TensorProto.INT64, ["R"])
    random = np.random.default_rng(0)
    values = random.standard_normal((30, 500)).astype(np.float32)
    uniforms = random.random(30).astype(np.float32)
    feeds: dict[str, NDArray[Any]] = {"logits": values, "uniform": uniforms, "top_k": np.zeros(30, np.int32)}
    feeds |= {name: np.full(30, value, np.float32) for name, value in (("temperature", 1), ("top_p", 0.9))}
    found = open_session(graph.model("sample", [])).run(None, feeds)[0].tolist()
    assert found == draw(values, [Rule(1.0, 0, 0.9, float(u)) for u in uniforms])


@pytest.mark.parametrize("uniform", [-np.inf, -1.0, 1.0, 2.0, np.inf, np.nan])
@pytest.mark.parametrize("place", [70, 5])
def test_no_random_number_draws_a_token_without_weight(uniform: float, place: int) -> None:
    """Not even one outside 0 .. 1, and though the first or the last block holds none with weight."""
    logits = np.zeros((1, 200), np.float32)
    logits[0, place : place + 2] = 9.0
    (token,) = draw(logits, [Rule(1.0, 2, 1.0, uniform)])
    assert token in (place, place + 1)


@pytest.mark.parametrize("top_p", [0.0, -1.0, -1e30, -np.inf])
def test_a_nucleus_of_nothing_is_the_most_probable_token(top_p: float) -> None:
    logits = np.zeros((1, 200), np.float32)
    logits[0, 70] = 0.5
    assert draw(logits, [Rule(1.0, 0, top_p, NEAR_ONE)]) == [70]


def test_logits_stay_as_they_are() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    before = logits.copy()
    sample(NATIVE, logits, [Rule(0.8, 3, 0.9)] * 3, edits=random_edits(np.random.default_rng(1), 3, 300, 100))
    np.testing.assert_array_equal(logits, before)


def test_no_rows() -> None:
    graph = OnnxGraph()
    logits = graph.input("logits", TensorProto.FLOAT, ["R", 7])
    ids = NATIVE.sample(graph, logits, emit_sampling_inputs(graph), emit_edit_inputs(graph), 7)
    graph.output(ids, "ids", TensorProto.INT64, ["R"])
    session = open_session(graph.model("sample", []))
    types = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
    feeds = {x.name: np.empty((0, 7) if x.name == "logits" else 0, types[x.type]) for x in session.get_inputs()}
    assert session.run(None, feeds)[0].shape == (0,)


@pytest.mark.parametrize("missing", range(5))
def test_edits_are_given_as_a_whole(missing: int) -> None:
    with pytest.raises(FAIL, match="edits are five"):
        sample_edited({missing}, set())


@pytest.mark.parametrize("from_nodes", [set(), {0}, {1, 3}, set(range(5))])
def test_no_edits_are_none_whoever_gives_them(from_nodes: set[int]) -> None:
    """A node's empty output has no memory, an empty input has some."""
    assert sample_edited(set(), from_nodes) == [2]


def sample_edited(missing: set[int], from_nodes: set[int]) -> list[int]:
    """Sample with five inputs of no edits; without some, and with some that are the outputs of nodes."""
    graph = OnnxGraph()
    logits = graph.input("logits", TensorProto.FLOAT, ["R", 3])
    names = [logits, *emit_sampling_inputs(graph)]
    feeds: dict[str, NDArray[Any]] = {"logits": np.array([[0, 1, 2]], np.float32), "top_k": np.zeros(1, np.int32)}
    feeds |= {name: np.zeros(1, np.float32) for name in ("temperature", "top_p", "uniform")}
    for i, kind in enumerate("iifff"):
        if i in missing:
            names.append("")
            continue
        name = graph.input(f"edit{i}", TensorProto.INT32 if kind == "i" else TensorProto.FLOAT, ["E"])
        feeds[name] = np.empty(0, kind)
        names.append(graph.op("Abs", name) if i in from_nodes else name)
    graph.output(graph.op("Sample", *names, domain=DRAFTLINE), "ids", TensorProto.INT64, ["R"])
    ids: list[int] = open_session(graph.model("sample", [])).run(None, feeds)[0].tolist()
    return ids


OUT_OF_MEMORY = """
import resource
import numpy as np
from draftline.logit_edits import LogitEdits
from tests.plugins.test_sample import FAIL, NATIVE, Rule, sample

rows, vocab_size = 4, 20_000_000  # an edited row is a copy of 80 MB
logits = np.zeros((rows, vocab_size), np.float32)
edits = LogitEdits(np.arange(rows, dtype=np.int32), *(np.zeros(rows, kind) for kind in "ifff"))
sample(NATIVE, logits[:, :9], [Rule()] * rows, 2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
try:
    sample(NATIVE, logits, [Rule()] * rows, 2, edits=edits)
except FAIL as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_thread_without_memory_is_an_error_of_the_node() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{OUT_OF_MEMORY}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Sample: std::bad_alloc" in answer.stdout


@pytest.mark.parametrize("rule", [Rule(), Rule(0.8), Rule(0.8, 5, 0.9)])
@pytest.mark.parametrize("place", [0, 77, 129])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_without_a_distribution_draws_nothing(rule: Rule, place: int, value: float) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 130)).astype(np.float32)
    expected = draw(logits, [rule] * 5)
    logits[[2, 3], place] = value
    expected[2:4] = [-1, -1]
    assert draw(logits, [rule] * 5, num_threads=2) == expected


def test_a_row_of_nothing_but_minus_infinity_draws_nothing_unless_edited() -> None:
    logits = np.full((2, 9), -np.inf, np.float32)
    logits[0, 3] = 1.0
    assert draw(logits, [Rule()] * 2) == [3, -1]
    lift = LogitEdits(*(np.array([value], kind) for value, kind in zip((1, 5, 0, 1, BANNED), "iifff", strict=True)))
    assert sample(NATIVE, logits, [Rule()] * 2, edits=lift) == [3, 5]


def test_sums_beyond_float32_are_no_error() -> None:
    logits = np.full((1, 200), 3e38, np.float32)
    logits[0, :150] = -3e38
    assert draw(logits, [Rule()]) == [150]
    assert draw(logits, [Rule(1.0, 0, 0.9, NEAR_ONE)]) == [199]


@pytest.mark.parametrize(("row", "token"), [(-1, 0), (2, 0), (0, -1), (0, 9)])
def test_edits_outside_the_logits_are_refused(row: int, token: int) -> None:
    values = zip((row, token, 0, 1, 0), "iifff", strict=True)
    edits = LogitEdits(*(np.array([value], kind) for value, kind in values))
    with pytest.raises(FAIL, match=f"inside the logits; got row {row}, token {token} of 2 x 9"):
        sample(NATIVE, np.zeros((2, 9), np.float32), [Rule()] * 2, edits=edits)
