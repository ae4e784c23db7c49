"""``Operators`` in the native ones of ``plugins/`` (contract: ``plugins/README.md``), for ONNX Runtime on a CPU."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.graphs.operators import HeadNorms, Heads, Rotary
from draftline.graphs.sampler import EditInputs, output_sampled_ids
from draftline.graphs.step_inputs import SamplingInputs


class NativeOperators:
    """Implements ``Operators``. TreeAttention is an operator, not a function."""

    onnx_type: int = TensorProto.FLOAT
    multiplies_chosen = True

    def functions(self) -> list[onnx.FunctionProto]:
        return []

    def product(self, graph: OnnxGraph, x: str, weight: str, name: str) -> str:
        return graph.op("Linear", x, weight, domain=DRAFTLINE, name=name)

    def add_norm(self, graph: OnnxGraph, x: str, y: str, weight: str, epsilon: float) -> tuple[str, str]:
        total, normed = graph.ops("AddNorm", x, y, weight, outputs=2, domain=DRAFTLINE, epsilon=epsilon)
        return total, normed

    def rotated_heads(
        self, graph: OnnxGraph, qkv: str, heads: Heads, rotary: Rotary, norms: HeadNorms | None, epsilon: float
    ) -> tuple[str, str, str]:
        q, k, v = graph.ops(
            "RotatedHeads",
            qkv,
            rotary.cosines,
            rotary.sines,
            rotary.position_ids,
            *(norms or ()),
            outputs=3,
            domain=DRAFTLINE,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            epsilon=epsilon,
        )
        return q, k, v

    def silu_gate(self, graph: OnnxGraph, both: str, size: int, up_first: bool = False) -> str:
        return graph.op("SiluGate", both, domain=DRAFTLINE, up_first=int(up_first))

    def gelu_gate(self, graph: OnnxGraph, both: str, size: int) -> str:
        return graph.op("GeluGate", both, domain=DRAFTLINE)

    def sample(
        self, graph: OnnxGraph, logits: str, sampling: SamplingInputs, edits: EditInputs | None, vocab_size: int
    ) -> str:
        return graph.op("Sample", logits, *sampling, *(edits or ()), domain=DRAFTLINE)

    def output_drawn(self, graph: OnnxGraph, logits: str, vocab_size: int, with_edits: bool) -> None:
        output_sampled_ids(graph, self.sample, logits, vocab_size, with_edits)

    def candidates(self, graph: OnnxGraph, logits: str, num_candidates: int) -> tuple[str, str]:
        ids, log_probs = graph.ops("TopCandidates", logits, outputs=2, domain=DRAFTLINE, num_candidates=num_candidates)
        return ids, log_probs


NATIVE = NativeOperators()
