"""Arguments and constants of each kernel: names and order as in its source, types as in contract.yaml."""

from __future__ import annotations

from typing import Any

from draftline.kernels.shape import KernelConfiguration, KernelShape

# Triton's names of types; "T" is the model's dtype, "P" the pool's, "R" that of rows to commit.
SIGNATURES: dict[str, dict[str, str]] = {
    "tree_attention": {
        "q": "*T",
        "k_new": "*T",
        "v_new": "*T",
        "kv_pool": "*P",
        "block_table": "*i32",
        "context_lengths": "*i32",
        "sequence_starts": "*i32",
        "packed_mask": "*i32",
        "sinks": "*fp32",
        "out": "*T",
        "workspace": "*fp32",
        "scale": "fp32",
        "key_scale": "fp32",
        "value_scale": "fp32",
        "num_tokens": "i32",
        "num_sequences": "i32",
        "max_blocks": "i32",
        "mask_words": "i32",
        "num_sections": "i32",
    },
    "tree_attention_reduce": {
        "context_lengths": "*i32",
        "sequence_starts": "*i32",
        "out": "*T",
        "workspace": "*fp32",
        "value_scale": "fp32",
        "num_tokens": "i32",
        "num_sequences": "i32",
        "num_sections": "i32",
    },
    "commit_rows": {
        "kv_rows": "*R",
        "rows": "*i64",
        "slots": "*i64",
        "kv_pools": "*P",
        "scales": "*fp32",
        "layer_stride": "i64",
    },
}
QUICK = "tree_attention_quick"
SIGNATURES[QUICK] = {  # inputs, integers, outputs: the order of a quick plugin's launch
    **{name: SIGNATURES["tree_attention"][name] for name in list(SIGNATURES["tree_attention"])[:9]},
    "scale_bits": "i32",
    "key_scale_bits": "i32",
    "value_scale_bits": "i32",
    "num_tokens": "i32",
    "num_sequences": "i32",
    "max_blocks": "i32",
    "mask_words": "i32",
    "out": "*T",
}
# Columns of a head that the kernel holds in one tensor: with as many columns as rows or fewer, Triton gives each warp
# rows of its own, and no two of them meet in a maximum or a sum.
COLUMN_PART = 64
TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "u8"}
ARGUMENT_TYPES = {"i32": "int32", "i64": "int64", "fp32": "float32"}


def signature(name: str, shape: KernelShape) -> dict[str, str]:
    """Return name and Triton type of each argument, in launch order. Codes of float8 are uint8."""
    row_dtype = shape.dtype if shape.kv_dtype == "float8_e4m3fn" else shape.kv_dtype
    types = {"*T": shape.dtype, "*P": shape.kv_dtype, "*R": row_dtype}
    return {
        argument: f"*{TRITON_TYPES[types[kind]]}" if kind in types else kind
        for argument, kind in SIGNATURES[name].items()
    }


def compiler_options(name: str, configuration: KernelConfiguration) -> dict[str, int]:
    """Return warps of a program and stages of its loops; what only moves rows takes little of either."""
    if name in ("tree_attention", QUICK):
        return {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    return {"num_warps": 4 if name == "tree_attention_reduce" else 1, "num_stages": 2}


def constants(name: str, shape: KernelShape, configuration: KernelConfiguration) -> dict[str, Any]:
    """Return the constants that ``name`` is compiled with; those of the interpreter differ in DOT_IN_FLOAT32."""
    model: dict[str, Any] = {
        "HEAD_SIZE": shape.head_size,
        "PADDED_HEAD_SIZE": shape.padded_head_size,
    }
    pool = {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "BLOCK_SIZE": shape.block_size,
        "KV_IS_FLOAT8": shape.kv_dtype == "float8_e4m3fn",
    }
    if name == "commit_rows":
        return {**model, **pool, "PADDED_KV_HEADS": 1 << (shape.num_kv_heads - 1).bit_length()}
    sections = {
        "NUM_HEADS": shape.num_heads,
        "WINDOW": max(0, shape.window),
        "TILE_KEYS": configuration.tile_keys,
        "MIN_SECTION_KEYS": configuration.min_section_keys,
        "MIN_KEYS_PER_TOKEN": configuration.min_keys_per_row * shape.group,
        "MAX_SECTIONS": configuration.max_sections,
        "MAX_SPLIT_ROWS": configuration.max_split_rows,
    }
    if name == "tree_attention_reduce":
        return {**model, **sections}
    rest = shape.head_size % COLUMN_PART
    return {
        **pool,
        **sections,
        "HEAD_SIZE": shape.head_size,
        "SOFTCAP": shape.softcap,
        "HAS_SINKS": shape.has_sinks,
        "PART": COLUMN_PART,
        "LAST_PART": max(16, 1 << (rest - 1).bit_length()) if rest else COLUMN_PART,
        "TILE_ROWS": configuration.tile_rows,
        "PRECISION": "tf32x3",
        "DOT_IN_FLOAT32": False,
    }
