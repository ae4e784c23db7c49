"""What a TensorRT-LLM checkpoint holds: the target's tensors, and those of Medusa heads or an EAGLE network.

Source: ``convert_hf_llama``, ``load_medusa_hf`` and ``load_eagle_hf`` of TensorRT-LLM's converters. Of an EAGLE network
they write as many equal copies as its trees are deep, each with the target's ``lm_head``; its layers have no
``input_layernorm``. A target whose ``lm_head`` is its embedding gets a tensor of its own.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.names import TargetTensor, weight_map
from draftline.checkpoints.ranks.cuts import Heads, Slice, cut
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.weight_rules import EMBEDDING, LM_HEAD
from draftline.errors import CheckpointError

DRAFT_PREFIX = "draft:"  # of the names of a converted head's tensors among those of the target's source
MAX_NON_LEAVES_PER_LAYER = 10  # the converter's default
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_ELSEWHERE = "set engine.route to llmapi, or engine.backend to onnxruntime"
_LAYER = re.compile(r"transformer\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Speculation:
    """A head inside the checkpoint, and the static trees that its engine is built for.

    ``num_draft_tokens`` and ``max_depth`` are those of the tree, ``max_non_leaves`` the nodes with children that a
    depth of it has at most.
    """

    head: HeadConfig
    num_draft_tokens: int
    max_depth: int
    max_non_leaves: int = MAX_NON_LEAVES_PER_LAYER


@dataclass(frozen=True)
class Layout:
    """A checkpoint for the ranks of ``mapping``; ``speculation`` is None for one of the target alone."""

    config: CheckpointConfig
    mapping: Mapping
    speculation: Speculation | None = None

    def heads(self, key: str) -> Heads:
        """Return the attention heads of the network that the tensor ``key`` belongs to."""
        owner: CheckpointConfig | HeadConfig = self.config
        if key.startswith("eagle_nets.") and self.speculation is not None:
            owner = self.speculation.head
        return Heads(owner.num_attention_heads, owner.num_key_value_heads, owner.head_size)

    def slice_of(self, tensor: TargetTensor) -> Slice:
        return cut(tensor.key, tensor.shape, self.mapping.tp_size, self.heads(tensor.key))

    def placed(self, tensor: TargetTensor) -> tuple[int, str]:
        """Return the pipeline stage that has ``tensor``, and its key there, which counts the stage's own layers."""
        last = self.mapping.pp_size - 1
        layer = _LAYER.match(tensor.key)
        if layer is None:
            return (0 if tensor.key == EMBEDDING.key else last), tensor.key
        number = int(layer[1])
        stages = self.mapping.layers(self.config.num_hidden_layers)
        stage = next(index for index, layers in enumerate(stages) if number in layers)
        return stage, f"transformer.layers.{number - stages[stage].start}.{tensor.key[layer.end() :]}"

    def tensors(self) -> list[TargetTensor]:
        """Return the whole tensors, in file order, and the source tensors that they are made of."""
        wanted = weight_map(self.config)
        if self.config.share_embedding_table:
            embedding = wanted[0]
            wanted.append(dataclasses.replace(embedding, key=LM_HEAD.key))
        if self.speculation is None:
            return wanted
        head, embedding, lm_head = self.speculation.head, wanted[0], wanted[-1]
        if head.method == "medusa":
            for key, shape in medusa_shapes(head).items():
                borrowed = key.endswith(LM_HEAD.key) and not head.owns_medusa_lm_heads
                wanted.append(dataclasses.replace(lm_head, key=key) if borrowed else _of_draft(key, key, shape))
            return wanted
        for copy in range(self.speculation.max_depth):
            owner = f"eagle_nets.{copy}."
            wanted.append(dataclasses.replace(lm_head, key=owner + LM_HEAD.key))
            for name, shape in eagle_shapes(head).items():
                borrowed = name == "vocab_embedding.weight" and not head.owns_embedding
                key = f"{owner}drafter.{name}"
                wanted.append(dataclasses.replace(embedding, key=key) if borrowed else _of_draft(key, name, shape))
        return wanted


def _of_draft(key: str, name: str, shape: tuple[int, ...]) -> TargetTensor:
    return TargetTensor(key, shape, ((DRAFT_PREFIX + name, shape),))


