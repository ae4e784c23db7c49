"""The block ``train``: how ``draftline train`` makes a draft for the pipeline's target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from draftline.config.block import Block

TrainedMethod = Literal["eagle3", "eagle1", "medusa"]
PromptSource = Literal["own", "topics", "problems", "code", "python-docs", "text", "lm-eval"]

DEFAULTS_BY_METHOD: dict[str, dict[str, object]] = {
    "eagle3": {"ttt_steps": 5, "ttt_growth": 0.0, "ttt_share": 1.0, "ttt_decay": 0.8, "draft_vocab_size": 12288},
    "medusa": {"num_heads": 4, "own_lm_heads": False},
}
SERVED_AS: dict[str, tuple[str, ...]] = {"eagle3": ("eagle3",), "eagle1": ("eagle1", "eagle2"), "medusa": ("medusa",)}
"""The methods of ``draft`` that serve what a method of ``train`` makes."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Train(Block):
    """How `draftline train` makes a draft for the target: the target answers prompts, the draft learns from its answers
    and features. `draftline run` does not read this block."""

    method: TrainedMethod = Field(description="What is trained. `eagle1` serves `draft.method` eagle2 too.")
    checkpoint: str = Field(
        min_length=1,
        description="The folder where the trained draft lands, in the published layout of its method; relative to the "
        "pipeline file. A pipeline that serves what it trains names it in `draft.checkpoint` as well.",
        examples=["drafts/my-model-eagle3"],
    )
    data: str | None = Field(
        None,
        min_length=1,
        description="The folder of answers and features, relative to the working directory; it may be shared by "
        "pipelines of one target that agree on what it says below. `builds/<name>/training-data` unless given.",
        examples=["builds/my-training-data"],
    )
    prompts: Annotated[tuple[PromptSource, ...], Field(min_length=1), BeforeValidator(_as_tuple)] = Field(
        ("own", "topics", "problems", "code", "python-docs", "text"),
        description="Where prompts come from. `own`: the target writes the user's turn itself. `lm-eval` needs that "
        "package, without its dependencies: `pip install --no-deps lm-eval`.",
    )
    answer_tokens: int = Field(
        2_000_000,
        ge=1,
        le=10**12,
        description="Tokens of answers to train on, the first of `data`; what is missing is gathered, and the prompts "
        "repeat with other seeds.",
    )
    max_answer_tokens: int = Field(512, ge=1, le=1048576, description="Tokens of one answer at most.")
    temperature: float = Field(0.8, ge=0, le=10, description="The temperature of the answers; 0 = greedy.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Of prompts, answers, first weights and the order of batches.")
    epochs: int = Field(10, ge=1, le=100000, description="How often the data are passed over, unless minutes end it.")
    budget_minutes: float | None = Field(
        None,
        gt=0,
        le=10**6,
        description="Minutes of training at most, checkpoints and validation included. The learning rate falls by the "
        "share of epochs or minutes that is used up, whichever is larger, so that it ends low either way.",
        examples=[60],
    )
    batch_tokens: int = Field(2048, ge=1, le=10**9, description="Tokens of a batch, padding included, all processes.")
    learning_rate: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="The highest learning rate of AdamW, which trains projections to the vocabulary, norms and biases.",
    )
    matrix_learning_rate: float = Field(
        1e-2, gt=0, le=1, description="The highest learning rate of Muon, which trains all other matrices."
    )
    warmup_share: float = Field(0.03, ge=0, le=1, description="The share of the training in which it rises from 0.")
    ttt_steps: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Of `eagle3`, 5 unless given: depths of the training-time test, in which the head reads its own "
        "outputs as it will when drafting. 1 = none.",
        examples=[5],
    )
    ttt_growth: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Of `eagle3`, 0 unless given: the share of the training in which the steps grow from 1 to "
        "`ttt_steps`. A step less is a faster batch: more tokens in the same minutes.",
        examples=[0.5],
    )
    ttt_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Of `eagle3`, 1 unless given: the share of positions, drawn anew for each batch, that go on beyond "
        "the first step; their losses count for those left out. Less is faster, and noisier.",
        examples=[0.25],
    )
    ttt_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Of `eagle3`, 0.8 unless given: the loss of a depth weighs so much of that of the depth before.",
        examples=[0.8],
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=1,
        le=10**7,
        description="Of `eagle3`, 12288 unless given: how many of the answers' most frequent tokens can be drafted. "
        "A size of the target's vocabulary or more drafts all.",
        examples=[12288],
    )
    num_heads: int | None = Field(
        None, ge=1, le=64, description="Of `medusa`, 4 unless given: tokens drafted in a step.", examples=[4]
    )
    own_lm_heads: bool | None = Field(
        None,
        description="Of `medusa`, false unless given: whether each head has a projection to the vocabulary of its own, "
        "as published, or ends in the target's.",
        examples=[False],
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What matrices are multiplied in; weights and optimiser stay in float32. `auto`: bfloat16 where "
        "the device multiplies it natively (CPUs with AVX512-BF16 or AMX, GPUs), else float32.",
    )
    validation_share: float = Field(
        0.01, gt=0, le=0.5, description="The share of the prompts that is held back, to watch loss and acceptance on."
    )
    validation_tokens: int = Field(200_000, ge=1, le=10**12, description="Tokens trained between two validations.")
    checkpoint_minutes: float = Field(
        5, gt=0, le=10**6, description="Minutes between two checkpoints; a killed run goes on from the last one."
    )

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Return the settings that only the given method has."""
        method = given.get("method")
        return dict(DEFAULTS_BY_METHOD.get(method, {})) if isinstance(method, str) else {}
