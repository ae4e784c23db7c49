"""What TensorRT-LLM's PyTorch backend reads: published checkpoints as they are, checked here before it loads them.

It reads more targets than draftline's own graphs express, and fewer layouts of heads. Its names live here alone.

Source: TensorRT-LLM's table of supported models (1.3.0rc24, 1.4.0rc1), ``_torch/model_config.py`` (quantisation) and
``_torch/models/modeling_speculative.py`` (EAGLE-3 heads).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.eagle import read_eagle3
from draftline.checkpoints.drafts.eagle_layouts import MEGATRON, SPECULATORS
from draftline.checkpoints.drafts.vocabulary import check_same_vocabulary
from draftline.checkpoints.dtypes import check_convertible_dtype
from draftline.checkpoints.huggingface import WEIGHTS_FILES, copy_tokenizer_files
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.known_positions import known_positions
from draftline.checkpoints.quantized.stated import find_quantization
from draftline.checkpoints.tokenizer import check_tokenizer
from draftline.checkpoints.trtllm import CONFIG_FILE, write_json
from draftline.errors import CheckpointError

# quant_method of quantization_config, in config.json. A checkpoint of ModelOpt also has hf_quant_config.json.
QUANT_METHODS = ("fp8", "mxfp4", "mxfp8", "nvfp4", "modelopt", "compressed-tensors")
FP8_BLOCK = [128, 128]
_OTHER_CHECKPOINT = "choose the checkpoint it was quantised from, or one of ModelOpt"


@dataclass(frozen=True)
class Published:
    """What is needed of a target that TensorRT-LLM reads itself.

    ``num_positions``: that it knows, its rotary scaling included. ``latent_rank``: of the keys and values of latent
    attention, None of others. ``captured_layers``: whose outputs an EAGLE-3 head reads (0-based).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_positions: int
    sliding_window: int | None = None
    latent_rank: int | None = None
    captured_layers: tuple[int, ...] = ()


def check_published(
    target: Path,
    draft: Path | None,
    method: str | None,
    dtype: str,
    destination: Path,
    captured_layers: Sequence[int] | None = None,
) -> Published:
    """Check a target and a draft (``eagle3``, ``draft_model`` or ``ngram``, which has none) by what is written in them.

    ``captured_layers``: of an EAGLE-3 head, in the place of those that it names. What the stages after it need is
    written into the folder ``destination``: sizes and the tokenizer.

    Raises:
        CheckpointError: one is no Hugging Face folder, lacks files, is quantised or laid out as TensorRT-LLM does not
            read it, or the two do not fit together.
    """
    check_convertible_dtype(dtype, "target.dtype")
    found = read_published(target)
    if draft is not None and method == "draft_model":
        check_same_vocabulary(target, draft, found, read_published(draft))
    elif draft is not None:
        if not draft.is_dir():
            raise CheckpointError(draft, "the draft checkpoint is a folder", "no such folder", "correct the path")
        head = read_eagle3(draft, found, dtype, captured_layers).config
        check_readable(head, draft)
        found = replace(found, captured_layers=head.captured_layers)
    copy_tokenizer_files(target, found.vocab_size, destination)
    write_json(destination / CONFIG_FILE, asdict(found))
    return found


def load_published(directory: Path) -> Published:
    """Read what ``check_published`` wrote. Raises: CheckpointError where a file is missing or wrong."""
    raw = load_json(directory / CONFIG_FILE)
    return Published(
        raw.text("architecture"),
        raw.integer("vocab_size"),
        raw.integer("hidden_size"),
        raw.integer("num_hidden_layers"),
        raw.integer("num_positions"),
        raw.optional_integer("sliding_window"),
        raw.optional_integer("latent_rank"),
        raw.integers("captured_layers"),
    )


