"""Every row of the import matrix as a tiny random checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draftline.checkpoints.drafts import SourceMethod
from tests.tiny_layout_writers import (
    FFN,
    HIDDEN,
    as_pt_writer,
    eagle1_speculators_writer,
    eagle1_writer,
    eagle3_writer,
    medusa_inside_writer,
    medusa_vllm_writer,
    medusa_writer,
    modelopt_writer,
    padded_writer,
    speculators_writer,
    write_qwen3_layers,
)


class Row(NamedTuple):
    """``captured``: layers whose outputs an EAGLE-3 head reads. ``optional``: tensors that may be absent, as they are
    then borrowed or follow from others."""

    method: SourceMethod
    layout: str
    write: Callable[[Path, Path], Path]
    captured: tuple[int, ...] = ()
    optional: tuple[str, ...] = ()
    weights_file: str = "model.safetensors"


MEDUSA_2 = medusa_inside_writer(
    "medusa_head.{head}.{layer}.linear",
    "medusa_head.{head}.{num_layers}",
    {"medusa_num_heads": 3, "medusa_num_layers": 1},
)
MEDUSA_MODELOPT = medusa_inside_writer(
    "medusa_heads.{head}.{layer}.linear",
    "medusa_heads.{head}.{num_layers}",
    {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 2}},
    num_layers=2,
)
MEDUSA_MEGATRON = medusa_inside_writer(
    "medusa_heads.{head}.medusa_layers.{layer}.linear", "medusa_heads.{head}.lm_head", {}
)
REFERENCE = "EAGLE-3 of the reference and of SpecForge"
MODELOPT, MEGATRON, SPECULATORS = "EAGLE-3 of ModelOpt", "EAGLE-3 of ModelOpt, from Megatron", "EAGLE-3 of speculators"
EMBEDDING, LM_HEAD, T2D = "embed_tokens.weight", "lm_head.weight", "t2d"
EACH_NORM = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(2)}
THREE_NORMS = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}

ROWS: dict[str, Row] = {
    "medusa-v1": Row("medusa", "Medusa v1", medusa_writer(), weights_file="medusa_lm_head.safetensors"),
    "medusa-v1-pt": Row("medusa", "Medusa v1", as_pt_writer(medusa_writer()), weights_file="medusa_lm_head.pt"),
    "medusa-v1-borrowed": Row(
        "medusa", "Medusa v1", medusa_writer(own_lm_head=False, num_layers=2), weights_file="medusa_lm_head.safetensors"
    ),
    "medusa-2": Row("medusa", "Medusa-2", MEDUSA_2),
    "medusa-modelopt": Row("medusa", "Medusa of ModelOpt", MEDUSA_MODELOPT),
    "medusa-megatron": Row("medusa", "Medusa of Megatron and ModelOpt", MEDUSA_MEGATRON),
    "medusa-vllm": Row("medusa", "Medusa of vLLM", medusa_vllm_writer()),
    "medusa-vllm-plain": Row(
        "medusa", "Medusa of vLLM", medusa_vllm_writer(is_plain=True), optional=("lm_heads.0.weight",)
    ),
    "eagle1": Row("eagle1", "EAGLE-1/2", eagle1_writer(), optional=(EMBEDDING,)),
    "eagle2-no-bias": Row("eagle2", "EAGLE-1/2", eagle1_writer(bias=False, own_embedding=False)),
    "eagle1-own-lm-head": Row("eagle1", "EAGLE-1/2", eagle1_writer(own_lm_head=True), optional=(EMBEDDING, LM_HEAD)),
    "eagle1-padded": Row(
        "eagle1", "EAGLE-1/2", padded_writer(eagle1_writer(own_lm_head=True)), optional=(EMBEDDING, LM_HEAD)
    ),
    "eagle1-speculators": Row("eagle1", "EAGLE-1 of speculators", eagle1_speculators_writer(), optional=(LM_HEAD,)),
    "eagle2-speculators-bias": Row(
        "eagle2", "EAGLE-1 of speculators", eagle1_speculators_writer(bias=True), optional=(LM_HEAD,)
    ),
    "reference": Row(
        "eagle3", REFERENCE, eagle3_writer(captured_layers=None, keys={"eagle_config": None}), (1, 3, 4), (T2D,)
    ),
    "reference-whole-vocabulary": Row(
        "eagle3",
        REFERENCE,
        eagle3_writer(draft_vocab_size=None, own_lm_head=False, own_embedding=True, captured_layers=(0, 2)),
        (0, 2),
        (EMBEDDING,),
    ),
    "specforge": Row("eagle3", REFERENCE, eagle3_writer(captured_layers=(0, 1, 3)), (0, 1, 3), (T2D,)),
    "specforge-padded": Row(
        "eagle3",
        REFERENCE,
        padded_writer(eagle3_writer(captured_layers=(0, 1, 3), own_embedding=True)),
        (0, 1, 3),
        (EMBEDDING, T2D),
    ),
    "specforge-fc-norm": Row(
        "eagle3",
        REFERENCE,
        eagle3_writer(captured_layers=(0, 1, 3), extra=THREE_NORMS, keys={"fc_norm": True, "norm_output": True}),
        (0, 1, 3),
        (T2D,),
    ),
    "modelopt": Row("eagle3", MODELOPT, modelopt_writer(), (0, 2)),
    "modelopt-two-layers": Row("eagle3", MODELOPT, modelopt_writer(num_layers=2), (0, 2)),
    "modelopt-biases": Row(
        "eagle3",
        MODELOPT,
        modelopt_writer(
            qkv_bias=True,
            extra={
                "layers.0.self_attn.o_proj.bias": (HIDDEN,),
                **{
                    f"layers.0.mlp.{name}_proj.bias": (size,)
                    for name, size in (("gate", FFN), ("up", FFN), ("down", HIDDEN))
                },
            },
            keys={"attention_bias": True, "mlp_bias": True},
        ),
        (0, 2),
    ),
    "megatron-two-layers": Row(
        "eagle3",
        MEGATRON,
        eagle3_writer("midlayer.0", "midlayer.{layer}", num_layers=2, later_norm="hidden_norm", captured_layers=(0, 2)),
        (0, 2),
        (T2D,),
    ),
    "speculators": Row("eagle3", SPECULATORS, speculators_writer(None, 3), (1, 3, 4), (T2D,)),
    "speculators-residual": Row(
        "eagle3", SPECULATORS, speculators_writer(keys={"norm_before_residual": True}), (0, 2), (T2D,)
    ),
    "speculators-norm-before-fc": Row(
        "eagle3",
        SPECULATORS,
        speculators_writer(extra={"input_norm.weight": (2 * HIDDEN,)}, keys={"norm_before_fc": True}),
        (0, 2),
        (T2D,),
    ),
    "speculators-fc-norm": Row(
        "eagle3", SPECULATORS, speculators_writer(extra=EACH_NORM, keys={"fc_norm": True}), (0, 2), (T2D,)
    ),
    "eagle3.1": Row(
        "eagle3",
        SPECULATORS,
        speculators_writer(extra=EACH_NORM, keys={"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
        (0, 2),
        (T2D,),
    ),
    "speculators-qwen3": Row("eagle3", SPECULATORS, write_qwen3_layers, (0, 2), (T2D,)),
    "speculators-four-features": Row("eagle3", SPECULATORS, speculators_writer([1, 2, 3, 5], 4), (0, 1, 2, 4), (T2D,)),
}
NUM_LAYERS = 8  # of the target: deep enough that the reference's layers, outputs of 1, 3 and 4, are three
