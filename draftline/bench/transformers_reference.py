"""The target in transformers, with the very float32 weights of a converted checkpoint."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.names import weight_map
from draftline.checkpoints.optional_package import import_optional
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.trtllm import WEIGHTS_FILE, load_checkpoint_config
from draftline.checkpoints.weight_rules import EXPERT_NAMES, LAYER_SOURCE_PREFIX
from draftline.errors import CheckpointError, MissingPackageError

# Those whose configuration classes take the fields of ours as they are.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_PIP_LINE = "pip install 'draftline[bench]' 'transformers>=5'"


class TransformersReference:
    """``AutoModelForCausalLM`` in float32 on the CPU; greedy, and deaf to end tokens, so that lengths are fixed."""

    def __init__(self, checkpoint: Path) -> None:
        """Load a converted checkpoint (``builds/NAME/checkpoint``).

        Raises: CheckpointError if it is none or of an architecture that is not among ``ARCHITECTURES``,
            MissingPackageError without torch and transformers 5.
        """
        self._torch = import_optional("torch", "the transformers reference", _PIP_LINE)
        self._transformers = import_optional("transformers", "the transformers reference", _PIP_LINE)
        version = self._transformers.__version__
        if int(version.split(".")[0]) < 5:  # before, configurations had no rope_parameters and would ignore them
            raise MissingPackageError("the transformers reference", "needs transformers >= 5", version, _PIP_LINE)
        config = load_checkpoint_config(checkpoint)
        if config.architecture not in ARCHITECTURES or config.full_layers:
            got = f"{config.architecture}, layers {list(config.full_layers)} without its window"
            rule = f"the transformers reference is one of {', '.join(ARCHITECTURES)}, whose layers are alike"
            raise CheckpointError(checkpoint, rule, got, "measure a target of one of these")
        model = self._transformers.AutoModelForCausalLM.from_config(
            self._build_config(config), dtype=self._torch.float32
        )
        arrays = load_sources(checkpoint, config)
        if config.experts is not None:
            arrays = _with_joined_experts(arrays, config, config.experts.num_experts)
        state = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        if config.share_embedding_table:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, strict=True)
        self._model: Any = model.eval()
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"  # newer, older transformers

    def prefill(self, prompt: Sequence[int]) -> Any:
        """Return the keys and values of one prompt, for ``join``."""
        with self._torch.inference_mode():
            cache = self._transformers.DynamicCache()
            self._model(self._torch.tensor([list(prompt)]), logits_to_keep=1, **{self._cache_argument: cache})
        return cache

    def join(self, caches: Sequence[Any], num_tokens: int) -> Any:
        """Return the first ``num_tokens`` positions of several prompts' keys and values as one batch's, copied."""
        joined = self._transformers.DynamicCache()
        with self._torch.inference_mode():
            for layer in range(len(caches[0].layers)):
                parts = [cache.layers[layer] for cache in caches]
                keys = self._torch.cat([part.keys[:, :, :num_tokens] for part in parts])
                values = self._torch.cat([part.values[:, :, :num_tokens] for part in parts])
                joined.update(keys, values, layer)
        return joined

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        on_step: Callable[[float, int], None] | None = None,
        cache: Any = None,
    ) -> list[list[int]]:
        """Continue every prompt by ``num_tokens`` tokens with ``model.generate``; the batch is padded on the left.

        ``on_step`` is told the second of ``time.perf_counter`` and how many tokens every answer has by then. ``cache``
        holds the keys and values of the prompts without their last tokens; the prompts are then equally long.
        """
        longest = max(map(len, prompts))
        padded = self._torch.zeros((len(prompts), longest), dtype=self._torch.long)
        mask = self._torch.zeros_like(padded)
        for row, prompt in enumerate(prompts):
            padded[row, longest - len(prompt) :] = self._torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1

        def observe(input_ids: Any, scores: Any, **options: Any) -> Any:
            if on_step is not None:
                on_step(time.perf_counter(), input_ids.shape[1] - longest)
            return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool)

        settings = self._transformers.GenerationConfig(
            do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None
        )
        with self._torch.inference_mode():
            ids = self._model.generate(
                padded,
                attention_mask=mask,
                generation_config=settings,
                **({} if cache is None else {self._cache_argument: cache}),
                stopping_criteria=self._transformers.StoppingCriteriaList([observe]),
            )
        answers: list[list[int]] = ids[:, longest:].tolist()
        return answers

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after every token of one sequence.

        **Shapes**: T ids -> ``[T, V] float32``; row t predicts token t + 1.
        """
        with self._torch.inference_mode():
            logits: NDArray[np.float32] = self._model(self._torch.tensor([list(token_ids)])).logits[0].numpy()
        return logits

    def _build_config(self, config: CheckpointConfig) -> Any:
        rotary = {"rope_type": "default", **(config.rotary_scaling or {}), "rope_theta": config.rotary_base}
        biases = (
            {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
            if config.architecture == "LlamaForCausalLM"
            else {}
        )
        experts = config.experts
        sparse = (
            {}
            if experts is None
            else {
                "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.per_token,
                "moe_intermediate_size": experts.intermediate_size,
                "norm_topk_prob": experts.renormalises,
            }
        )
        return self._transformers.AutoConfig.for_model(
            FAMILIES[config.architecture].model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_size,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters=rotary,
            sliding_window=config.sliding_window,
            tie_word_embeddings=config.share_embedding_table,
            **biases,
            **sparse,
        )


def load_sources(checkpoint: Path, config: CheckpointConfig) -> dict[str, NDArray[np.float32]]:
    """Return the converted tensors under their source names: joined ones cut apart again, all in float32."""
    path = checkpoint / WEIGHTS_FILE
    locations = tensor_locations(path)
    sources: dict[str, NDArray[np.float32]] = {}
    for target in weight_map(config):
        rows = np.array(map_tensor(path, locations[target.key]), np.float32)
        rows = rows.reshape(-1, *rows.shape[2:]) if rows.ndim == 3 else rows
        for name, shape in target.sources:
            sources[name], rows = rows[: shape[0]], rows[shape[0] :]
    return sources


def _with_joined_experts(
    sources: dict[str, NDArray[np.float32]], config: CheckpointConfig, num_experts: int
) -> dict[str, NDArray[np.float32]]:
    """Name experts as the modules of transformers 5 do, which hold those of a layer in two tensors."""
    joined, names = dict(sources), EXPERT_NAMES[config.architecture]
    for layer in range(config.num_hidden_layers):
        prefix = LAYER_SOURCE_PREFIX.format(layer=layer)

        def of_all(name: str, prefix: str = prefix) -> NDArray[np.float32]:
            return np.stack([joined.pop(f"{prefix}{name.format(expert)}.weight") for expert in range(num_experts)])

        joined[f"{prefix}mlp.gate.weight"] = joined.pop(f"{prefix}{names.router}.weight")
        joined[f"{prefix}mlp.experts.gate_up_proj"] = np.concatenate([of_all(names.gate), of_all(names.up)], axis=1)
        joined[f"{prefix}mlp.experts.down_proj"] = of_all(names.down)
    return joined
