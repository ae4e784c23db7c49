"""Rules of pipelines for TensorRT-LLM's own routes: what they cannot do is refused with the reason and another way.

Source: TensorRT-LLM's documentation of Medusa, EAGLE and the PyTorch backend's speculative decoding, and the parameters
of Triton's ``tensorrtllm`` backend.
"""

from __future__ import annotations

from draftline.config.rule import Rule

BACKEND = "tensorrt_llm"

_LLMAPI = "set engine.route to llmapi (TensorRT-LLM 1.3 or later), or engine.backend to onnxruntime"
_TRTLLM_BUILD = "set engine.route to trtllm_build (TensorRT-LLM up to 1.2.1), or engine.backend to onnxruntime"

# Of each route the methods that it has not: why, and what else to do.
REFUSED_METHODS: dict[str, dict[str, tuple[str, str]]] = {
    "trtllm_build": {
        "eagle3": (
            "the EAGLE network of TensorRT-LLM's engine builder reads the last layer's features alone, and EAGLE-3 "
            "reads those of several",
            _LLMAPI,
        ),
        "eagle2": (
            "Triton's tensorrtllm backend has static trees alone",
            "set draft.method to eagle1, which reads the same head, and tree.kind to static",
        ),
        "draft_model": ("draft models run beside the engine there, for one request at a time", _LLMAPI),
        "ngram": ("TensorRT-LLM's engine builder has no n-gram drafter", _LLMAPI),
    },
    "llmapi": {
        "medusa": ("TensorRT-LLM's PyTorch backend has no Medusa heads", _TRTLLM_BUILD),
        "eagle1": ("TensorRT-LLM's PyTorch backend reads EAGLE-3 heads alone", _TRTLLM_BUILD),
        "eagle2": (
            "TensorRT-LLM's PyTorch backend reads EAGLE-3 heads alone",
            "set engine.backend to onnxruntime",
        ),
    },
}
TREE_KINDS = {"trtllm_build": ("static", "chain"), "llmapi": ("chain", "dynamic")}


def _refused(route: str, method: str, why: str, cure: str) -> Rule:
    return Rule(
        ("draft.method", "engine.backend", "engine.route"),
        lambda given, backend, chosen: backend != BACKEND or (given, chosen) != (method, route),
        why,
        cure,
    )


def _default_beside(field: str, default: object, why: str) -> Rule:
    return Rule(
        (field, "engine.backend"), lambda value, backend: backend != BACKEND or value == default, why, "remove it"
    )


def _size_beside(field: str) -> Rule:
    return Rule(
        (f"engine.{field}", "engine.backend"),
        lambda size, backend: size == 1 or backend == BACKEND,
        "stands beside engine.backend tensorrt_llm; {1} runs on one device",
        "remove it",
    )


TENSORRT_LLM_RULES = (
    Rule(
        ("engine.route", "engine.backend"),
        lambda route, backend: (route is not None) == (backend == BACKEND),
        "is given beside engine.backend tensorrt_llm, and only there",
        "choose trtllm_build or llmapi there, and remove it beside another backend",
    ),
    _size_beside("tensor_parallel_size"),
    _size_beside("pipeline_parallel_size"),
    *(
        _refused(route, method, *reason)
        for route, methods in REFUSED_METHODS.items()
        for method, reason in methods.items()
    ),
    Rule(
        ("draft", "engine.backend"),
        lambda draft, backend: backend != BACKEND or isinstance(draft, dict) or len(draft or ()) <= 1,
        "is one draft beside engine.backend tensorrt_llm",
        "choose one of them",
    ),
    Rule(
        ("engine.pipeline_parallel_size", "engine.backend", "draft"),
        lambda size, backend, draft: backend != BACKEND or size == 1 or not draft,
        "TensorRT-LLM speculates in one pipeline stage",
        "set it to 1 and raise engine.tensor_parallel_size",
    ),
    Rule(
        ("tree.kind", "engine.route"),
        lambda kind, route: route is None or kind in TREE_KINDS[route],
        "engine.route trtllm_build has static trees and chains, llmapi has chains and dynamic trees",
        "set it to one that {1} has: TensorRT-LLM does not choose in each step",
    ),
    Rule(
        ("tree.kind", "engine.route", "draft.methods"),
        lambda kind, route, methods: route != "llmapi" or kind != "dynamic" or methods == ("eagle3",),
        "TensorRT-LLM grows dynamic trees of EAGLE-3 heads alone",
        "set it to chain",
    ),
    Rule(
        ("tree.max_nodes", "tree.kind", "engine.route", "tree.top_k", "tree.max_depth"),
        lambda nodes, kind, route, top_k, depth: route != "llmapi" or kind != "dynamic" or nodes - 1 <= top_k * depth,
        "TensorRT-LLM's dynamic trees have tree.top_k {3} * tree.max_depth {4} draft tokens at most, and the root",
        "lower it, or raise tree.top_k",
    ),
    Rule(
        ("acceptance.rule", "engine.backend"),
        lambda rule, backend: backend != BACKEND or rule == "exact",
        "TensorRT-LLM's servers take no thresholds of typical acceptance",
        "set it to exact",
    ),
    Rule(
        ("target.dtype", "engine.backend"),
        lambda dtype, backend: backend != BACKEND or dtype != "float32",
        "TensorRT-LLM's paged attention computes in float16 or bfloat16",
        "set it to one of these",
    ),
    Rule(
        ("engine.weights_dtype", "engine.backend", "target.dtype"),
        lambda weights, backend, dtype: backend != BACKEND or weights == dtype,
        "engine.backend tensorrt_llm keeps weights in target.dtype {2}",
        "set it to {2}",
    ),
    Rule(
        ("kv_cache.dtype", "engine.backend", "target.dtype"),
        lambda pool, backend, dtype: backend != BACKEND or pool == dtype,
        "engine.backend tensorrt_llm keeps keys and values in target.dtype {2}",
        "set it to {2}",
    ),
    _default_beside("engine.kernels", "auto", "engine.backend tensorrt_llm runs its own kernels"),
    _default_beside("engine.num_threads", 0, "engine.backend tensorrt_llm runs on GPUs"),
    *(
        Rule(
            (f"check.{field}", "engine.backend"),
            lambda wanted, backend: backend != BACKEND or wanted != "always",
            "the network of engine.backend tensorrt_llm is TensorRT-LLM's, which is not measured here",
            "set it to auto or never",
        )
        for field in ("perplexity", "network")
    ),
)
