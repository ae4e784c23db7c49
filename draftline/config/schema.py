"""The blocks of a pipeline file. Every field carries its description: ``draftline show --fields`` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from draftline.config.block import Block
from draftline.config.choices import LARGEST, ChoicesName, choices_size
from draftline.config.rules import FREE_GPU_MEMORY_FRACTION, broken_rules
from draftline.config.training import Train
from draftline.errors import PipelineError, PipelineErrors

Dtype = Literal["float32", "float16", "bfloat16"]
Name = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        max_length=100,
        description="The build directory is `builds/<name>`.",
        examples=["my-model"],
    ),
]
Port = Annotated[int, Field(ge=1, le=65535)]


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


ComputeCapability = Literal[80, 86, 89, 90, 100, 120]  # those that kernels are compiled for
ChoicesPath = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=LARGEST.top_k)], ...], Field(min_length=1, max_length=LARGEST.max_depth)
]
ChoicesPaths = Annotated[tuple[ChoicesPath, ...], Field(min_length=1, max_length=LARGEST.max_nodes - 1)]


class Target(Block):
    """The model that is served; with a draft, the one that verifies."""

    checkpoint: str = Field(
        min_length=1,
        description="A Hugging Face folder or GGUF file (relative to the pipeline file), or `package:NAME`, an "
        "installed Python package that ships the weights.",
        examples=["checkpoints/my-model"],
    )
    dtype: Dtype = Field(
        "float32",
        description="The dtype of the converted checkpoint, and of the drafts'. onnxruntime computes in float32 with "
        "any of them, tensorrt and tensorrt_rtx compute in it.",
    )


class Draft(Block):
    """What proposes tokens. Leave the block out for plain decoding. A list of such blocks, each of another method,
    drafts with all of them: their candidates make one tree. On the command line `draft.0.method` is of the first."""

    method: Literal["eagle1", "eagle2", "eagle3", "medusa", "draft_model", "ngram"] = Field(
        description="How tokens are drafted.", examples=["eagle3"]
    )
    checkpoint: str | None = Field(
        None,
        min_length=1,
        description="Where the draft's weights are, as in `target.checkpoint`. Required by every method but `ngram`, "
        "which has no weights.",
        examples=["drafts/my-model-eagle3"],
    )
    weights_dtype: Literal["float32", "int8", "int4"] | None = Field(
        None,
        description="What the draft's own matrices are stored and multiplied in; `engine.weights_dtype` unless given. "
        "Rounding them changes no answer, only how often the draft is right.",
        examples=["int8"],
    )
    captured_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_as_tuples)] = Field(
        None,
        min_length=1,
        description="The target's layers whose outputs an `eagle3` head reads, counted from 0, in the place of those "
        "that its `config.json` names. Where that can be read in several ways, `check` measures which is meant unless "
        "this says it.",
        examples=[[1, 14, 26]],
    )


class Tree(Block):
    """The shape of what is drafted in a step. Only beside a `draft` block."""

    kind: Literal["chain", "static", "dynamic", "auto"] = Field(
        "auto",
        description="One path, a fixed tree, a tree grown by confidence, or the scheduler's choice in each step.",
    )
    choices: Annotated[ChoicesName | ChoicesPaths | None, BeforeValidator(_as_tuples)] = Field(
        None,
        description="The paths of a `static` tree. `[0, 2]` is the third best candidate after the best one of the "
        "root. Every path's parent is in the list. The limits below are then those of the choices, and need not be "
        "written.",
        examples=["mc_sim_7b_63"],
    )
    max_nodes: int = Field(16, ge=2, le=LARGEST.max_nodes, description="Nodes of a tree at most, the root included.")
    max_depth: int = Field(5, ge=1, le=LARGEST.max_depth, description="Draft tokens on the longest path at most.")
    top_k: int = Field(4, ge=1, le=LARGEST.top_k, description="Candidates of a node that may become its children.")

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Return the limits of a static tree's choices."""
        size = choices_size(given.get("choices"))
        return {} if size is None else asdict(size)


