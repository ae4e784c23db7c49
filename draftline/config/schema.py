"""The blocks of a pipeline file. Every field carries its description: ``draftline show --fields`` prints them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftline.config.rules import broken_rules
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


class Block(BaseModel):
    """A block of a pipeline file: strict types, unknown keys are errors, values never change."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


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
        description="The dtype of the converted checkpoint. onnxruntime computes in float32 with any of them.",
    )


class Draft(Block):
    """What proposes tokens. Leave the block out for plain decoding."""

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


class Tree(Block):
    """The shape of what is drafted in a step. Only beside a `draft` block."""

    kind: Literal["chain", "static", "dynamic", "auto"] = Field(
        "auto",
        description="One path, a fixed tree, a tree grown by confidence, or the scheduler's choice in each step.",
    )
    max_nodes: int = Field(16, ge=2, le=1024, description="Nodes of a tree, the root included.")
    max_depth: int = Field(5, ge=1, le=64, description="Draft tokens on the longest path.")
    top_k: int = Field(4, ge=1, le=64, description="Children of a node.")


class Engine(Block):
    """What is built, and its limits."""

    backend: Literal["onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_llm"] = Field(
        "onnxruntime", description="What runs the graph. `onnxruntime` needs no GPU."
    )
    weights_dtype: Literal["float32", "int8", "int4"] = Field(
        "float32", description="The matrices' dtype in the engine; int8 and int4 are quantised by the build stage."
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
    dtype: Dtype = Field("float32", description="The dtype of the pool.")
    prefix_cache: bool = Field(True, description="Whether requests share the blocks of equal prefixes.")


class Serve(Block):
    """Where the Triton server listens."""

    host: str = Field("127.0.0.1", min_length=1, description="The address to listen on; `0.0.0.0` = every interface.")
    http_port: Port = Field(8000, description="HTTP: `/v2/models/ensemble/generate` and `generate_stream`.")
    grpc_port: Port = Field(8001, description="gRPC: `draftline generate` and Triton's clients.")
    metrics_port: Port = Field(8002, description="Prometheus metrics.")


class Pipeline(Block):
    """One deployment."""

    name: Name
    target: Target
    draft: Draft | None = None
    tree: Tree | None = None
    engine: Engine = Field(default_factory=Engine)
    kv_cache: KvCache = Field(default_factory=KvCache)
    serve: Serve = Field(default_factory=Serve)

    @model_validator(mode="before")
    @classmethod
    def _give_a_draft_its_tree(cls, data: object) -> object:
        """Resolve the absent tree block of a pipeline that drafts, so that ``show`` prints what a run will use."""
        if isinstance(data, dict) and data.get("draft") is not None and data.get("tree") is None:
            return {**data, "tree": Tree()}
        return data

    @model_validator(mode="after")
    def _check_rules_across_fields(self) -> Pipeline:
        problems = [PipelineError(rule.field, rule.rule, rule.got, rule.cure) for rule in broken_rules(self.values())]
        if problems:
            raise PipelineErrors(problems)
        return self

    def values(self) -> dict[str, object]:
        """Return every value under its dotted name, ``{"name": ..., "target.dtype": ..., ...}``."""
        values: dict[str, object] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            values[name] = value
            if isinstance(value, Block):
                values |= {f"{name}.{key}": getattr(value, key) for key in type(value).model_fields}
        return values


BLOCKS: dict[str, type[Block]] = {
    "target": Target,
    "draft": Draft,
    "tree": Tree,
    "engine": Engine,
    "kv_cache": KvCache,
    "serve": Serve,
}
OPTIONAL_BLOCKS = frozenset({"draft", "tree"})
