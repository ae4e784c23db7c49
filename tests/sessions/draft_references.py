"""Independent references of drafters in torch, float64, straight from published checkpoints: one path, no cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")


class TargetReference:
    """The target of ``checkpoint`` by ``transformers`` in float64."""

    def __init__(self, checkpoint: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.double().eval()
        self.embedding = model.get_input_embeddings().weight.detach()
        self.lm_head = model.get_output_embeddings().weight.detach()

    def hidden(self, tokens: Sequence[int]) -> list[Any]:
        """Outputs of every layer, ``[n, h]`` each, the last one after the final norm; the embedding comes first."""
        with torch.no_grad():
            output = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        return [values[0] for values in output.hidden_states]

    def log_probs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        log_probs: NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
        return log_probs


class EagleReference:
    """An EAGLE head over one path, of any layout, by what its own ``config.json`` and tensors say.

    ``captured_layers`` empty: EAGLE-1, which reads the target's last hidden rows.
    """

    def __init__(self, checkpoint: Path, target: TargetReference, captured_layers: Sequence[int] = ()) -> None:
        raw = json.loads((checkpoint / "config.json").read_text())
        self.config = raw | raw.get("transformer_layer_config", {})
        self.feeds_normed = bool(raw.get("norm_output")) and "speculators_model_type" in raw
        tensors = safetensors_torch.load_file(checkpoint / "model.safetensors")
        self.tensors = {name: value.double() for name, value in tensors.items() if name not in ("d2t", "t2d")}
        self.d2t = tensors.get("d2t")
        self.target, self.captured_layers = target, captured_layers
        self.first = next(name for name in tensors if "q_proj.weight" in name).removesuffix(".self_attn.q_proj.weight")
        self.later = {"midlayer.0": ("midlayer", "hidden_norm")}.get(self.first, ("layers", "input_layernorm"))
        self.fc = "fusion_fc" if "fusion_fc.weight" in tensors else "fc"
        self._features: dict[tuple[int, ...], Any] = {}

    def features(self, tokens: Sequence[int]) -> Any:
        if tuple(tokens) not in self._features:
            hidden = self.target.hidden(tokens)
            layers = [hidden[layer + 1] for layer in self.captured_layers] or [hidden[-1]]
            if self.config.get("fc_norm"):
                layers = [self._norm(values, f"fc_norm.{index}") for index, values in enumerate(layers)]
            features = torch.cat(layers, -1)
            if self.config.get("norm_before_fc"):
                features = self._norm(features, "input_norm")
            self._features[tuple(tokens)] = features
        return self._features[tuple(tokens)]

    def log_probs(self, tokens: Sequence[int], num_known: int) -> NDArray[np.float64]:
        """Log-probabilities behind the last row of a path, over the target's vocabulary (-inf outside the draft's).

        ``tokens`` are those of the text from its first on. Row t takes token t + 1; the first ``num_known`` rows are
        fed with the target's features, each of the others with the output of the row before it.
        """
        fed = self._narrow(self.features(tokens[:num_known]))
        embedding = self.tensors.get("embed_tokens.weight", self.target.embedding)
        for _ in range(len(tokens) - 1 - num_known + 1):
            hidden = self._layers(embedding[torch.tensor(tokens[1 : len(fed) + 1])], fed)
            normed = self._norm(hidden, "norm") if self.captured_layers else hidden
            fed = torch.cat([fed, (normed if self.feeds_normed else hidden)[-1:]])
        lm_head = self.tensors.get("lm_head.weight", self.target.lm_head)[: len(self.target.lm_head)]
        logits = normed[-1] @ lm_head.T
        log_probs = torch.log_softmax(logits, -1)
        if self.d2t is not None:
            everything = torch.full((len(self.target.lm_head),), -torch.inf, dtype=torch.float64)
            everything[torch.arange(len(self.d2t)) + self.d2t] = log_probs
            log_probs = everything
        values: NDArray[np.float64] = log_probs.numpy()
        return values

    def _narrow(self, features: Any) -> Any:
        return self._linear(features, "fc") if self.captured_layers else features

    def _layers(self, embedded: Any, features: Any) -> Any:
        if self.captured_layers:
            normed = self._norm(features, f"{self.first}.hidden_norm")
            both = torch.cat([self._norm(embedded, f"{self.first}.input_layernorm"), normed], -1)
            x = self._layer(normed if self.config.get("norm_before_residual") else features, both, self.first)
        else:
            x = self._linear(torch.cat([embedded, features], -1), self.fc)
            x = self._layer(x, x, self.first)
        prefix, norm = self.later
        for layer in range(1, self.config["num_hidden_layers"]):
            x = self._layer(x, self._norm(x, f"{prefix}.{layer}.{norm}"), f"{prefix}.{layer}")
        return x

    def _layer(self, x: Any, attention_input: Any, prefix: str) -> Any:
        x = x + self._attention(attention_input, f"{prefix}.self_attn")
        normed = self._norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = self._linear(normed, f"{prefix}.mlp.gate_proj"), self._linear(normed, f"{prefix}.mlp.up_proj")
        return x + self._linear(torch.nn.functional.silu(gate) * up, f"{prefix}.mlp.down_proj")

    def _attention(self, x: Any, prefix: str) -> Any:
        size, groups = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        q, k, v = (self._linear(x, f"{prefix}.{kind}_proj").unflatten(-1, (-1, size)).transpose(0, 1) for kind in "qkv")
        if f"{prefix}.q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        cosines, sines = self._rotary(len(x))

        def rotate(y: Any) -> Any:
            return y * cosines + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sines

        scores = rotate(q) @ rotate(k).repeat_interleave(groups, 0).transpose(1, 2) * size**-0.5
        scores = scores + torch.full_like(scores[0], -torch.inf).triu(1)
        out = torch.softmax(scores, -1) @ v.repeat_interleave(groups, 0)
        return self._linear(out.transpose(0, 1).flatten(1), f"{prefix}.o_proj")

    def _rotary(self, length: int) -> tuple[Any, Any]:
        """Cosines and sines ``[length, head_dim]`` as ``transformers`` computes them, in float32."""
        scaling = self.config.get("rope_scaling") or {"rope_type": "default"}
        config = transformers.LlamaConfig(
            hidden_size=self.config["hidden_size"],
            num_attention_heads=self.config["num_attention_heads"],
            head_dim=self.config["head_dim"],
            max_position_embeddings=self.config["max_position_embeddings"],
            rope_parameters={"rope_theta": self.config.get("rope_theta", 10000.0), **scaling},
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cosines, sines = rotary(torch.zeros(1), torch.arange(length)[None])
        return cosines[0].double(), sines[0].double()

    def _linear(self, x: Any, name: str) -> Any:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def _norm(self, x: Any, name: str) -> Any:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[f"{name}.weight"]


def medusa_log_probs(
    checkpoint: Path, target: TargetReference, tokens: Sequence[int], num_layers: int
) -> NDArray[np.float64]:
    """Log-probabilities ``[n, heads, V]`` of Medusa heads behind every token."""
    tensors = {
        name: value.double()
        for name, value in safetensors_torch.load_file(checkpoint / "medusa_lm_head.safetensors").items()
    }
    results = []
    for head in sorted({name.partition(".")[0] for name in tensors}):
        x = target.hidden(tokens)[-1]
        for layer in range(num_layers):
            y = x @ tensors[f"{head}.{layer}.linear.weight"].T + tensors[f"{head}.{layer}.linear.bias"]
            x = x + torch.nn.functional.silu(y)
        logits = x @ tensors.get(f"{head}.{num_layers}.weight", target.lm_head).T
        results.append(torch.log_softmax(logits, -1))
    log_probs: NDArray[np.float64] = torch.stack(results, 1).numpy()
    return log_probs