class Acceptance(Block):
    """Which draft tokens the target keeps. Only beside a `draft` block."""

    rule: Literal["exact", "typical"] = Field(
        "exact",
        description="`exact` is lossless: a draft token is accepted where it is what the target draws there. "
        "`typical` is Medusa's and **lossy**: answers are not those of plain decoding. At temperature 0 both are "
        "the same.",
    )
    epsilon: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Of `typical`, 0.09 unless given: a draft token is accepted where its probability is above "
        "`epsilon`, or above `alpha * exp(-entropy)`.",
        examples=[0.09],
    )
    alpha: float | None = Field(None, gt=0, le=1, description="Of `typical`, 0.3 unless given.", examples=[0.3])

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Return the thresholds of the rule ``typical``."""
        return {"epsilon": 0.09, "alpha": 0.3} if given.get("rule") == "typical" else {}


class Engine(Block):
    """What is built, and its limits."""

    backend: Literal["onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_llm"] = Field(
        "onnxruntime",
        description="What runs the graph. `onnxruntime` needs no GPU. `tensorrt_rtx` runs on RTX GPUs and builds on "
        "any machine; `tensorrt` runs on every NVIDIA GPU and builds on the one it runs on. `tensorrt_llm` is "
        "TensorRT-LLM's own engine and server, by one of two routes.",
    )
    route: Literal["trtllm_build", "llmapi"] | None = Field(
        None,
        description="Of `tensorrt_llm`, and required there. `trtllm_build` is TensorRT-LLM up to 1.2.1: its "
        "checkpoint, the command that builds an engine of it, and a repository for Triton's `tensorrtllm` backend, "
        "with Medusa and EAGLE-1 heads. `llmapi` is TensorRT-LLM from 1.3 on, whose PyTorch backend reads published "
        "checkpoints: EAGLE-3 heads, draft models and n-grams.",
        examples=["trtllm_build"],
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="GPUs that divide every matrix among them, of `tensorrt_llm`."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=1024, description="Groups of such GPUs that divide the layers among them, of `tensorrt_llm`."
    )
    kernels: Literal["auto", "native", "onnxruntime"] = Field(
        "auto",
        description="Whose operators `onnxruntime` runs on a CPU. `native` are draftline's own, compiled when the "
        "package is built; `onnxruntime` are ONNX Runtime's, slower, which need no compiler. `auto` takes `native` "
        "where they are.",
    )
    weights_dtype: Literal["float32", "float16", "bfloat16", "float8", "int8", "int4"] = Field(
        "float32",
        description="The matrices' dtype in the engine. onnxruntime knows `float32`, and `int8` and `int4`, which the "
        "build stage quantises; tensorrt and tensorrt_rtx know that of `target.dtype`, `float8` (E4M3) beside 16 bits, "
        "for compute capabilities of 89 and up, and `int4` beside `float16`.",
    )
    weights: Literal["embedded", "external"] = Field(
        "embedded",
        description="Where the weights of `tensorrt` and `tensorrt_rtx` are: in the engine's plan, or beside it in the "
        "converted checkpoint's files, which are read at start. `external` builds models of any size in seconds and in "
        "little memory; the builder then cannot prepare the weights for the kernels that it chooses.",
    )
    plugin: Literal["runtime", "quick"] = Field(
        "runtime",
        description="The form of TreeAttention in the engine. `runtime`: Python launches kernels that the plan "
        "carries. `quick`, of `tensorrt`: its quick plugin, compiled ahead of time; one kernel is inside the plan and "
        "runs without Python, slower over long contexts, which it does not cut into sections.",
    )
    compute_capabilities: Annotated[tuple[ComputeCapability, ...], BeforeValidator(_as_tuples)] = Field(
        (),
        description="The GPUs that `tensorrt_rtx` builds for, 89 = compute capability 8.9; unless given 80, 86, 89 and "
        "120, with `float8` weights 89 and 120. `tensorrt` builds for the GPU of this machine.",
        examples=[[89, 120]],
    )
    cuda_graphs: bool = Field(
        True,
        description="Whether `tensorrt` and `tensorrt_rtx` replay steps of few rows as CUDA graphs, padded to one of a "
        "few sizes, which spares launching their kernels one by one.",
    )
    max_batch_size: int = Field(16, ge=1, le=4096, description="Requests that run in the same step.")
    max_seq_len: int = Field(4096, ge=2, le=1048576, description="Tokens of a request: prompt and answer together.")
    max_num_tokens: int = Field(128, ge=1, le=65536, description="Tokens of a step, prefill chunks included.")
    num_threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of the engine; 0 = every physical core available."
    )


class KvCache(Block):
    """The paged key/value pool."""

    block_size: Literal[8, 16, 32, 64, 128] = Field(16, description="Tokens of a block.")
    max_blocks: int = Field(2048, ge=1, le=16777216, description="Blocks of the pool, shared by all requests.")
    dtype: Dtype | Literal["float8"] = Field(
        "float32",
        description="The dtype of the pool; 16 bits take half the memory and round every key and value. onnxruntime "
        "knows `float32` and `float16`. `float8` (E4M3), of tensorrt and tensorrt_rtx, takes a quarter; its scales are "
        "measured on a text when the engine is built.",
    )
    free_gpu_memory_fraction: float = Field(
        FREE_GPU_MEMORY_FRACTION,
        gt=0,
        le=1,
        description="On a GPU the share of the memory that is free after loading that the pool may take; `max_blocks` "
        "bounds it as well. The rest is for CUDA graphs, and for whoever else uses the GPU.",
    )
    prefix_cache: bool = Field(True, description="Whether requests share the blocks of equal prefixes.")


class Check(Block):
    """What the check stage measures beside what it always checks."""

    perplexity: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether a fixed text is run through the engine's network and, where that rounds weights or keys, "
        "through a temporary copy in float32. `auto`: for models of a billion parameters at most.",
    )
    acceptance: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether each draft proposes a token behind every one of a fixed text. A rate near chance is an "
        "error, and so is a better one with other captured layers or another rotary base than the draft's "
        "configuration says; where that leaves the layers open, the best ones are chosen. `auto`: beside targets of a "
        "billion parameters at most.",
    )
    network: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether the network that `tensorrt` or `tensorrt_rtx` parses is evaluated in numpy, layer by "
        "layer, and compared with ONNX Runtime; no GPU is needed. `auto`: for models of a billion parameters at most.",
    )


class Serve(Block):
    """Where the Triton server listens."""

    host: str = Field("127.0.0.1", min_length=1, description="The address to listen on; `0.0.0.0` = every interface.")
    http_port: Port = Field(8000, description="HTTP: `/v2/models/ensemble/generate` and `generate_stream`.")
    grpc_port: Port = Field(8001, description="gRPC: `draftline generate` and Triton's clients.")
    metrics_port: Port = Field(8002, description="Prometheus metrics.")


def _as_drafts(value: object) -> object:
    """Make one block, or nothing, a tuple of drafts."""
    if value == []:
        raise ValueError("a list of drafts has one or more")
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


class Pipeline(Block):
    """One deployment. ``draft`` is empty for plain decoding; ``tree`` and ``acceptance`` are None then.
    ``train`` is None where nothing is trained."""

    name: Name
    target: Target
    draft: Annotated[tuple[Draft, ...], BeforeValidator(_as_drafts)] = ()
    tree: Tree | None = None
    acceptance: Acceptance | None = None
    train: Train | None = None
    engine: Engine = Field(default_factory=Engine)
    kv_cache: KvCache = Field(default_factory=KvCache)
    check: Check = Field(default_factory=Check)
    serve: Serve = Field(default_factory=Serve)

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Return the blocks that a pipeline with a draft has, so that ``show`` prints what a run will use."""
        return {name: block() for name, block in BESIDE_A_DRAFT.items()} if given.get("draft") not in (None, ()) else {}

    @model_validator(mode="before")
    @classmethod
    def _take_null_for_an_absent_block(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in OPTIONAL_BLOCKS}

    @model_validator(mode="after")
    def _check_rules_across_fields(self) -> Pipeline:
        problems = [PipelineError(rule.field, rule.rule, rule.got, rule.cure) for rule in broken_rules(self.values())]
        if problems:
            raise PipelineErrors(problems)
        return self

    def values(self) -> dict[str, object]:
        """Return every value under its dotted name, ``{"name": ..., "target.dtype": ..., "draft.0.method": ...}``."""
        values: dict[str, object] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            values[name] = value
            for block_name, block in _named_blocks(name, value):
                values |= {f"{block_name}.{key}": getattr(block, key) for key in type(block).model_fields}
        return values


def _named_blocks(name: str, value: object) -> list[tuple[str, Block]]:
    if isinstance(value, tuple):
        return [(f"{name}.{index}", block) for index, block in enumerate(value)]
    return [(name, value)] if isinstance(value, Block) else []


BLOCKS: dict[str, type[Block]] = {
    "target": Target,
    "draft": Draft,
    "tree": Tree,
    "acceptance": Acceptance,
    "train": Train,
    "engine": Engine,
    "kv_cache": KvCache,
    "check": Check,
    "serve": Serve,
}
BESIDE_A_DRAFT: dict[str, type[Block]] = {"tree": Tree, "acceptance": Acceptance}
OPTIONAL_BLOCKS = frozenset({"draft", "train", *BESIDE_A_DRAFT})
