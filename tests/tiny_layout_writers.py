"""Writers of tiny random drafts, laid out exactly as the tools that publish them do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from tests.tiny_drafts import write_draft, write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

Tensors = dict[str, NDArray[Any]]
IDS = "eagle_aux_hidden_state_layer_ids"
HIDDEN, KV_ROWS, Q_ROWS, HEAD, FFN = 64, 32, 64, 16, 96
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# What ModelOpt's exporter writes beside the ids.
MODELOPT_SWITCHES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


def load_tensors(path: Path) -> Tensors:
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def eagle3_writer(
    layer: str = "midlayer",
    later_layer: str = "layers.{layer}",
    *,
    num_layers: int = 1,
    later_norm: str = "input_layernorm",
    without: tuple[str, ...] = (),
    extra: Mapping[str, tuple[int, ...]] | None = None,
    keys: Mapping[str, Any] | None = None,
    is_nested: bool = False,
    **options: Any,
) -> Callable[[Path, Path], Path]:
    """Give the writer of a head whose first layer is named ``layer``.

    ``extra``: more tensors, by shape; ``keys``: of ``config.json``, None = left out; ``is_nested``: as speculators.
    """

    def write(directory: Path, target_dir: Path) -> Path:
        write_tiny_eagle3(directory, target_dir, **options)
        path = directory / "model.safetensors"
        tensors = {name.replace("midlayer.", f"{layer}."): values for name, values in load_tensors(path).items()}
        generator = np.random.default_rng(8)
        shapes = dict(extra or {})
        for index in range(1, num_layers):
            shapes |= layer_shapes(later_layer.format(layer=index), later_norm)
        for name, shape in shapes.items():
            noise = generator.standard_normal(shape).astype(np.float32)
            tensors[name] = 1 + 0.3 * noise if "norm" in name else noise / np.float32(shape[-1] ** 0.5)
        for name in without:
            del tensors[name]
        config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": num_layers}
        if is_nested:
            config = _nested(config)
        config = {key: value for key, value in (config | dict(keys or {})).items() if value is not None}
        write_draft(directory, tensors, config)
        return directory

    return write


def layer_shapes(prefix: str, norm: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{norm}.weight": (HIDDEN,),
        f"{prefix}.self_attn.q_proj.weight": (Q_ROWS, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (KV_ROWS, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (KV_ROWS, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, Q_ROWS),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
    }


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """As speculators stores it: what equals Llama's default in transformers is left out of the inner configuration."""
    inner = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    inner += ("num_hidden_layers", "hidden_act", "rms_norm_eps", "max_position_embeddings", "model_type")
    layers = {key: config[key] for key in inner if (key, config[key]) != ("max_position_embeddings", 2048)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers,
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }


def speculators_writer(
    ids: list[int] | None = [1, 3],  # noqa: B006
    num_captured: int = 2,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Path, Path], Path]:
    ids_key = {} if ids is None else {IDS: ids}
    return eagle3_writer(
        "layers.0",
        is_nested=True,
        captured_layers=None,
        num_captured_layers=num_captured,
        keys={**ids_key, **(keys or {})},
        **options,
    )


