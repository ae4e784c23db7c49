"""Write the tokenizer that a GGUF file carries as Hugging Face files.

Source: llama.cpp's byte-level vocabularies (``tokenizer.ggml.model = gpt2``) and, per ``tokenizer.ggml.pre``, the
``tokenizer.json`` of the models they come from. A value that is not in the table is refused: a wrong split would change
token ids silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from draftline.errors import CheckpointError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Split:
    """How a model cuts text before merging. ``pattern`` None = GPT-2's own pattern."""

    pattern: str | None = None
    every_digit: bool = False
    compose: bool = False  # Unicode NFC first
    ignore_merges: bool = False  # a piece that is a token is taken whole
    adds_bos: bool = False  # where tokenizer.ggml.add_bos_token is absent


_LLAMA3 = Split(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_QWEN2 = Split(_QWEN2_SPLIT, compose=True)
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(every_digit=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Key of tokenizer_config.json -> metadata key after tokenizer.ggml.
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_CURE = "use the Hugging Face checkpoint of the same model"


def write_gguf_tokenizer(path: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` into ``directory``.

    Raises:
        CheckpointError: the tokenizer is not a byte-level one of a known kind, or its tables are inconsistent.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(path, "tokenizer.ggml.model is gpt2 (byte-level BPE)", model, _CURE)
    if pre not in SPLITS:
        raise CheckpointError(path, f"tokenizer.ggml.pre is one of {', '.join(SPLITS)}", pre, _CURE)
    tokens, merges, kinds = (
        metadata.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "merges", "token_type")
    )
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens) or any(merge.count(" ") != 1 for merge in merges):
        got = f"{len(tokens)} tokens ({len(set(tokens))} distinct), {len(kinds)} types, {len(merges)} merges"
        raise CheckpointError(path, "tokens are distinct, each with a type, and merges are pairs", got, _CURE)
    special = {
        name: tokens[metadata[f"tokenizer.ggml.{key}"]]
        for name, key in SPECIAL_TOKENS.items()
        if metadata.get(f"tokenizer.ggml.{key}") is not None
    }
    adds = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", SPLITS[pre].adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    tokenizer = _build_tokenizer(SPLITS[pre], tokens, merges, kinds)
    before = [special["bos_token"]] if adds["add_bos_token"] else []
    after = [special["eos_token"]] if adds["add_eos_token"] else []
    if before or after:
        around = [(token, tokens.index(token)) for token in before + after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=around,
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special, **adds}
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(directory / "tokenizer_config.json", settings)
    names = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "pad_token_id": "pad_token"}
    ids = {key: tokens.index(special[name]) for key, name in names.items() if name in special}
    _write_json(directory / "generation_config.json", ids)


def _build_tokenizer(split: Split, tokens: list[str], merges: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.ignore_merges))
    if split.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.every_digit else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    by_kind = {
        kind: [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in _of_kind(tokens, kinds, kind)]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(by_kind[_CONTROL])
    tokenizer.add_tokens(by_kind[_USER_DEFINED])
    return tokenizer


def _of_kind(tokens: list[str], kinds: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
