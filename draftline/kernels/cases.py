"""Cases that the kernels are compared with the oracle in, each from a number; the first ones are borders.

``scripts/check_kernels`` runs them in Triton's interpreter, ``scripts/gpu_check`` on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import yaml
from numpy.typing import NDArray

from draftline.kernels.shape import KernelConfiguration, KernelShape, KvDtype
from draftline.oracle import tree_attention
from draftline.share import share_path
from draftline.tree import build_tree_mask, chain_parents, pack_mask

NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
SMALL = KernelConfiguration(16, 32, 64, 1, 4, 64, 4, 2)
TABLE_KEYS = 128  # tokens; the block table spans a multiple of it


class StepCase(NamedTuple):
    """Committed tokens and in-step tree (``parents``) of each sequence of a step."""

    context_lengths: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    seed: int


class KernelCase(NamedTuple):
    shape: KernelShape
    configuration: KernelConfiguration
    step: StepCase
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def scale(self) -> float:
        return float(self.shape.head_size**-0.5)


def chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(chain_parents(num_nodes).tolist())


def branching(num_nodes: int) -> tuple[int, ...]:
    return (-1, *(max(0, node - 1 - node % 5) for node in range(1, num_nodes)))


BORDERS = (
    KernelCase(KernelShape(4, 2, 16, 8), SMALL, StepCase((0,), ((-1,),), 0)),  # no context, one node
    KernelCase(KernelShape(2, 1, 16, 16), SMALL, StepCase((200, 3), (branching(256), chain(2)), 1)),
    KernelCase(KernelShape(3, 1, 64, 8, window=1), SMALL, StepCase((65, 0), (branching(9), chain(3)), 2)),
    KernelCase(
        KernelShape(2, 2, 16, 8, window=40), SMALL, StepCase((300, 41, 39), (chain(70), (-1, 0, 0), chain(1)), 3)
    ),
    KernelCase(
        KernelShape(4, 2, 80, 16, "bfloat16", "bfloat16"), SMALL, StepCase((150, 64), (branching(5), chain(3)), 4)
    ),
    KernelCase(
        KernelShape(4, 1, 96, 32, "bfloat16", "float8_e4m3fn"),
        SMALL,
        StepCase((129, 33), (branching(6), chain(2)), 5),
        0.02,
        0.5,
    ),
    KernelCase(KernelShape(2, 1, 256, 64), SMALL, StepCase((90,), (branching(4),), 6)),
    KernelCase(
        KernelShape(16, 1, 16, 128, "float32", "float16"), SMALL, StepCase((260, 1), (branching(3), chain(4)), 7)
    ),
    KernelCase(
        KernelShape(2, 1, 64, 16, "float32", "float32", softcap=50.0),
        SMALL,
        StepCase((200, 3), (branching(40), chain(2)), 9),
    ),
    KernelCase(
        KernelShape(2, 1, 32, 16, "bfloat16", "float8_e4m3fn", window=40, softcap=2.0),
        SMALL,
        StepCase((90, 30), (branching(6), chain(2)), 10),
        0.02,
        0.5,
    ),
    # Rows whose window has no key of some sections; sinks join one section alone.
    KernelCase(
        KernelShape(4, 2, 16, 8, window=90, has_sinks=True), SMALL, StepCase((300, 2), (chain(70), (-1, 0, 0)), 11)
    ),
    KernelCase(
        KernelShape(3, 1, 64, 16, "float32", "float8_e4m3fn", softcap=2.0, has_sinks=True),
        SMALL,
        StepCase((200, 0), (branching(12), chain(2)), 12),
        0.02,
        0.5,
    ),
    # More rows than are split, so that the workspace holds those of each sequence apart.
    KernelCase(
        KernelShape(2, 2, 16, 8),
        KernelConfiguration(16, 32, 32, 1, 8, 2, 4, 2),
        StepCase((200, 190, 70), (chain(2), branching(9), chain(1)), 8),
    ),
)


@cache
def load_contract() -> dict[str, Any]:
    path = share_path("plugins") / "tree_attention" / "contract.yaml"
    contract: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return contract


def tolerance(dtype: str) -> float:
    """Return how far the kernels of ``dtype`` may be from the oracle, of inputs of order 1."""
    return float(load_contract()["implementations"]["gpu"]["tolerances"][dtype])


def make_case(number: int) -> KernelCase:
    if number < len(BORDERS):
        return BORDERS[number]
    random = np.random.default_rng(number)

    def choose(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    pairs = load_contract()["implementations"]["gpu"]["pairs"]
    dtype, kv_dtype = choose(*((dtype, kv_dtype) for dtype, pools in pairs.items() for kv_dtype in pools))
    heads, kv_heads = choose((1, 1), (2, 2), (4, 2), (3, 1), (7, 1))
    size, block_size = choose(8, 16, 16, 24, 64, 80, 96, 128), choose(8, 16, 32, 64, 128)
    window, softcap, has_sinks = choose(0, 0, 0, 1, 6, 33, 90), choose(0.0, 0.0, 0.5, 50.0), choose(False, False, True)
    shape = KernelShape(heads, kv_heads, size, block_size, dtype, kv_dtype, window, softcap, has_sinks)
    configuration = KernelConfiguration(
        choose(16, 32, 64), choose(32, 64), choose(32, 64, 128), choose(1, 4), choose(1, 3, 20), choose(2, 64), 4, 2
    )
    contexts, trees = [], []
    for _ in range(choose(1, 2, 3)):
        num_nodes = choose(1, 1, 2, 3, 8, 17, 32, 33, 70)
        contexts.append(choose(0, 1, 31, 64, int(random.integers(100)), int(random.integers(300))))
        trees.append(choose(chain(num_nodes), (-1, *(int(random.integers(node)) for node in range(1, num_nodes)))))
    scales = (0.02, 0.5) if kv_dtype == "float8_e4m3fn" else (1.0, 1.0)
    return KernelCase(shape, configuration, StepCase(tuple(contexts), tuple(trees), number), *scales)


def make_step(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, step: StepCase
) -> dict[str, NDArray[Any]]:
    """Make the operator's inputs in float32: random rows, blocks of the pool in random order, masks for all trees."""
    random = np.random.default_rng(step.seed)
    lengths = [len(tree) for tree in step.trees]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens, words = int(starts[-1]), -(-max(lengths) // 32)
    masks = np.zeros((num_tokens, words), np.int32)
    for first, tree in zip(starts, step.trees, strict=False):
        packed = pack_mask(build_tree_mask(tree))
        masks[first : first + len(tree), : packed.shape[1]] = packed
    # As a session does it: columns for in-step tokens as well, though they own no block (-1), up to whole chunks.
    committed_blocks = [-(-context // block_size) for context in step.context_lengths]
    keys = max(context + length for context, length in zip(step.context_lengths, lengths, strict=True))
    table = np.full((len(lengths), -(-keys // TABLE_KEYS) * TABLE_KEYS // block_size), -1, np.int32)
    num_blocks = sum(committed_blocks) + 3
    free = random.permutation(num_blocks).tolist()
    for row, count in enumerate(committed_blocks):
        table[row, :count] = [free.pop() for _ in range(count)]

    def normal(*size: int) -> NDArray[np.float32]:
        return random.standard_normal(size).astype(np.float32)

    pool = normal(num_blocks, 2, num_kv_heads, block_size, head_size)
    return {
        "q": normal(num_tokens, num_heads, head_size),
        "k_new": normal(num_tokens, num_kv_heads, head_size),
        "v_new": normal(num_tokens, num_kv_heads, head_size),
        "kv_pool": pool,
        "block_table": table,
        "context_lengths": np.array(step.context_lengths, np.int32),
        "sequence_starts": starts,
        "packed_mask": masks,
    }


def no_sinks(num_heads: int) -> NDArray[np.float32]:
    return np.full(num_heads, -np.inf, np.float32)


def random_sinks(num_heads: int, seed: int) -> NDArray[np.float32]:
    """Return sinks about as large as scores; the second head has none."""
    sinks = np.random.default_rng(seed).normal(0, 3, num_heads).astype(np.float32)
    sinks[1:2] = -np.inf
    return sinks


def kernel_inputs(case: KernelCase) -> dict[str, NDArray[Any]]:
    """Make the inputs in the case's dtypes; what no row may read of the pool is NaN."""
    shape = case.shape
    inputs = make_step(shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, case.step)
    pool = np.full_like(inputs["kv_pool"], np.nan)
    for row, context in enumerate(case.step.context_lengths):
        for position in range(0, context, shape.block_size):
            block, count = inputs["block_table"][row, position // shape.block_size], context - position
            pool[block, :, :, :count] = inputs["kv_pool"][block, :, :, :count]
    scales = np.array([case.key_scale, case.value_scale], np.float32).reshape(1, 2, 1, 1, 1)
    columns = -(-max(case.step.context_lengths) // shape.block_size)
    rows = {name: inputs[name].astype(NUMPY_DTYPES[shape.dtype]) for name in ("q", "k_new", "v_new")}
    return {
        **inputs,
        **rows,
        "kv_pool": _stored(pool / scales, shape.kv_dtype),
        "block_table": np.ascontiguousarray(inputs["block_table"][:, :columns]),
        "sinks": random_sinks(shape.num_heads, case.step.seed) if shape.has_sinks else no_sinks(shape.num_heads),
    }


def _stored(pool: NDArray[np.float32], kv_dtype: KvDtype) -> NDArray[Any]:
    limited = np.clip(pool, -448, 448) if kv_dtype == "float8_e4m3fn" else pool
    return limited.astype(NUMPY_DTYPES[kv_dtype])


def expected(case: KernelCase, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return the oracle's result for ``kernel_inputs(case)``."""
    wide = {name: inputs[name].astype(np.float32) for name in ("q", "k_new", "v_new")}
    return tree_attention(
        **{**inputs, **wide},
        scale=case.scale,
        window=case.shape.window,
        softcap=case.shape.softcap,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
    )
