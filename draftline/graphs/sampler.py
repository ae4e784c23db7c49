"""The sampler at the end of the target graph: greedy, temperature, top-k, top-p, one uniform number per row.

Its oracle is ``draftline.sampling.sample_reference``. Rules: temperature, then top-k (ties with the k-th value stay),
then top-p (a token stays while the probability strictly above its own is below ``top_p``), then the first token in id
order whose cumulated kept probability exceeds ``uniform`` times their sum. Before them come the edits of single logits;
their oracle is ``draftline.logit_edits.edited_logits``. Parts that no row of the step needs are skipped by
``If``. The native operator ``Sample`` (``plugins/cpu/sample.h``) follows the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnx import TensorProto

from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.step_inputs import SamplingInputs, emit_sampling_inputs
from draftline.logit_edits import BANNED

GROUP = 128  # tokens summed together; the cumulative sum walks over groups, then inside one
NUCLEUS_GUESS = 1024  # tokens sorted first for top-p; all are sorted when a row's nucleus is larger
LOWEST = -3.0e38


class EditInputs(NamedTuple):
    """Names of the fields of ``LogitEdits`` in the graph: ``[E]`` each, E >= 0."""

    rows: str
    token_ids: str
    bias: str
    divisor: str
    offset: str


def emit_edit_inputs(graph: OnnxGraph) -> EditInputs:
    """Add the graph inputs ``edit_rows``, ``edit_token_ids``, ``edit_bias``, ``edit_divisor``, ``edit_offset``."""
    types = dict.fromkeys(EditInputs._fields, TensorProto.FLOAT)
    types |= dict.fromkeys(("rows", "token_ids"), TensorProto.INT32)
    return EditInputs(**{name: graph.input(f"edit_{name}", onnx_type, ["E"]) for name, onnx_type in types.items()})


def output_sampled_ids(
    graph: OnnxGraph,
    sample: Callable[[OnnxGraph, str, SamplingInputs, EditInputs | None, int], str],
    logits: str,
    vocab_size: int,
    with_edits: bool,
) -> None:
    """Add the inputs of sampling, the edits' where there are some, and the output ``sampled_ids [R] int64``."""
    sampling = emit_sampling_inputs(graph)
    edits = emit_edit_inputs(graph) if with_edits else None
    graph.output(sample(graph, logits, sampling, edits, vocab_size), "sampled_ids", TensorProto.INT64, ["R"])


def emit_edited_sampler(
    graph: OnnxGraph,
    logits: str,
    edits: EditInputs,
    temperature: str,
    top_k: str,
    top_p: str,
    uniform: str,
    vocab_size: int,
) -> str:
    """Append the edits of ``draftline.logit_edits`` and the sampler; returns ``sampled_ids [R] int64``.

    ``logits`` stays as it is; a step without edits does not copy it.

    Shapes: as ``emit_sampler``; no (row, token) twice among the edits.
    """

    def sample(branch: OnnxGraph, values: str) -> str:
        return emit_sampler(branch, values, temperature, top_k, top_p, uniform, vocab_size)

    num_edits = graph.op("Squeeze", graph.op("Shape", edits.rows))
    return graph.branch(
        graph.op("Greater", num_edits, graph.constant(0)),
        lambda branch: sample(branch, _edit_logits(branch, logits, edits)),
        lambda branch: sample(branch, logits),
        TensorProto.INT64,
    )


def _edit_logits(graph: OnnxGraph, logits: str, edits: EditInputs) -> str:
    columns = [_column(graph, graph.op("Cast", name, to=TensorProto.INT64)) for name in (edits.rows, edits.token_ids)]
    index = graph.op("Concat", *columns, axis=1)
    biased = graph.op("Add", graph.op("GatherND", logits, index), edits.bias)
    repeated = graph.op(
        "Where",
        graph.op("Greater", biased, graph.constant(0.0)),
        graph.op("Div", biased, edits.divisor),
        graph.op("Mul", biased, edits.divisor),
    )
    edited = graph.op("Max", graph.op("Add", repeated, edits.offset), graph.constant(BANNED))
    return graph.op("ScatterND", logits, index, edited)


