"""Networks as TensorRT-RTX parses them, evaluated in numpy, against ONNX Runtime on the same graphs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from draftline.bench.gpu.plugin import attention_graph
from draftline.errors import BuildError
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.kernels.cases import StepCase, make_step, random_sinks
from draftline.kernels.shape import KernelShape
from draftline.sessions.engine_config import DraftMethod, PoolScales
from draftline.sessions.tensorrt import layer_functions, network_check
from draftline.sessions.tensorrt.evaluation import evaluate_network
from draftline.sessions.tensorrt.network import layers_of, parse_network
from draftline.sessions.tensorrt.network_check import (
    FLOAT8_POOL_TOLERANCES,
    NetworkReport,
    check_networks,
)
from draftline.sessions.tensorrt.network_steps import ids_differ, relative_difference
from tests.sessions.tensorrt.plans import (
    LIMITS,
    TREE,
    TREE_LIMITS,
    convert_tiny,
    emit_tiny,
    fake_kernels,
    parse_tiny,
    rtx,
)
from tests.sessions.tiny_engines import add_sinks
from tests.tiny_checkpoints import Architecture

IDS = list(range(5, 300, 3))
EVERY_DRAFT: tuple[DraftMethod, ...] = ("eagle1", "eagle3", "medusa", "draft_model", "ngram")
# Two layers round a few times: a tenth of what thirty are allowed.
TIGHT: dict[NetworkDtype, float] = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def run_check(
    directory: Path,
    architecture: Architecture,
    dtype: NetworkDtype,
    methods: tuple[DraftMethod, ...] = (),
    weights_dtype: str | None = None,
    pool_scales: PoolScales = (),
    sinks: bool = False,
) -> tuple[NetworkReport, ...]:
    converted, drafts = convert_tiny(directory, architecture, dtype, methods)
    if sinks:
        add_sinks(converted)
    (directory / "scratch").mkdir()
    return check_networks(
        rtx(),
        converted,
        directory / "scratch",
        dtype=dtype,
        pool_dtype="float8_e4m3fn" if pool_scales else dtype,
        pool_scales=pool_scales,
        limits=TREE_LIMITS if drafts else LIMITS,
        token_ids=IDS,
        weights_dtype=weights_dtype,
        drafts=drafts,
        tree=TREE if drafts else None,
        num_threads=1,
    )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_targets_agree(tmp_path: Path, architecture: Architecture, dtype: NetworkDtype) -> None:
    (report,) = run_check(tmp_path, architecture, dtype)
    assert (report.graph, report.dtype, report.num_plugins) == ("model", dtype, 2)
    assert set(report.differences) == {"greedy_ids", "kv_rows", "logits"}
    assert max(report.differences.values()) < TIGHT[dtype], report.differences


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_drafters_of_every_method_agree(tmp_path: Path, dtype: NetworkDtype) -> None:
    target, *drafters = run_check(tmp_path, "llama", dtype, EVERY_DRAFT)
    assert {"features", "head_ids", "head_log_probs"} < set(target.differences)
    assert [report.graph for report in drafters] == ["draft-0", "draft-1", "draft-3"], "medusa and ngram have no graph"
    for report in (target, *drafters):
        assert max(report.differences.values()) < TIGHT[dtype], report.differences


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float8_weights_agree(tmp_path: Path, dtype: NetworkDtype) -> None:
    """Of bfloat16 the reference holds in float32 what the network's codes and scales are."""
    target, *drafters = run_check(tmp_path, "qwen2", dtype, ("eagle3", "draft_model", "medusa"), "float8")
    for report in (target, *drafters):
        assert max(report.differences.values()) < TIGHT[dtype], report.differences


@pytest.mark.parametrize(
    ("architecture", "dtype", "weights_dtype"),
    [("mixtral", "float16", "float8"), ("mixtral", "float16", "int4"), ("gpt_oss", "bfloat16", "float8")],
)
def test_quantised_experts_agree(
    tmp_path: Path, architecture: Architecture, dtype: NetworkDtype, weights_dtype: str
) -> None:
    (report,) = run_check(tmp_path, architecture, dtype, weights_dtype=weights_dtype)
    assert max(report.differences.values()) < TIGHT[dtype], report.differences


