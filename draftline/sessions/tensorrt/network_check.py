"""Whether the network that a vendor parsed computes what ONNX Runtime computes from the same graph; without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import BuildError
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.kernels.shape import KernelShape
from draftline.sessions.available_cores import choose_num_threads
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.engine_config import PoolDtype, PoolScales
from draftline.sessions.tensorrt.emission import emit_graphs
from draftline.sessions.tensorrt.evaluation import read_hidden_weights
from draftline.sessions.tensorrt.network import layers_of, parse_network
from draftline.sessions.tensorrt.network_steps import CheckedGraph, NetworkSteps
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels
from draftline.sessions.tensorrt.profiles import StepLimits
from draftline.sessions.tensorrt.vendor import Vendor
from draftline.speculation import TreeShape

# Of the largest magnitude in an output. float16 and bfloat16 round after every layer, 11 and 8 bits of a number.
TOLERANCES: dict[NetworkDtype, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
# Beside a float8 pool: what lies in the middle of two numbers is rounded to either, a sixteenth away.
FLOAT8_POOL_TOLERANCES: dict[NetworkDtype, float] = {"float32": 1e-2, "float16": 1e-1, "bfloat16": 2e-1}


@dataclass(frozen=True)
class NetworkReport:
    """How far the parsed network of ``graph`` is from ONNX Runtime.

    ``differences``: of each output the largest difference, as a share of the largest magnitude in it, and none is above
    ``tolerance``; of ids 0 (1 where one differs that the tolerance does not explain). Of a model with experts these are
    of the row in the middle: a row with two experts that weigh nearly the same goes to either, and comes out as
    another. ``num_layers`` as parsed, ``num_plugins`` of them TreeAttention.
    """

    graph: str
    dtype: str
    num_layers: int
    num_plugins: int
    tolerance: float
    differences: dict[str, float]

    def check(self) -> None:
        """Raise BuildError where an output is too far off."""
        for output, difference in self.differences.items():
            if not difference <= self.tolerance:
                rule = f"the parsed network differs from ONNX Runtime by at most {self.tolerance:g}"
                cure = "report this graph, or set check.network to never and engine.backend to onnxruntime"
                raise BuildError(f"network check: {self.graph}: {output}", rule, f"{difference:.3g}", cure)


def check_networks(
    vendor: Vendor,
    checkpoint: Path,
    scratch: Path,
    *,
    dtype: NetworkDtype,
    pool_dtype: PoolDtype,
    pool_scales: PoolScales = (),
    limits: StepLimits,
    token_ids: Sequence[int],
    weights_dtype: str | None = None,
    drafts: Sequence[DraftSource] = (),
    tree: TreeShape | None = None,
    num_threads: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[NetworkReport, ...]:
    """Parse the graphs of a converted checkpoint, evaluate the networks, and compare with ONNX Runtime.

    The graphs stand in the empty folder ``scratch`` for as long as that takes. ``token_ids``: a text of the model's.
    ONNX Runtime runs the same file. It has no operators of bfloat16: there the reference is the graph in float32, whose
    weights are those that ``weights_dtype`` rounds to. Nor does it gather float8: there it is a graph with a pool of
    its own dtype, which rounds rows as the float8 pool does.

    Raises: BuildError where an output differs by more than the tolerance, and what parsing raises.
    """
    emitted = emit_graphs(
        checkpoint,
        scratch,
        dtype=dtype,
        weights_dtype=weights_dtype,
        pool_dtype=pool_dtype,
        pool_scales=pool_scales,
        limits=limits,
        drafts=drafts,
        tree=tree,
    )
    references = emitted
    if dtype == "bfloat16" or pool_scales:
        reference_dtype: NetworkDtype = "float32" if dtype == "bfloat16" else dtype
        (scratch / "reference").mkdir()
        references = emit_graphs(
            checkpoint,
            scratch / "reference",
            dtype=reference_dtype,
            weights_dtype=weights_dtype,
            is_widened=reference_dtype != dtype,
            pool_dtype=reference_dtype,
            pool_scales=pool_scales,
            limits=limits,
            drafts=drafts,
            tree=tree,
        )
    reports, features = [], None
    for index, (graph, reference) in enumerate(zip(emitted.graphs, references.graphs, strict=True)):
        with ExitStack() as opened:
            kernels = [PluginKernels(shape, ()) for shape in graph.kernel_shapes]
            network = parse_network(vendor, graph.file, kernels, log, opened)
            session = _open_reference(reference.file, num_threads)
            tolerance = choose_tolerance(graph.kernel_shape)
            checked = CheckedGraph(graph, network, read_hidden_weights(graph.file), session)
            steps = NetworkSteps(checked, limits, token_ids, tolerance)
            if index == 0:
                features = steps.run_target()
            else:
                draft = emitted.drafts[int(graph.name.removeprefix("draft-"))]
                steps.run_draft(draft, features, emitted)
            kinds = [kind for kind, _ in layers_of(network)]
            counts = len(kinds), kinds.count("PLUGIN_V3")
            report = NetworkReport(graph.name, dtype, *counts, tolerance, steps.differences)
            report.check()
            reports.append(report)
    return tuple(reports)


def choose_tolerance(shape: KernelShape) -> float:
    """Return how far the outputs of a network with these kernels may be off."""
    tolerances = FLOAT8_POOL_TOLERANCES if shape.kv_dtype == "float8_e4m3fn" else TOLERANCES
    return tolerances[shape.dtype]


def _open_reference(file: Path, num_threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = choose_num_threads(num_threads)
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