def read_published(folder: Path) -> Published:
    """Read the sizes of a model and look after its files; its network and its tensors are TensorRT-LLM's to judge."""
    if not (folder / CONFIG_FILE).is_file():
        rule = "TensorRT-LLM's PyTorch backend reads Hugging Face folders"
        cure = "give the folder that it was converted from, or set engine.route to trtllm_build"
        raise CheckpointError(folder, rule, "another checkpoint", cure)
    raw = load_json(folder / CONFIG_FILE)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise raw.error("architectures", "a list of one name", names, "fetch the checkpoint again")
    _check_quantization(folder, raw)
    inner = raw.get("text_config")  # of a model that reads images too
    text = JsonObject(raw.where, {**raw.values, **inner}) if isinstance(inner, dict) else raw
    vocab_size = text.integer("vocab_size")
    check_tokenizer(folder, vocab_size)
    _check_weights_files(folder)
    return Published(
        names[0],
        vocab_size,
        text.integer("hidden_size"),
        text.integer("num_hidden_layers"),
        _num_positions(text),
        None if text.get("use_sliding_window") is False else text.optional_integer("sliding_window"),
        text.optional_integer("kv_lora_rank"),
    )


def _check_quantization(folder: Path, raw: JsonObject) -> None:
    """Raise CheckpointError for a quantised checkpoint that TensorRT-LLM would read as a plain one."""
    settings = find_quantization(folder, raw)
    if settings is None:
        return
    method = settings.get("quant_method")
    if method not in QUANT_METHODS:
        rule = f"TensorRT-LLM's PyTorch backend reads quant_method {', '.join(QUANT_METHODS)}"
        raise CheckpointError(settings.where, rule, json.dumps(method), _OTHER_CHECKPOINT)
    if method == "fp8" and settings.get("weight_block_size") != FP8_BLOCK:
        rule = f"TensorRT-LLM's PyTorch backend reads quant_method fp8 with weight_block_size {FP8_BLOCK}"
        raise CheckpointError(settings.where, rule, json.dumps(settings.get("weight_block_size")), _OTHER_CHECKPOINT)


def _check_weights_files(folder: Path) -> None:
    """Raise CheckpointError where a file of weights is absent; no tensor is read, of whatever dtype."""
    present = [name for name in WEIGHTS_FILES if (folder / name).exists()]
    if not present:
        rule = f"the folder holds one of {', '.join(WEIGHTS_FILES)}"
        raise CheckpointError(folder, rule, "none of them", "fetch the whole checkpoint")
    if not present[0].endswith(".index.json"):
        return
    index = load_json(folder / present[0])
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise index.error("weight_map", "an object of file names", shards)
    if missing := sorted(name for name in set(shards.values()) if not (folder / name).is_file()):
        rule = "the folder holds every file that it names"
        raise CheckpointError(index.where, rule, f"no {', '.join(missing)}", "fetch the whole checkpoint")


def _num_positions(text: JsonObject) -> int:
    """Return the positions that a model knows. Scaling of each kind of layers by itself is in them already."""
    known = text.integer("max_position_embeddings")
    scaling = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(scaling, dict) or not isinstance(scaling.get("factor"), (int, float)):
        return known
    return known_positions(known, {"rope_type": scaling.get("type"), **scaling})


def check_readable(head: HeadConfig, where: Path) -> None:
    """Check that TensorRT-LLM reads an EAGLE-3 head as it is meant, and that it can be told which layers it reads.

    Raises: CheckpointError, with the layout or the variant by name.
    """
    is_megatron = head.layout == MEGATRON.name
    variants = {
        "the layout of speculators, whose sizes stand in transformer_layer_config": head.layout == SPECULATORS.name,
        "norms of queries and keys": head.qk_norm,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc outside of eagle_config": head.feature_norm == "joined",
        "a norm named input_layernorm in layers behind the first": head.num_layers > 1 and not is_megatron,
        "one layer named midlayer.0": head.num_layers == 1 and is_megatron,
        "the features of one layer alone": len(head.captured_layers) == 1,
    }
    for variant, is_there in variants.items():
        if is_there:
            rule = "TensorRT-LLM's PyTorch backend reads the EAGLE-3 heads of the reference, SpecForge and ModelOpt"
            raise CheckpointError(where, rule, variant, "set engine.backend to onnxruntime, or choose another head")
    if head.captured_layer_readings:
        rule = "a head says clearly which layers it reads, as nothing measures that on engine.route llmapi"
        got = " or ".join(str(list(layers)) for layers in head.captured_layer_readings)
        cure = "set draft.captured_layers to those it was trained with; the check stage of onnxruntime measures which"
        raise CheckpointError(where, rule, f"outputs of {got}", cure)
