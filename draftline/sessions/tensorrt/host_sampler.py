"""Tokens drawn on the host, from logits that a GPU computed, by the sampler that ends the graphs of CPU engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import PORTABLE, SamplingOperators
from draftline.logit_edits import NO_EDITS, LogitEdits
from draftline.sessions.available_cores import choose_num_threads
from draftline.sessions.batch_split import edits_of
from draftline.sessions.native_kernels import choose_kernels, find_library
from draftline.sessions.protocol import DraftBatch, StepBatch

ReadLogits = Callable[[NDArray[np.int64]], NDArray[np.float32]]


class HostSampler:
    """A graph of ONNX Runtime that is the sampler alone: with the native operator where this machine has it."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        import onnxruntime

        kernels = choose_kernels("auto")
        operators: SamplingOperators = NATIVE if kernels == "native" else PORTABLE
        graph = OnnxGraph()
        logits = graph.input("logits", TensorProto.FLOAT, ["R", vocab_size])
        operators.output_drawn(graph, logits, vocab_size, with_edits=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = choose_num_threads(num_threads)
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # it has little to do between steps
        if kernels == "native":
            options.register_custom_ops_library(str(find_library()))
        model = graph.model("sampler", []).SerializeToString()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def draw(
        self,
        greedy_ids: NDArray[np.int64],
        read_logits: ReadLogits,
        batch: StepBatch | DraftBatch,
        edits: LogitEdits | None = None,
    ) -> NDArray[np.int32]:
        """Return the token after each of R rows, as ``StepResult.sampled_ids``.

        A greedy row without edits takes its token of ``greedy_ids [R]``, and nothing is read of it; where that is -1,
        its logits say whether they hold a distribution. ``read_logits`` gives those of rows ``[n, V]``.
        """
        drawn = greedy_ids.astype(np.int32)
        is_asked = (batch.temperature > 0) | (drawn < 0)
        if edits is not None:
            is_asked[edits.rows] = True
        rows = np.flatnonzero(is_asked)
        if not rows.size:
            return drawn
        own = edits_of(edits, rows, len(drawn)) if edits is not None else None
        feeds = {
            "logits": read_logits(rows),
            **{name: getattr(batch, name)[rows] for name in ("temperature", "top_k", "top_p", "uniform")},
            **{f"edit_{field.name}": getattr(own or NO_EDITS, field.name) for field in fields(LogitEdits)},
        }
        (drawn[rows],) = self._session.run(["sampled_ids"], feeds)
        return drawn
