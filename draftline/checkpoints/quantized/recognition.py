"""The layout that a checkpoint says it has; everything else is refused by name.

Source: ``QuantizationMethod`` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.auto_round import auto_round_layout
from draftline.checkpoints.quantized.awq import awq_layout
from draftline.checkpoints.quantized.compressed_tensors import compressed_tensors_layout
from draftline.checkpoints.quantized.float8 import fbgemm_layout, float8_layout
from draftline.checkpoints.quantized.gptq import gptq_layout
from draftline.checkpoints.quantized.layout import Layout
from draftline.checkpoints.quantized.modelopt import modelopt_layout
from draftline.checkpoints.quantized.mxfp4 import mxfp4_layout
from draftline.checkpoints.quantized.parts import USE_ORIGINAL
from draftline.errors import CheckpointError

# Lists of layers that stay plain. Names count; patterns, of which every tool has its own kind, name no layer exactly.
EXCLUDING = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")

LAYOUTS: dict[str, Callable[[JsonObject], Layout]] = {
    "gptq": gptq_layout,
    "awq": awq_layout,
    "auto-round": auto_round_layout,
    "intel/auto-round": auto_round_layout,
    "fp8": float8_layout,
    "fbgemm_fp8": fbgemm_layout,
    "compressed-tensors": compressed_tensors_layout,
    "modelopt": modelopt_layout,
    "mxfp4": mxfp4_layout,
}
_TABLES = "codes that stand for entries of tables, or of a lattice"
_KERNELS = "an order of codes that only its kernels know"
_CLASSES = "tensors of its own classes"
_TURNED = "inputs or weights that are turned before they are multiplied"
_FLOAT4 = "float4 in a layout of its own; that of ModelOpt and of compressed-tensors is read"
REFUSED: dict[str, str] = {
    "aqlm": _TABLES,
    "bitnet": "ternary codes, of a network of its own",
    "bitsandbytes": _TABLES,
    "eetq": _KERNELS,
    "fp_quant": _TURNED,
    "fouroversix": _FLOAT4,
    "gguf": "another file: give the .gguf file itself",
    "higgs": _TABLES,
    "hqq": "codes whose order depends on its version and backend",
    "metal": _KERNELS,
    "mxfp8": "codes with exponents of blocks, in a layout of its own",
    "nvfp4": _FLOAT4,
    "quanto": _CLASSES,
    "quark": "one of several packings",
    "sinq": "a second scale, of inputs",
    "spqr": "outliers beside the codes",
    "torchao": _CLASSES,
    "vptq": _TABLES,
}


def is_read(config: JsonObject) -> bool:
    """Whether ``recognise_layout`` knows the layout."""
    try:
        recognise_layout(config)
    except CheckpointError:
        return False
    return True


def recognise_layout(config: JsonObject) -> Layout:
    """Return the layout of what ``find_quantization`` found.

    Raises: CheckpointError where it is none that is read, with the reason.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in LAYOUTS:
        reason = f", {REFUSED[str(method)]}" if str(method) in REFUSED else ""
        rule = f"{config.prefix}quant_method is one of {', '.join(LAYOUTS)}"
        raise CheckpointError(config.where, rule, f"{method!r}{reason}", USE_ORIGINAL)
    lists = (config.get(key) for key in EXCLUDING)
    excluded = frozenset(str(name) for names in lists if isinstance(names, list) for name in names)
    return replace(LAYOUTS[method](config), excluded=excluded)