def write_qwen3_layers(directory: Path, target_dir: Path) -> Path:
    norms = {f"layers.0.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    speculators_writer(extra=norms)(directory, target_dir)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["model_type"] = "qwen3"
    path.write_text(json.dumps(config))
    return directory


def modelopt_writer(num_layers: int = 1, **options: Any) -> Callable[[Path, Path], Path]:
    keys = {
        "eagle_config": {IDS: [0, 2], **MODELOPT_SWITCHES},
        "rope_scaling": YARN,
        "rope_theta": 10000,
        "max_position_embeddings": 512,
        "use_cache": None,
    }
    return eagle3_writer(
        "layers.0",
        num_layers=num_layers,
        captured_layers=(0, 2),
        without=("t2d",),
        keys=keys | options.pop("keys", {}),
        **options,
    )


def eagle1_writer(**options: Any) -> Callable[[Path, Path], Path]:
    own_lm_head = options.pop("own_lm_head", False)

    def write(directory: Path, target_dir: Path) -> Path:
        write_tiny_eagle1(directory, target_dir, **options)
        if own_lm_head:
            tensors = load_tensors(directory / "model.safetensors")
            tensors["lm_head.weight"] = np.random.default_rng(3).standard_normal((320, HIDDEN)).astype(np.float32) / 4
            write_draft(directory, tensors, None)
        return directory

    return write


def medusa_writer(**options: Any) -> Callable[[Path, Path], Path]:
    return lambda directory, target_dir: write_tiny_medusa(directory, target_dir, **options)


def medusa_vllm_writer(*, is_plain: bool = False) -> Callable[[Path, Path], Path]:
    """``is_plain``: without biases, and one projection for all heads."""

    def write(directory: Path, target_dir: Path) -> Path:
        write_tiny_medusa(directory, target_dir)
        path = directory / "medusa_lm_head.safetensors"
        heads = load_tensors(path)
        path.unlink()
        tensors = {}
        for name, values in heads.items():
            head, layer, *rest = name.split(".")
            is_block = rest[0] == "linear"
            if not is_plain or (rest[-1] != "bias" and (is_block or head == "0")):
                tensors[f"blocks.{head}.layers.{layer}.{rest[-1]}" if is_block else f"lm_heads.{head}.weight"] = values
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": 3,
            "num_hidden_layers": 1,
            "original_lm_head": is_plain,
            "medusa_fc_bias": not is_plain,
        }
        write_draft(directory, tensors, config)
        return directory

    return write


def padded_writer(write: Callable[[Path, Path], Path], num_rows: int = 24) -> Callable[[Path, Path], Path]:
    """Rows of zeros behind the vocabulary, which ``config.json`` counts."""

    def write_padded(directory: Path, target_dir: Path) -> Path:
        write(directory, target_dir)
        path = directory / "config.json"
        config = json.loads(path.read_text())
        vocab_size = config["vocab_size"]
        tensors = {
            name: np.concatenate([values, np.zeros_like(values[:num_rows])]) if len(values) == vocab_size else values
            for name, values in load_tensors(directory / "model.safetensors").items()
        }
        write_draft(directory, tensors, config | {"vocab_size": vocab_size + num_rows})
        return directory

    return write_padded


def eagle1_speculators_writer(*, bias: bool = False) -> Callable[[Path, Path], Path]:
    def write(directory: Path, target_dir: Path) -> Path:
        eagle1_writer(bias=bias, own_embedding=False, own_lm_head=True)(directory, target_dir)
        renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
        tensors = {}
        for name, values in load_tensors(directory / "model.safetensors").items():
            for old, new in renamed.items():
                name = new + name.removeprefix(old) if name.startswith(old) else name
            tensors[name] = values
        config = _nested(json.loads((directory / "config.json").read_text()) | {"draft_vocab_size": None})
        for key in ("draft_vocab_size", "norm_before_residual", "target_hidden_size"):
            del config[key]
        config |= {
            "architectures": ["EagleSpeculator"],
            "speculators_model_type": "eagle",
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False,
            "fusion_bias": bias,
        }
        write_draft(directory, tensors, config)
        return directory

    return write


def medusa_inside_writer(
    block: str, projection: str, keys: Mapping[str, Any], num_layers: int = 1
) -> Callable[[Path, Path], Path]:
    """Heads among the tensors of their model, whose folder is the target's as well."""

    def write(directory: Path, target_dir: Path) -> Path:
        write_tiny_medusa(directory, target_dir, num_layers=num_layers)
        path = directory / "medusa_lm_head.safetensors"
        heads = load_tensors(path)
        path.unlink()
        tensors = load_tensors(target_dir / "model.safetensors")
        for name, values in heads.items():
            head, layer, *rest = name.split(".")
            template = block + "." + rest[-1] if rest[0] == "linear" else projection + ".weight"
            tensors[template.format(head=head, layer=layer, num_layers=num_layers)] = values
        config = json.loads((target_dir / "config.json").read_text()) | dict(keys)
        write_draft(directory, tensors, config)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((target_dir / name).read_bytes())
        return directory

    return write


def as_pt_writer(write: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    """As torch saves it; the names come from the safetensors file that it replaces."""

    def write_pt(directory: Path, target_dir: Path) -> Path:
        import torch

        write(directory, target_dir)
        path = directory / "medusa_lm_head.safetensors"
        tensors = {name: torch.from_numpy(values) for name, values in load_tensors(path).items()}
        torch.save(tensors, path.with_suffix(".pt"))
        path.unlink()
        return directory

    return write_pt
