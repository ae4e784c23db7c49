"""Rules that tie fields of a pipeline together, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draftline.config.choices import TreeSize, choices_size, orphans
from draftline.config.rule import Rule
from draftline.config.tensorrt_llm import TENSORRT_LLM_RULES
from draftline.config.training import DEFAULTS_BY_METHOD, SERVED_AS

GPU_BACKENDS = ("tensorrt", "tensorrt_rtx")
LEAST_FLOAT8 = 89  # compute capability; the vendors build no float8 for those before it
FREE_GPU_MEMORY_FRACTION = 0.9  # unless given
# Pools whose numbers a network's dtype holds.
POOLS_BESIDE = {
    "float32": ("float32", "float16", "float8"),
    "float16": ("float16", "float8"),
    "bfloat16": ("bfloat16", "float8"),
}


def _weights_beside(dtype: str) -> tuple[str, ...]:
    return (dtype, *{"float16": ("float8", "int4"), "bfloat16": ("float8",)}.get(dtype, ()))


@dataclass(frozen=True)
class BrokenRule:
    field: str
    rule: str
    got: str
    cure: str


def _only_of(field: str, of_method: str) -> Rule:
    return Rule(
        (f"train.{field}", "train.method"),
        lambda value, method: (value is not None) == (method == of_method),
        f"stands beside method {of_method} only",
        f"remove it, or set train.method to {of_method}",
    )


RULES = (
    Rule(
        ("kv_cache.max_blocks", "kv_cache.block_size", "engine.max_seq_len"),
        lambda max_blocks, block_size, max_seq_len: max_blocks * block_size >= max_seq_len,
        "max_blocks * block_size holds one request of engine.max_seq_len {2} tokens",
        "raise kv_cache.max_blocks or lower engine.max_seq_len to max_blocks * block_size",
    ),
    Rule(
        ("engine.max_num_tokens", "engine.max_batch_size"),
        lambda max_num_tokens, max_batch_size: max_num_tokens >= max_batch_size,
        "a step holds one token of each of engine.max_batch_size {1} requests",
        "set engine.max_num_tokens to {1} or more",
    ),
    Rule(
        ("serve.grpc_port", "serve.http_port"),
        lambda grpc_port, http_port: grpc_port != http_port,
        "differs from serve.http_port",
        "choose another port",
    ),
    Rule(
        ("serve.metrics_port", "serve.http_port", "serve.grpc_port"),
        lambda metrics_port, http_port, grpc_port: metrics_port not in (http_port, grpc_port),
        "differs from serve.http_port {1} and serve.grpc_port {2}",
        "choose another port",
    ),
    Rule(
        ("draft.checkpoint", "draft.method"),
        lambda checkpoint, method: (checkpoint is None) == (method == "ngram"),
        "is given, except with method ngram, which has no weights",
        "add the draft's checkpoint, or remove it from an ngram draft",
    ),
    Rule(
        ("draft.weights_dtype", "draft.method"),
        lambda weights_dtype, method: weights_dtype is None or method != "ngram",
        "stands beside a draft with weights, which ngram has not",
        "remove it",
    ),
    Rule(
        ("draft.weights_dtype", "engine.backend"),
        lambda weights_dtype, backend: weights_dtype is None or backend == "onnxruntime",
        "stands beside engine.backend onnxruntime, not {1}, whose drafts have target.dtype",
        "remove it",
    ),
    Rule(
        ("draft.captured_layers", "draft.method"),
        lambda layers, method: layers is None or method == "eagle3",
        "stands beside a head that reads several layers, eagle3",
        "remove it",
    ),
    Rule(
        ("draft.captured_layers",),
        lambda layers: layers is None or list(layers) == sorted(set(layers)),
        "rise",
        "list each layer once, lowest first",
    ),
    Rule(
        ("draft.method", "draft.earlier_methods"),
        lambda method, earlier_methods: method not in earlier_methods,
        "each draft of a list has another method",
        "remove one of the two",
    ),
    Rule(
        ("tree", "draft"),
        lambda tree, draft: tree is None or bool(draft),
        "stands beside a draft block only",
        "remove tree, or add draft",
    ),
    Rule(
        ("acceptance", "draft"),
        lambda acceptance, draft: acceptance is None or bool(draft),
        "stands beside a draft block only",
        "remove acceptance, or add draft",
    ),
    Rule(
        ("acceptance.epsilon", "acceptance.rule"),
        lambda epsilon, rule: (epsilon is not None) == (rule == "typical"),
        "stands beside rule typical only",
        "remove it, or set acceptance.rule to typical",
    ),
    Rule(
        ("acceptance.alpha", "acceptance.rule"),
        lambda alpha, rule: (alpha is not None) == (rule == "typical"),
        "stands beside rule typical only",
        "remove it, or set acceptance.rule to typical",
    ),
    Rule(
        ("tree.choices", "tree.kind"),
        lambda choices, kind: (choices is not None) == (kind == "static"),
        "is given with kind static, and only there",
        "remove tree.choices from a tree that grows by itself, or add them to a static one",
    ),
    Rule(
        ("tree.choices",),
        lambda choices: choices is None or isinstance(choices, str) or not orphans(choices),
        "lists every path once, and its parent too",
        "add the parents, such as [0] of [0, 0], and remove what stands twice",
    ),
    Rule(
        ("tree.choices", "tree.max_nodes", "tree.max_depth", "tree.top_k"),
        lambda choices, *limits: (size := choices_size(choices)) is None or size.within(TreeSize(*limits)),
        "keeps tree.max_nodes {1}, tree.max_depth {2} and tree.top_k {3}",
        "remove these limits, which follow from choices",
    ),
    Rule(
        ("tree.kind", "draft.methods"),
        lambda kind, methods: kind != "static" or not methods or set(methods) != {"ngram"},
        "static stands beside a draft with candidates to choose from, and ngram proposes one path",
        "set tree.kind to auto or chain",
    ),
    Rule(
        ("tree.max_depth", "tree.max_nodes"),
        lambda max_depth, max_nodes: max_depth < max_nodes,
        "a path of max_depth tokens and the root fit in tree.max_nodes {1}",
        "lower tree.max_depth or raise tree.max_nodes",
    ),
    Rule(
        ("tree.max_nodes", "engine.max_num_tokens"),
        lambda max_nodes, max_num_tokens: max_nodes <= max_num_tokens,
        "one tree fits in a step of engine.max_num_tokens {1}",
        "lower tree.max_nodes or raise engine.max_num_tokens",
    ),
    Rule(
        ("engine.weights_dtype", "engine.backend", "target.dtype"),
        lambda weights, backend, dtype: backend not in GPU_BACKENDS or weights in _weights_beside(dtype),
        "engine.backend {1} computes in target.dtype {2} with weights of the same dtype, of float8 in 16 bits, "
        "or of int4 in float16",
        "set both to one of float16, bfloat16 and float32",
    ),
    Rule(
        ("engine.weights", "engine.weights_dtype"),
        lambda weights, dtype: weights == "embedded" or dtype != "int4",
        "weights of int4 are embedded",
        "set it to embedded, or engine.weights_dtype to target.dtype",
    ),
    Rule(
        ("engine.weights_dtype", "engine.backend"),
        lambda weights, backend: backend != "onnxruntime" or weights in ("float32", "int8", "int4"),
        "engine.backend onnxruntime keeps weights in float32, int8 or int4",
        "set it to one of these, or engine.backend to tensorrt_rtx or tensorrt",
    ),
    Rule(
        ("kv_cache.dtype", "engine.backend", "target.dtype"),
        lambda pool, backend, dtype: backend not in GPU_BACKENDS or pool in POOLS_BESIDE[dtype],
        "engine.backend {1} keeps keys and values in target.dtype {2} or in float8",
        "set it to {2}",
    ),
    Rule(
        ("engine.weights", "engine.backend"),
        lambda weights, backend: weights == "embedded" or backend in GPU_BACKENDS,
        "external stands beside engine.backend tensorrt and tensorrt_rtx",
        "remove it: the weights of {1} always lie beside the graph",
    ),
    Rule(
        ("engine.plugin", "engine.backend"),
        lambda plugin, backend: plugin == "runtime" or backend == "tensorrt",
        "quick stands beside engine.backend tensorrt",
        "set it to runtime",
    ),
    Rule(
        ("engine.cuda_graphs", "engine.backend"),
        lambda cuda_graphs, backend: cuda_graphs or backend in GPU_BACKENDS,
        "false stands beside engine.backend tensorrt and tensorrt_rtx",
        "remove it: {1} has none",
    ),
    Rule(
        ("kv_cache.free_gpu_memory_fraction", "engine.backend"),
        lambda fraction, backend: fraction == FREE_GPU_MEMORY_FRACTION or backend != "onnxruntime",
        "stands beside engine.backend tensorrt, tensorrt_rtx and tensorrt_llm",
        "remove it: the pool of {1} has kv_cache.max_blocks",
    ),
    Rule(
        ("engine.compute_capabilities", "engine.backend"),
        lambda capabilities, backend: not capabilities or backend == "tensorrt_rtx",
        "stands beside engine.backend tensorrt_rtx",
        "remove it: {1} builds for this machine",
    ),
    Rule(
        ("engine.compute_capabilities", "engine.backend"),
        lambda capabilities, backend: backend != "tensorrt_rtx" or not set(capabilities) & {90, 100},
        "TensorRT-RTX does not build for Hopper and data-center Blackwell (90, 100)",
        "remove them, or set engine.backend to tensorrt and build on such a GPU",
    ),
    Rule(
        ("engine.compute_capabilities", "engine.weights_dtype"),
        lambda capabilities, weights: weights != "float8" or all(number >= LEAST_FLOAT8 for number in capabilities),
        f"weights of float8 are for GPUs that compute with it, {LEAST_FLOAT8} and up",
        "remove those below, or set engine.weights_dtype to target.dtype",
    ),
    Rule(
        ("engine.compute_capabilities",),
        lambda capabilities: list(capabilities) == sorted(set(capabilities)),
        "rise",
        "list each once, in order",
    ),
    *TENSORRT_LLM_RULES,
    *(_only_of(field, method) for method, fields in DEFAULTS_BY_METHOD.items() for field in fields),
    Rule(
        ("train.checkpoint",),
        lambda checkpoint: not str(checkpoint).startswith("package:"),
        "is a folder, which training writes",
        "write a folder such as drafts/my-draft",
    ),
    Rule(
        ("draft.method", "draft.checkpoint", "train.checkpoint", "train.method"),
        lambda method, checkpoint, trained, by: checkpoint != trained or method in SERVED_AS.get(by, (method,)),
        "serves what train.method {3} writes into its checkpoint",
        "let the two methods agree, or give train another checkpoint",
    ),
)


def broken_rules(values: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules that ``values`` (dotted names) break; a rule with an absent field is not asked."""
    for rule in RULES:
        for fields in _fields_asked(rule, values):
            found = {**values, **_methods(fields, values)}
            if not all(field in found for field in fields):
                continue
            arguments = [found[field] for field in fields]
            if not rule.holds(*arguments):
                got = _show(fields[0], arguments[0])
                yield BrokenRule(fields[0], rule.rule.format(*arguments), got, rule.cure.format(*arguments))


def _fields_asked(rule: Rule, values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields of ``rule``; those of a list of drafts once for each of them."""
    if not rule.fields[0].startswith("draft."):
        return [rule.fields]
    return [tuple(field.replace("draft", draft, 1) for field in rule.fields) for draft in _draft_names(values)]


def _draft_names(values: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in values if name.startswith("draft.")))


def _methods(fields: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Return what ``draft.methods`` and, for the draft to blame, ``draft.earlier_methods`` are."""
    names = _draft_names(values)
    methods = tuple(values.get(f"{name}.method") for name in names)
    draft = fields[0].rpartition(".")[0]
    earlier = {f"{draft}.earlier_methods": methods[: names.index(draft)]} if draft in names else {}
    return {"draft.methods": methods, **earlier}


def _show(field: str, value: object) -> str:
    if "." not in field:
        return "a block"
    if field.endswith(("compute_capabilities", "captured_layers")) and isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, (list, tuple)):
        return ", ".join(str(list(path)) for path in orphans(value)) or f"{len(value)} paths"
    return "nothing" if value is None else str(value)