def medusa_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of Medusa heads, each with a projection of its own."""
    hidden = head.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for owner in (f"medusa_heads.{index}" for index in range(head.num_heads)):
        for layer in range(head.num_layers):
            shapes[f"{owner}.medusa_layers.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{owner}.medusa_layers.{layer}.linear.bias"] = (hidden,)
        shapes[f"{owner}.{LM_HEAD.key}"] = (head.vocab_size, hidden)
    return shapes


def eagle_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one copy of an EAGLE network but for its ``lm_head``."""
    hidden, ffn, q_size = head.hidden_size, head.intermediate_size, head.num_attention_heads * head.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "vocab_embedding.weight": (head.vocab_size, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
    }
    for layer in (f"layers.{index}" for index in range(head.num_layers)):
        shapes |= {
            f"{layer}.attention.qkv.weight": (q_size + 2 * head.num_key_value_heads * head.head_size, hidden),
            f"{layer}.attention.dense.weight": (hidden, q_size),
            f"{layer}.post_layernorm.weight": (hidden,),
            f"{layer}.mlp.fc.weight": (ffn, hidden),
            f"{layer}.mlp.gate.weight": (ffn, hidden),
            f"{layer}.mlp.proj.weight": (hidden, ffn),
        }
    return shapes


def check_layout(layout: Layout) -> None:
    """Refuse what TensorRT-LLM's layout cannot hold, by name.

    Raises:
        CheckpointError: a size does not divide by the ranks, or the network is not one that its builder knows.
    """
    config, mapping, speculation = layout.config, layout.mapping, layout.speculation
    check_architecture("target", config)
    if config.full_layers:
        rule = "TensorRT-LLM's network gives all layers one attention window"
        raise CheckpointError("target", rule, f"layers {list(config.full_layers)} without one", _ELSEWHERE)
    is_qwen = config.architecture.startswith("Qwen")
    if config.dense_bias and is_qwen:
        rule = f"TensorRT-LLM's network of {config.architecture} has no bias behind attention"
        raise CheckpointError("target", rule, "attention_bias true", "set engine.backend to onnxruntime")
    if config.dense_bias != config.qkv_bias and not is_qwen:
        raise CheckpointError(
            "target", "q, k, v and o have biases, or none has", "some of them", "choose another model"
        )
    if mapping.pp_size > config.num_hidden_layers:
        rule = f"every stage has one of the {config.num_hidden_layers} layers"
        raise CheckpointError("engine.pipeline_parallel_size", rule, mapping.pp_size, "lower it")
    networks: list[tuple[str, CheckpointConfig | HeadConfig]] = [("target", config)]
    if speculation is not None:
        _check_head(speculation, is_qwen, config)
        if speculation.head.method != "medusa":
            networks.append(("draft", speculation.head))
        if mapping.pp_size > 1:
            rule = "TensorRT-LLM's Medusa and EAGLE engines have one pipeline stage"
            cure = "set it to 1 and raise engine.tensor_parallel_size"
            raise CheckpointError("engine.pipeline_parallel_size", rule, mapping.pp_size, cure)
    for owner, network in networks:
        _check_divides(owner, network, mapping.tp_size, takes_hidden=speculation is not None)


def check_architecture(where: object, config: CheckpointConfig) -> None:
    """Raise CheckpointError for a network whose checkpoints for ranks are not known."""
    if config.architecture not in ARCHITECTURES:
        rule = f"checkpoints of trtllm-build are written for {', '.join(ARCHITECTURES)}"
        raise CheckpointError(where, rule, config.architecture, _ELSEWHERE)


def _check_divides(owner: str, network: CheckpointConfig | HeadConfig, tp_size: int, *, takes_hidden: bool) -> None:
    def check(name: str, value: int, divides: bool) -> None:
        if not divides:
            rule = f"the {owner}'s {name} {value} divides by it"
            raise CheckpointError("engine.tensor_parallel_size", rule, tp_size, "choose another number of GPUs")

    kv_heads = network.num_key_value_heads
    check("num_attention_heads", network.num_attention_heads, network.num_attention_heads % tp_size == 0)
    check("num_key_value_heads", kv_heads, kv_heads % tp_size == 0 or tp_size % kv_heads == 0)
    check("intermediate_size", network.intermediate_size, network.intermediate_size % tp_size == 0)
    if takes_hidden:
        check("hidden_size", network.hidden_size, network.hidden_size % tp_size == 0)


def _check_head(speculation: Speculation, is_qwen: bool, config: CheckpointConfig) -> None:
    head = speculation.head
    if head.method == "medusa":
        if speculation.max_depth > head.num_heads:
            rule = f"the heads draft {head.num_heads} tokens, one each"
            raise CheckpointError("tree.max_depth", rule, speculation.max_depth, "choose choices of that depth")
        return
    if is_qwen:
        rule = "TensorRT-LLM's EAGLE engines are of the Llama family"
        raise CheckpointError("draft", rule, config.architecture, "set engine.backend to onnxruntime")
    if speculation.num_draft_tokens > 256:
        rule = "TensorRT-LLM's EAGLE trees have 256 draft tokens at most"
        raise CheckpointError("tree.choices", rule, speculation.num_draft_tokens, "take fewer choices")