def emit_sampler(
    graph: OnnxGraph, logits: str, temperature: str, top_k: str, top_p: str, uniform: str, vocab_size: int
) -> str:
    """Append the sampler; returns ``sampled_ids [R] int64``, -1 where a row holds no distribution.

    Such a row has a NaN or an infinite logit, or none above -inf; finite ones whose sum is infinite count as that too.

    Shapes: ``logits [R, V] float32``; ``temperature``, ``top_p``, ``uniform [R] float32``, ``top_k [R] int64``; R >= 1.
    """
    drawn = _emit_draw(graph, logits, temperature, top_k, top_p, uniform, vocab_size)
    # Comparisons with NaN are false. Nothing is drawn with -inf unless there is nothing else.
    axis = graph.constant([1])
    total = graph.op("ReduceSum", logits, axis, keepdims=0)
    column = _column(graph, graph.op("Min", drawn, graph.constant(vocab_size - 1)))  # of -inf: of its padding
    of_drawn = graph.op("Squeeze", graph.op("GatherElements", logits, column, axis=1), axis)
    is_valid = graph.op(
        "And",
        graph.op("Less", total, graph.constant(float("inf"))),
        graph.op("Greater", of_drawn, graph.constant(float("-inf"))),
    )
    return graph.op("Where", is_valid, drawn, graph.constant(-1))


def _emit_draw(
    graph: OnnxGraph, logits: str, temperature: str, top_k: str, top_p: str, uniform: str, vocab_size: int
) -> str:
    greedy = graph.op("ArgMax", logits, axis=1, keepdims=0)
    is_sampled = graph.op("Greater", temperature, graph.constant(0.0))
    any_sampled = _any(graph, is_sampled)

    def sample(branch: OnnxGraph) -> str:
        divisor = branch.op("Where", is_sampled, temperature, branch.constant(1.0))
        scaled = branch.op("Div", _pad_vocabulary(branch, logits, vocab_size), _column(branch, divisor))
        kept = _apply_top_k(branch, scaled, top_k, vocab_size)
        probabilities = branch.op("Softmax", kept, axis=-1)
        nucleus = _apply_top_p(branch, probabilities, top_p, vocab_size)
        drawn = _inverse_cdf(branch, nucleus, uniform, vocab_size)
        return branch.op("Where", is_sampled, drawn, greedy)

    return graph.branch(any_sampled, sample, lambda branch: branch.op("Identity", greedy), TensorProto.INT64)


def _column(graph: OnnxGraph, vector: str) -> str:
    return graph.op("Unsqueeze", vector, graph.constant([1]))


def _any(graph: OnnxGraph, flags: str) -> str:
    count = graph.op("ReduceMax", graph.op("Cast", flags, to=TensorProto.INT32), graph.constant([0]), keepdims=0)
    return graph.op("Cast", count, to=TensorProto.BOOL)


def _pad_vocabulary(graph: OnnxGraph, logits: str, vocab_size: int) -> str:
    """Rows of whole groups: each row then starts aligned and is summed the same wherever it stands in the batch."""
    missing = -vocab_size % GROUP
    if not missing:
        return logits
    return graph.op("Pad", logits, graph.constant([0, 0, 0, missing]), graph.constant(LOWEST))


def _apply_top_k(graph: OnnxGraph, scaled: str, top_k: str, vocab_size: int) -> str:
    zero, last = graph.constant(0), graph.constant(vocab_size)
    uses_top_k = graph.op("Greater", top_k, zero)

    def restrict(branch: OnnxGraph) -> str:
        wanted = branch.op("Min", branch.op("Max", top_k, branch.constant(1)), last)
        most = branch.op("ReduceMax", wanted, branch.constant([0]), keepdims=1)
        values, _ = branch.ops("TopK", scaled, most, outputs=2, axis=1)
        index = _column(branch, branch.op("Sub", wanted, branch.constant(1)))
        kth = branch.op("GatherElements", values, index, axis=1)
        bound = branch.op("Where", _column(branch, uses_top_k), kth, branch.constant(LOWEST))
        return branch.op("Where", branch.op("GreaterOrEqual", scaled, bound), scaled, branch.constant(LOWEST))

    return graph.branch(_any(graph, uses_top_k), restrict, lambda b: b.op("Identity", scaled), TensorProto.FLOAT)