def test_int4_weights_agree(tmp_path: Path) -> None:
    """Codes are read as ONNX Runtime reads them; matrices from and to the vocabulary have none."""
    target, *drafters = run_check(tmp_path, "qwen2", "float16", ("eagle3", "draft_model"), "int4")
    for report in (target, *drafters):
        assert max(report.differences.values()) < TIGHT["float16"], report.differences


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_float8_pool_agrees(tmp_path: Path, dtype: NetworkDtype) -> None:
    """Pools of drafters keep the network's dtype."""
    scales = ((2.0**-6, 2.0**-9), (2.0**-8, 2.0**-7))
    target, *drafters = run_check(tmp_path, "qwen2", dtype, ("eagle3", "draft_model"), pool_scales=scales)
    assert target.tolerance == FLOAT8_POOL_TOLERANCES[dtype]
    for report in drafters:
        assert max(report.differences.values()) < TIGHT[dtype], report.differences
    if dtype == "float32":  # in 16 bits a number in the middle of two is rounded to either, a sixteenth away
        assert max(target.differences.values()) < TIGHT[dtype], target.differences


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_two_windows_agree(tmp_path: Path, architecture: Architecture, dtype: NetworkDtype) -> None:
    """One layer with a window, one without: each has kernels of its own; norms in float32 beside 16-bit rows."""
    (report,) = run_check(tmp_path, architecture, dtype)
    assert max(report.differences.values()) < TIGHT[dtype], report.differences


def test_drafters_of_a_gemma_agree(tmp_path: Path) -> None:
    """A head reads the embedding unscaled; a draft model has two kinds of kernels itself."""
    reports = run_check(tmp_path, "gemma3", "bfloat16", ("eagle3", "draft_model", "medusa"))
    assert [report.graph for report in reports] == ["model", "draft-0", "draft-1"]
    for report in reports:
        assert max(report.differences.values()) < TIGHT["bfloat16"], report.differences


