"""Why architectures in use are not among ``FAMILIES``: what of their networks the graphs have not.

Source: the model classes of transformers 5, else the code that is published beside the weights.
"""

from __future__ import annotations

import json

from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

_STATES = "layers without attention, which keep a state of each sequence"
_IMAGES = "images beside text"
_LATENT = "latent attention, whose keys and values are one compressed row"
_LAYER_NORMS = "layer norms in the place of RMS norms"
_MULTIPLIERS = "multipliers of embedding, residual stream and logits"
_NORMS_BEHIND = "norms behind attention and MLP alone"
_PARALLEL = "layer norms, attention beside the MLP"
_SHARED_EXPERTS = "experts that all tokens share, beside those that are chosen"
_SOME_POSITIONS = "layers without positions"

REASONS: dict[str, str] = {
    "BaichuanForCausalLM": "ALiBi in the place of rotary positions, or a head that is normalised",
    "BambaForCausalLM": _STATES,
    "BitNetForCausalLM": "ternary weights, norms inside attention and MLP",
    "BloomForCausalLM": "ALiBi in the place of rotary positions",
    "Cohere2ForCausalLM": f"{_PARALLEL}, {_SOME_POSITIONS}",
    "CohereForCausalLM": _PARALLEL,
    "DeepseekForCausalLM": _SHARED_EXPERTS,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Exaone4ForCausalLM": f"{_NORMS_BEHIND}, {_SOME_POSITIONS}",
    "FalconForCausalLM": _PARALLEL,
    "FalconH1ForCausalLM": _STATES,
    "GPT2LMHeadModel": f"learned positions, {_LAYER_NORMS}",
    "GPTBigCodeForCausalLM": f"learned positions, {_LAYER_NORMS}",
    "GPTJForCausalLM": _PARALLEL,
    "GPTNeoXForCausalLM": _PARALLEL,
    "Gemma3ForConditionalGeneration": f"{_IMAGES}; Gemma3ForCausalLM is its model of text",
    "Gemma3TextModel": "embeddings of texts, attention to later tokens",
    "Gemma3nForCausalLM": "streams that are predicted and corrected, embeddings of each layer",
    "Gemma3nForConditionalGeneration": f"{_IMAGES}, embeddings of each layer",
    "Gemma4ForConditionalGeneration": f"{_IMAGES}, embeddings of each layer",
    "Glm4ForCausalLM": "rotary positions that turn neighbouring elements",
    "Glm4MoeForCausalLM": _SHARED_EXPERTS,
    "GlmForCausalLM": "rotary positions that turn neighbouring elements",
    "GraniteForCausalLM": _MULTIPLIERS,
    "GraniteMoeForCausalLM": _MULTIPLIERS,
    "GraniteMoeHybridForCausalLM": _STATES,
    "JambaForCausalLM": _STATES,
    "Lfm2ForCausalLM": _STATES,
    "Llama4ForCausalLM": f"{_SOME_POSITIONS}, attention by chunks",
    "Llama4ForConditionalGeneration": f"{_IMAGES}, {_SOME_POSITIONS}, attention by chunks",
    "LlavaForConditionalGeneration": _IMAGES,
    "MambaForCausalLM": _STATES,
    "MiniCPMForCausalLM": _MULTIPLIERS,
    "Mistral3ForConditionalGeneration": _IMAGES,
    "MllamaForConditionalGeneration": _IMAGES,
    "NemotronForCausalLM": f"{_LAYER_NORMS}, squared ReLU",
    "NemotronHForCausalLM": _STATES,
    "OPTForCausalLM": f"learned positions, {_LAYER_NORMS}",
    "Olmo2ForCausalLM": f"{_NORMS_BEHIND}, norms over all heads at once",
    "Olmo3ForCausalLM": f"{_NORMS_BEHIND}, norms over all heads at once",
    "OlmoForCausalLM": "layer norms without weights",
    "OlmoeForCausalLM": "norms over all heads at once",
    "PaliGemmaForConditionalGeneration": _IMAGES,
    "Phi3SmallForCausalLM": "sparse attention by blocks, layer norms",
    "Phi3VForCausalLM": _IMAGES,
    "Phi4MMForCausalLM": f"{_IMAGES}, adapters that a prompt chooses",
    "Phi4MultimodalForCausalLM": f"{_IMAGES}, adapters that a prompt chooses",
    "PhiForCausalLM": _PARALLEL,
    "PhiMoEForCausalLM": f"{_LAYER_NORMS}, sparse mixing of experts",
    "PhimoeForCausalLM": f"{_LAYER_NORMS}, sparse mixing of experts",
    "Qwen2MoeForCausalLM": _SHARED_EXPERTS,
    "Qwen2VLForConditionalGeneration": _IMAGES,
    "Qwen2_5_VLForConditionalGeneration": _IMAGES,
    "Qwen3NextForCausalLM": _STATES,
    "Qwen3VLForConditionalGeneration": _IMAGES,
    "RecurrentGemmaForCausalLM": _STATES,
    "RwkvForCausalLM": _STATES,
    "SmolLM3ForCausalLM": _SOME_POSITIONS,
    "StableLmForCausalLM": _LAYER_NORMS,
    "Starcoder2ForCausalLM": f"{_LAYER_NORMS}, an MLP without a gate",
}


def check_architecture(config: JsonObject) -> str:
    """Return the architecture, one of ``FAMILIES``.

    Raises: CheckpointError for any other, with what of it the graphs have not, where we know it.
    """
    names = config.get("architectures")
    if names is None:
        model_type = config.get("model_type")
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type] or model_type
    if isinstance(names, list) and len(names) == 1 and names[0] in FAMILIES:
        return str(names[0])
    reasons = [f"{name} has {REASONS[name]}" for name in names if name in REASONS] if isinstance(names, list) else []
    got = "; ".join(filter(None, [json.dumps(names, default=str), *reasons]))
    cure = (
        "choose a supported model, or set engine.backend to tensorrt_llm and engine.route to llmapi, "
        "whose models are TensorRT-LLM's own"
    )
    raise CheckpointError(config.where, f"architectures is one of {', '.join(FAMILIES)}", got, cure)