def _apply_top_p(graph: OnnxGraph, probabilities: str, top_p: str, vocab_size: int) -> str:
    uses_top_p = graph.op("Less", top_p, graph.constant(1.0))
    top_p_column = _column(graph, top_p)

    def smallest_kept(branch: OnnxGraph, sorted_values: str) -> str:
        above = branch.op("CumSum", sorted_values, branch.constant(1), exclusive=1)
        is_kept = branch.op("Less", above, top_p_column)
        candidates = branch.op("Where", is_kept, sorted_values, branch.constant(2.0))
        smallest = branch.op("ReduceMin", candidates, branch.constant([1]), keepdims=1)
        # The most probable token always stays, also for a top_p that underflows to nothing.
        first = branch.op("Slice", sorted_values, branch.constant([0]), branch.constant([1]), branch.constant([1]))
        return branch.op("Min", smallest, first)

    def restrict(branch: OnnxGraph) -> str:
        guess = branch.constant([min(NUCLEUS_GUESS, vocab_size)])
        values, _ = branch.ops("TopK", probabilities, guess, outputs=2, axis=1)
        mass = branch.op("ReduceSum", values, branch.constant([1]), keepdims=1)
        # Half a per mille of slack: this sum and the cumulative one may round differently.
        is_short = branch.op("Less", mass, branch.op("Mul", top_p_column, branch.constant(1.0005)))
        needs_all = _any(branch, branch.op("And", branch.op("Squeeze", is_short, branch.constant([1])), uses_top_p))

        def sort_all(inner: OnnxGraph) -> str:
            everything, _ = inner.ops("TopK", probabilities, inner.constant([vocab_size]), outputs=2, axis=1)
            return smallest_kept(inner, everything)

        bound = branch.branch(needs_all, sort_all, lambda inner: smallest_kept(inner, values), TensorProto.FLOAT)
        bound = branch.op("Where", _column(branch, uses_top_p), bound, branch.constant(0.0))
        return branch.op(
            "Where", branch.op("GreaterOrEqual", probabilities, bound), probabilities, branch.constant(0.0)
        )

    return graph.branch(_any(graph, uses_top_p), restrict, lambda b: b.op("Identity", probabilities), TensorProto.FLOAT)


def _inverse_cdf(graph: OnnxGraph, weights: str, uniform: str, vocab_size: int) -> str:
    """First token whose cumulated weight exceeds uniform x total; tokens of weight 0 are never drawn."""
    one = graph.constant(1)
    grouped = graph.op("Reshape", weights, graph.constant([0, -(-vocab_size // GROUP), GROUP]))
    sums = graph.op("ReduceSum", grouped, graph.constant([2]), keepdims=0)
    cumulated = graph.op("CumSum", sums, one)
    total = graph.op("ReduceMax", cumulated, graph.constant([1]), keepdims=1)
    target = graph.op("Mul", total, _column(graph, uniform))
    group = _first_above(graph, cumulated, sums, target)
    before = graph.op("CumSum", sums, one, exclusive=1)
    group_before = graph.op("GatherElements", before, _column(graph, group), axis=1)
    inside = graph.op("GatherND", grouped, _column(graph, group), batch_dims=1)
    inside_cumulated = graph.op("Add", graph.op("CumSum", inside, one), group_before)
    token = _first_above(graph, inside_cumulated, inside, target)
    return graph.op("Add", graph.op("Mul", group, graph.constant(GROUP)), token)


def _first_above(graph: OnnxGraph, cumulated: str, weights: str, target: str) -> str:
    """Index of the first entry with cumulated > target; of the last one with weight where rounding leaves none."""
    axis = graph.constant([1])
    below = graph.op("Cast", graph.op("LessOrEqual", cumulated, target), to=TensorProto.INT64)
    count = graph.op("ReduceSum", below, axis, keepdims=0)
    width = graph.op("Shape", weights, start=1, end=2)
    indices = graph.op("Range", graph.constant(0), graph.op("Squeeze", width), graph.constant(1))
    has_weight = graph.op("Cast", graph.op("Greater", weights, graph.constant(0.0)), to=TensorProto.INT64)
    last = graph.op("ReduceMax", graph.op("Mul", has_weight, indices), axis, keepdims=0)
    return graph.op("Min", count, last)
