"""Float8 (E4M3) of the methods ``fp8`` and ``fbgemm_fp8``.

Source: ``FineGrainedFP8Config`` and ``FbgemmFp8Config`` of transformers, DeepSeek-V3's and Qwen3's published
checkpoints, and those of AutoFP8. ``weight_scale_inv`` is no inverse: weights are multiplied by it, too.
"""

from __future__ import annotations

from functools import partial

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.grid import WHOLE
from draftline.checkpoints.quantized.layout import WEIGHT, Layout
from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts
from draftline.checkpoints.quantized.scaled import FLOAT8, open_scaled
from draftline.checkpoints.source_tensor import SourceTensor

SCALE, SCALE_INV = "weight_scale", "weight_scale_inv"
ACTIVATIONS = frozenset(("activation_scale", "input_scale", "input_scale_ub", "output_scale"))
KEYS_AND_VALUES = frozenset(("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale"))
PER_TENSOR, PER_OUTPUT = (WHOLE, WHOLE), (1, WHOLE)


def float8_layout(config: JsonObject) -> Layout:
    """Read the configuration of method ``fp8``. Raises: CheckpointError where it is of another format."""
    if config.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise config.error("fmt", '"e4m3"', config.get("fmt"), USE_ORIGINAL)
    if config.get("expert_dtype") not in (None, "fp8"):
        raise config.error("expert_dtype", '"fp8"', config.get("expert_dtype"), USE_ORIGINAL)
    sizes = config.integers("weight_block_size")
    if sizes and (len(sizes) != 2 or 0 in sizes):
        raise config.error("weight_block_size", "null, or the rows and columns of a block", list(sizes))
    blocks = ((sizes[0], sizes[1]),) if sizes else (PER_TENSOR, PER_OUTPUT)
    scales = f"a scale for {sizes[0]} x {sizes[1]} weights" if sizes else "a scale for each matrix or output"
    return _layout(f"FP8 (E4M3), {scales}", blocks)


def fbgemm_layout(config: JsonObject) -> Layout:
    """Read the configuration of method ``fbgemm_fp8``."""
    return _layout("FP8 (E4M3) of FBGEMM, a scale for each output", (PER_OUTPUT,))


def _layout(title: str, blocks: tuple[tuple[int, int], ...]) -> Layout:
    return Layout(
        title=title,
        parts=frozenset((WEIGHT, SCALE, SCALE_INV)),
        unused=ACTIVATIONS | KEYS_AND_VALUES,
        open_matrix=partial(_open_matrix, blocks),
    )


def _open_matrix(blocks: tuple[tuple[int, int], ...], parts: Parts) -> SourceTensor:
    return open_scaled(parts, FLOAT8, SCALE_INV if SCALE_INV in parts.tensors else SCALE, blocks)
