"""Read EAGLE heads in the layouts of the reference implementation and SpecForge.

Source: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858; EAGLE-1's checkpoint) and EAGLE-3 (arXiv 2503.01840) as
their repository and SpecForge store them. The reference loads with ``strict=False``, so a head of another kind drafts
nonsense there in silence; here every tensor is accounted for.

Conventions: ``d2t`` holds offsets (target id = draft id + d2t[draft id]); layer ids mean "output of this layer",
0-based; ``rope_theta`` absent means 10000 whatever the target's is; EAGLE-1's ``bias``, of ``fc``, is true if absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig, HeadMethod
from draftline.checkpoints.drafts.captured_layers import parse_captured_layers
from draftline.checkpoints.drafts.draft_vocabulary import read_vocabulary_offsets
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.huggingface import open_weights
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.names import TargetTensor, check_source_tensors
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

# The keys that heads share with Llama. The others there were copied from the target and mean nothing to a head.
_LLAMA_KEYS = (
    "hidden_act",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
# Switches of heads that compute something else with tensors of the same names -> the value that changes nothing.
_VARIANT_SWITCHES = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": True}

_IGNORED = re.compile(r"(midlayer|layers\.\d+)\.self_attn\.rotary_emb\.inv_freq")
_LAYOUT = "use a head in the layout of the reference implementation"
_CHOOSE = "choose the head that was trained for this target"


def read_eagle1(directory: Path, target: CheckpointConfig, dtype: str) -> SourceHead:
    """Read the headers of an EAGLE-1/2 head and check them against the target.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, or ``config.json`` contradicts them or the
            target.
    """
    raw, tensors = load_json(directory / "config.json"), open_weights(directory)
    if any(name.startswith("midlayer.") for name in tensors):
        raise CheckpointError(directory, "draft.method is the head's own", "an EAGLE-3 head", "set it to eagle3")
    llama = _parse_llama(raw, target, dtype)
    if llama.hidden_size != target.hidden_size:
        raise raw.error("hidden_size", f"the target's ({target.hidden_size})", llama.hidden_size, _CHOOSE)
    config = _head_config("eagle1", llama, target, raw, tensors)
    if raw.flag("bias", True) != config.fc_bias:
        rule = "config.json has bias false where fc.bias is absent, and true or no bias where it is there"
        got = f"bias {str(raw.flag('bias', True)).lower()} and {'an' if config.fc_bias else 'no'} fc.bias"
        raise CheckpointError(raw.where, rule, got, "correct the file or fetch the checkpoint again")
    return _checked(directory, config, tensors, "an EAGLE-1 head")


def read_eagle3(directory: Path, target: CheckpointConfig, dtype: str) -> SourceHead:
    """Read the headers and the vocabulary of an EAGLE-3 head and check them against the target.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, ``config.json`` contradicts them or the
            target, or the vocabulary is not a subset of the target's.
    """
    raw, tensors = load_json(directory / "config.json"), open_weights(directory)
    _refuse_variants(raw)
    if "layers.0.self_attn.q_proj.weight" in tensors:
        got = "layers.0.*, as in EAGLE-1 heads and in EAGLE-3 heads of other tools"
        raise CheckpointError(directory, "the layer of an EAGLE-3 head is named midlayer", got, _LAYOUT)
    llama = _parse_llama(raw, target, dtype)
    if llama.num_hidden_layers != 1:
        raise raw.error("num_hidden_layers", "1 in an EAGLE-3 head", llama.num_hidden_layers, _LAYOUT)
    if raw.integer("target_hidden_size", target.hidden_size) != target.hidden_size:
        rule = f"the target's hidden_size ({target.hidden_size})"
        raise raw.error("target_hidden_size", rule, raw.get("target_hidden_size"), _CHOOSE)
    draft_vocab_size = raw.integer("draft_vocab_size", target.vocab_size)
    if draft_vocab_size > target.vocab_size:
        rule = f"at most the target's vocab_size ({target.vocab_size})"
        raise raw.error("draft_vocab_size", rule, draft_vocab_size, _CHOOSE)
    fc = tensors.get("fc.weight")
    fc_columns = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
    captured_layers = parse_captured_layers(raw, target, fc_columns)
    config = _head_config("eagle3", llama, target, raw, tensors, draft_vocab_size, captured_layers)
    head = _checked(directory, config, tensors, "an EAGLE-3 head")
    _check_borrowed(config, raw)
    offsets = read_vocabulary_offsets(tensors, config, directory)
    return SourceHead(config, head.wanted, tensors, offsets)


def eagle_tensors(config: HeadConfig) -> list[TargetTensor]:
    """Return the tensors of a converted EAGLE head, in file order, and what they are made of; ``d2t`` is not listed."""
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    is_eagle3 = config.method == "eagle3"
    attention_size = 2 * hidden if is_eagle3 else hidden
    fc_size = len(config.captured_layers) * config.target_hidden_size if is_eagle3 else 2 * hidden
    wanted: list[TargetTensor] = []

    def add(key: str, source: str, *shape: int) -> None:
        wanted.append(TargetTensor(key, shape, ((source, shape),)))

    def add_qkv(prefix: str, source: str, kind: str, *columns: int) -> None:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        sources = tuple((f"{source}.self_attn.{name}_proj.{kind}", (size, *columns)) for name, size in sizes.items())
        wanted.append(TargetTensor(f"{prefix}.attention.qkv.{kind}", (q_size + 2 * kv_size, *columns), sources))

    if config.owns_embedding:
        add("vocab_embedding.weight", "embed_tokens.weight", vocab, hidden)
    add("fc.weight", "fc.weight", hidden, fc_size)
    if config.fc_bias:
        add("fc.bias", "fc.bias", hidden)
    for layer in range(config.num_layers):
        prefix, source = f"layers.{layer}", "midlayer" if is_eagle3 else f"layers.{layer}"
        if is_eagle3:
            add(f"{prefix}.hidden_norm.weight", f"{source}.hidden_norm.weight", hidden)
        if is_eagle3 or layer > 0:
            add(f"{prefix}.input_layernorm.weight", f"{source}.input_layernorm.weight", hidden)
        add_qkv(prefix, source, "weight", attention_size)
        if config.qkv_bias:
            add_qkv(prefix, source, "bias")
        add(f"{prefix}.attention.dense.weight", f"{source}.self_attn.o_proj.weight", hidden, q_size)
        add(f"{prefix}.post_layernorm.weight", f"{source}.post_attention_layernorm.weight", hidden)
        # Neighbours in the file, so one initializer of a graph may span both.
        add(f"{prefix}.mlp.fc.weight", f"{source}.mlp.gate_proj.weight", ffn, hidden)
        add(f"{prefix}.mlp.gate.weight", f"{source}.mlp.up_proj.weight", ffn, hidden)
        add(f"{prefix}.mlp.proj.weight", f"{source}.mlp.down_proj.weight", hidden, ffn)
    if is_eagle3:
        add("ln_f.weight", "norm.weight", hidden)
    if config.owns_lm_head:
        add("lm_head.weight", "lm_head.weight", config.draft_vocab_size, hidden)
    return wanted


def _parse_llama(raw: JsonObject, target: CheckpointConfig, dtype: str) -> CheckpointConfig:
    values = {key: raw.values[key] for key in _LLAMA_KEYS if key in raw.values}
    llama = parse_huggingface_config(
        JsonObject(raw.where, values | {"architectures": ["LlamaForCausalLM"]}), None, dtype
    )
    if llama.vocab_size != target.vocab_size:
        raise raw.error("vocab_size", f"the target's ({target.vocab_size})", llama.vocab_size, _CHOOSE)
    return llama


def _head_config(
    method: HeadMethod,
    llama: CheckpointConfig,
    target: CheckpointConfig,
    raw: JsonObject,
    tensors: Mapping[str, SourceTensor],
    draft_vocab_size: int | None = None,
    captured_layers: tuple[int, ...] = (),
) -> HeadConfig:
    qkv_bias = any(re.search(r"\.self_attn\.[qkv]_proj\.bias$", name) for name in tensors)
    if method == "eagle1" and raw.get("qkv_bias") is not None and raw.flag("qkv_bias") != qkv_bias:
        rule = f"{str(qkv_bias).lower()}, as the tensors of self_attn.q_proj have it"
        raise raw.error("qkv_bias", rule, raw.get("qkv_bias"))
    return HeadConfig(
        method=method,
        dtype=llama.dtype,
        vocab_size=target.vocab_size,
        hidden_size=llama.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=llama.num_hidden_layers,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        captured_layers=captured_layers,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_size=llama.head_size,
        intermediate_size=llama.intermediate_size,
        norm_epsilon=llama.norm_epsilon,
        rotary_base=llama.rotary_base,
        rotary_scaling=llama.rotary_scaling,
        max_position_embeddings=llama.max_position_embeddings,
        fc_bias=method == "eagle1" and "fc.bias" in tensors,
        qkv_bias=qkv_bias,
        owns_embedding="embed_tokens.weight" in tensors,
        owns_lm_head=method == "eagle3" and "lm_head.weight" in tensors,
    )


def _checked(directory: Path, config: HeadConfig, tensors: Mapping[str, SourceTensor], kind: str) -> SourceHead:
    wanted = eagle_tensors(config)
    vocabulary = {"d2t", "t2d"} if config.method == "eagle3" else set()
    check_source_tensors(
        wanted,
        tensors,
        directory,
        kind=kind,
        is_ignored=lambda name: name in vocabulary or _IGNORED.fullmatch(name) is not None,
        cure=f"check draft.method, or {_LAYOUT}",
    )
    return SourceHead(config, wanted, tensors)


def _refuse_variants(raw: JsonObject) -> None:
    if raw.get("speculators_model_type") is not None:
        raise raw.error("speculators_model_type", "absent", raw.get("speculators_model_type"), _LAYOUT)
    for key, harmless in _VARIANT_SWITCHES.items():
        if raw.flag(key, harmless) != harmless:
            raise raw.error(key, f"{str(harmless).lower()} or absent", raw.get(key), _LAYOUT)


def _check_borrowed(config: HeadConfig, raw: JsonObject) -> None:
    """What a head has not it borrows from the target, whose tensors must then fit."""
    fits = config.hidden_size == config.target_hidden_size
    if not fits and not config.owns_embedding:
        rule = (
            f"embed_tokens.weight is in the head where its hidden_size is not the target's {config.target_hidden_size}"
        )
        raise CheckpointError(raw.where, rule, f"hidden_size {config.hidden_size} without it", _CHOOSE)
    if config.owns_lm_head:
        return
    if not fits or config.draft_vocab_size != config.vocab_size:
        rule = "lm_head.weight is in the head where its hidden_size or vocabulary is not the target's"
        got = f"hidden_size {config.hidden_size} and draft_vocab_size {config.draft_vocab_size} without it"
        raise CheckpointError(raw.where, rule, got, "fetch the whole checkpoint")
    if config.owns_embedding and raw.flag("tie_word_embeddings", False):
        rule = "lm_head.weight is in the head where tie_word_embeddings is true and it has its own embed_tokens.weight"
        raise CheckpointError(raw.where, rule, "no lm_head.weight", "set it to false to borrow the target's lm_head")
