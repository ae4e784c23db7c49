"""``draftline::TreeAttention`` as a model-local ONNX function: the reference body every engine can fall back on."""

from __future__ import annotations

import onnx
import onnx.parser

from draftline.share import share_path


def load_tree_attention_function() -> onnx.FunctionProto:
    """Read the function body from ``plugins/tree_attention/function.onnxtxt``."""
    text = (share_path("plugins") / "tree_attention" / "function.onnxtxt").read_text(encoding="utf-8")
    return onnx.parser.parse_function(text)
