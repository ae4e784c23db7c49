"""The weight map of EAGLE heads: what the tensors of a converted head are made of, by layout."""

from __future__ import annotations

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.eagle_layouts import EagleLayout
from draftline.checkpoints.names import TargetTensor


def eagle_tensors(config: HeadConfig, layout: EagleLayout) -> list[TargetTensor]:
    """Return the tensors of a converted EAGLE head, in file order, and what they are made of; ``d2t`` is not listed."""
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    is_eagle3, num_features = config.method == "eagle3", len(config.captured_layers)
    feature_size = num_features * config.target_hidden_size if is_eagle3 else 2 * hidden
    wanted: list[TargetTensor] = []

    def add(key: str, source: str, *shape: int) -> None:
        wanted.append(TargetTensor(key, shape, ((source, shape),)))

    def add_qkv(prefix: str, source: str, kind: str, *columns: int) -> None:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        sources = tuple((f"{source}.self_attn.{name}_proj.{kind}", (size, *columns)) for name, size in sizes.items())
        wanted.append(TargetTensor(f"{prefix}.attention.qkv.{kind}", (q_size + 2 * kv_size, *columns), sources))

    def add_layer(prefix: str, source: str, attention_size: int) -> None:
        add_qkv(prefix, source, "weight", attention_size)
        if config.qkv_bias:
            add_qkv(prefix, source, "bias")
        for name in ("q", "k") if config.qk_norm else ():
            add(
                f"{prefix}.attention.{name}_layernorm.weight",
                f"{source}.self_attn.{name}_norm.weight",
                config.head_size,
            )
        add(f"{prefix}.attention.dense.weight", f"{source}.self_attn.o_proj.weight", hidden, q_size)
        if config.dense_bias:
            add(f"{prefix}.attention.dense.bias", f"{source}.self_attn.o_proj.bias", hidden)
        add(f"{prefix}.post_layernorm.weight", f"{source}.post_attention_layernorm.weight", hidden)
        # Neighbours in the file, so one initializer of a graph may span both.
        for kind, columns in (("weight", (hidden,)), ("bias", ())) if config.mlp_bias else (("weight", (hidden,)),):
            add(f"{prefix}.mlp.fc.{kind}", f"{source}.mlp.gate_proj.{kind}", ffn, *columns)
            add(f"{prefix}.mlp.gate.{kind}", f"{source}.mlp.up_proj.{kind}", ffn, *columns)
        add(f"{prefix}.mlp.proj.weight", f"{source}.mlp.down_proj.weight", hidden, ffn)
        if config.mlp_bias:
            add(f"{prefix}.mlp.proj.bias", f"{source}.mlp.down_proj.bias", hidden)

    if config.owns_embedding:
        add("vocab_embedding.weight", "embed_tokens.weight", vocab, hidden)
    if config.feature_norm == "joined":
        add("input_norm.weight", "input_norm.weight", feature_size)
    for index in range(num_features) if config.feature_norm == "each" else ():
        add(f"fc_norm.{index}.weight", f"fc_norm.{index}.weight", config.target_hidden_size)
    add("fc.weight", f"{layout.fc}.weight", hidden, feature_size)
    if config.fc_bias:
        add("fc.bias", f"{layout.fc}.bias", hidden)
    if is_eagle3:
        for norm in ("hidden_norm", "input_layernorm"):
            add(f"layers.0.{norm}.weight", f"{layout.first_layer}.{norm}.weight", hidden)
    add_layer("layers.0", layout.first_layer, 2 * hidden if is_eagle3 else hidden)
    for layer in range(1, config.num_layers):
        source = layout.later_layer.format(layer=layer)
        add(f"layers.{layer}.input_layernorm.weight", f"{source}.{layout.later_input_norm}.weight", hidden)
        add_layer(f"layers.{layer}", source, hidden)
    if is_eagle3:
        add("ln_f.weight", "norm.weight", hidden)
    if config.owns_lm_head:
        add("lm_head.weight", "lm_head.weight", config.draft_vocab_size, hidden)
    return wanted
