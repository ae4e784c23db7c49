"""``draftline::TreeAttention`` as a model-local ONNX function: the reference body every engine can fall back on."""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx.parser
from onnx import TensorProto, helper

from draftline.share import share_path

SCATTERED_IN_PLACE = ("k_rows", "k_all", "v_rows", "v_all")


def load_tree_attention_function() -> onnx.FunctionProto:
    """Read the function body from ``plugins/tree_attention/function.onnxtxt``."""
    text = (share_path("plugins") / "tree_attention" / "function.onnxtxt").read_text(encoding="utf-8")
    return onnx.parser.parse_function(text)


def inline_tree_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the function's nodes by its body, as ONNX Runtime would, and name the shapes that it must know.

    The key and value rows before and after scattering have the same shape, which no inference finds; told so, ONNX
    Runtime scatters in place instead of copying every gathered key (a sixth of a step at batch 16, context 256).
    New rows are cast to the pool's type by name: ONNX Runtime drops a Cast that changes nothing, but not a CastLike.
    Rows of the network are float32.
    """
    inlined = onnx.inliner.inline_local_functions(model)
    types = {value.name: value.type.tensor_type.elem_type for value in inlined.graph.input}  # the pools', above all
    for node in inlined.graph.node:
        if node.op_type == "CastLike":
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", types.get(node.input.pop(), TensorProto.FLOAT)))
        for name in node.output:
            if name.rpartition("__")[0] in SCATTERED_IN_PLACE:  # the inliner's names: body's name, __, number
                inlined.graph.value_info.append(
                    helper.make_tensor_value_info(name, TensorProto.FLOAT, ["key_rows", "head_size"])
                )
    return inlined