@pytest.mark.parametrize(("architecture", "name"), [("gemma3", "Gemma3ForCausalLM"), ("gpt_oss", "GptOssForCausalLM")])
def test_rows_that_overflow_float16_are_refused(tmp_path: Path, architecture: Architecture, name: str) -> None:
    with pytest.raises(BuildError, match=rf"target: rows of {name} need more .* set target.dtype to bfloat16"):
        run_check(tmp_path, architecture, "float16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sinks_agree(tmp_path: Path, dtype: NetworkDtype) -> None:
    """They are float32 where they are read; a drafter has none."""
    for report in run_check(tmp_path, "llama", dtype, ("eagle3",), sinks=True):
        assert max(report.differences.values()) < TIGHT[dtype], report.differences


def test_a_softcap_and_sinks_reach_the_plugin(tmp_path: Path) -> None:
    shape = KernelShape(4, 2, 16, 8, "float32", "float32", softcap=2.0, has_sinks=True)
    file = tmp_path / "attention.onnx"
    onnx.save(attention_graph(shape), file)
    step = StepCase((40, 3), ((-1, 0, 0), (-1, 0)), 0)
    feeds = make_step(shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, step)
    feeds["sinks"] = random_sinks(shape.num_heads, 0)
    with ExitStack() as opened:
        network = parse_network(rtx(), file, (fake_kernels(shape),), lambda line: None, opened)
        found = evaluate_network(network, feeds)["out"]
    (expected,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_scales_that_the_plugin_does_not_take_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(layer_functions, "tree_attention")  # noqa: B009

    def swapped(*inputs: Any, key_scale: float, value_scale: float, **others: Any) -> Any:
        return right(*inputs, key_scale=value_scale, value_scale=key_scale, **others)

    monkeypatch.setattr(layer_functions, "tree_attention", swapped)
    with pytest.raises(BuildError, match=r"network check: model: \w+: .* at most"):
        run_check(tmp_path, "llama", "float32", pool_scales=((2.0**-6, 2.0**-12), (2.0**-6, 2.0**-12)))


@pytest.mark.parametrize(("kind", "operation"), [("UNARY", "SQRT"), ("ELEMENTWISE", "SUB"), ("ACTIVATION", "SIGMOID")])
def test_a_layer_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, operation: str
) -> None:
    table = getattr(layer_functions, kind)
    right = table[operation]
    monkeypatch.setitem(table, operation, lambda *inputs: right(*inputs) * np.float32(1.01))
    with pytest.raises(BuildError, match=r"network check: model: \w+: .* at most 0\.0001; got [\d.]+; "):
        run_check(tmp_path, "llama", "float32")


def test_rows_of_other_experts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may go to another expert now and then, and not always."""
    right = layer_functions.LAYER_FUNCTIONS["TOPK"]

    def next_ones(layer: Any, inputs: Any) -> Any:
        values, indices = right(layer, inputs)  # type: ignore[misc]
        return values, np.roll(indices, 1, axis=-1)

    monkeypatch.setitem(layer_functions.LAYER_FUNCTIONS, "TOPK", next_ones)
    with pytest.raises(BuildError, match=r"network check: model: \w+: .* at most 0\.0001; got [\d.]+; "):
        run_check(tmp_path, "mixtral", "float32")


def test_a_kind_of_layer_that_is_not_known_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(layer_functions.LAYER_FUNCTIONS, "CONCATENATION")
    with pytest.raises(BuildError, match=r"the network check knows the layers .*; got CONCATENATION; "):
        run_check(tmp_path, "llama", "float32")


def test_feeds_are_the_networks(tmp_path: Path) -> None:
    with ExitStack() as opened:
        network = parse_tiny(emit_tiny(tmp_path), opened)
        with pytest.raises(BuildError, match=r"is fed what the network reads; got missing \['block_table'"):
            evaluate_network(network, {})


def test_a_row_without_numbers_draws_nothing(tmp_path: Path) -> None:
    """``greedy_ids`` of the parsed network, computed from logits that hold no number."""
    with ExitStack() as opened:
        network = parse_tiny(emit_tiny(tmp_path, "llama", "float32"), opened)
        feeds = {
            "input_ids": np.array([5, 6], np.int32),
            "position_ids": np.array([0, 0], np.int32),
            "block_table": np.zeros((2, 1), np.int32),
            "context_lengths": np.array([0, 1], np.int32),
            "sequence_starts": np.array([0, 1, 2], np.int32),
            "packed_mask": np.ones((2, 1), np.int32),
            "sample_rows": np.array([0, 1], np.int32),
        }
        pool = np.full((1, 2, 2, 16, 16), np.nan, np.float32)
        outputs = evaluate_network(network, feeds | {"kv_pool.0": pool, "kv_pool.1": pool})
    assert outputs["greedy_ids"][0] == outputs["logits"][0].argmax()
    assert outputs["greedy_ids"][1] == -1


def test_layers_come_with_their_attributes(tmp_path: Path) -> None:
    with ExitStack() as opened:
        layers = layers_of(parse_tiny(emit_tiny(tmp_path), opened))
        kinds = {kind for kind, _ in layers}
        products = [layer for kind, layer in layers if kind == "MATRIX_MULTIPLY"]
        assert {layer.op1.name for layer in products} == {"TRANSPOSE"}
    assert kinds <= set(layer_functions.LAYER_FUNCTIONS) | {"CONSTANT"}


def test_differences_are_shares_of_the_largest_magnitude() -> None:
    assert relative_difference(np.array([1.0, -4.1]), np.array([1.1, -4.0])) == pytest.approx(0.025)
    assert relative_difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == np.inf
    assert relative_difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0


def test_ids_may_differ_only_where_scores_are_near() -> None:
    logits = np.array([[1.0, 0.9999, 0.0], [0.0, 1.0, 0.5]], np.float32)
    assert not ids_differ(np.array([1, 1]), np.array([0, 1]), logits, 1e-3), "the first two are equal, nearly"
    assert ids_differ(np.array([0, 2]), np.array([0, 1]), logits, 1e-3)
    scores = np.array([[-0.1, -0.2, -5.0]], np.float32)
    assert ids_differ(np.array([[7, 9, 4]]), np.array([[8, 9, 4]]), scores, 1e-3)
    assert not ids_differ(np.array([[9, 8, 3]]), np.array([[8, 9, 4]]), scores, 2e-2), "near, and the last of three"


def test_tolerances_are_those_of_the_dtype() -> None:
    assert network_check.TOLERANCES == {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
