"""What TensorRT-LLM's PyTorch backend reads: published checkpoints as they are, checked here before it loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.convert import check_tied_head
from draftline.checkpoints.drafts.eagle import read_eagle3
from draftline.checkpoints.drafts.vocabulary import check_same_vocabulary
from draftline.checkpoints.dtypes import check_convertible_dtype
from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.json_object import load_json
from draftline.checkpoints.names import check_tensors
from draftline.checkpoints.quantized.recognition import is_read
from draftline.checkpoints.quantized.stated import find_quantization
from draftline.checkpoints.source_tensor import SourceCheckpoint
from draftline.checkpoints.trtllm import CONFIG_FILE, config_values, parse_config, write_json
from draftline.errors import CheckpointError

_LAYERS = "captured_layers"


@dataclass(frozen=True)
class Published:
    """A target, and the layers of it whose outputs an EAGLE-3 head reads (0-based)."""

    target: CheckpointConfig
    captured_layers: tuple[int, ...] = ()


def check_published(target: Path, draft: Path | None, method: str | None, dtype: str, destination: Path) -> Published:
    """Check a target and a draft (``eagle3``, ``draft_model`` or ``ngram``, which has none) as conversion would.

    What the stages after it need is written into the folder ``destination``: the configuration and the tokenizer.

    Raises:
        CheckpointError: one is no Hugging Face folder, lacks tensors or has others, or the two do not fit together.
    """
    check_convertible_dtype(dtype, "target.dtype")
    checkpoint = _open(target, dtype)
    found = Published(checkpoint.config, _check_draft(target, checkpoint.config, draft, method, dtype))
    checkpoint.write_tokenizer(destination)
    write_json(destination / CONFIG_FILE, config_values(found.target) | {_LAYERS: list(found.captured_layers)})
    return found


def load_published(directory: Path) -> Published:
    """Read what ``check_published`` wrote. Raises: CheckpointError where a file is missing or wrong."""
    raw = load_json(directory / CONFIG_FILE)
    return Published(parse_config(raw), raw.integers(_LAYERS))


def _check_draft(
    target_folder: Path, target: CheckpointConfig, draft: Path | None, method: str | None, dtype: str
) -> tuple[int, ...]:
    if draft is None:
        return ()
    if method == "draft_model":
        check_same_vocabulary(target_folder, draft, target, _open(draft, dtype).config)
        return ()
    if not draft.is_dir():
        raise CheckpointError(draft, "the draft checkpoint is a folder", "no such folder", "correct the path")
    return read_eagle3(draft, target, dtype).config.captured_layers


def _open(folder: Path, dtype: str) -> SourceCheckpoint:
    if not (folder / CONFIG_FILE).is_file():
        rule = "TensorRT-LLM's PyTorch backend reads Hugging Face folders"
        cure = "give the folder that it was converted from, or set engine.route to trtllm_build"
        raise CheckpointError(folder, rule, "another checkpoint", cure)
    stated = find_quantization(folder, load_json(folder / CONFIG_FILE))
    if stated is not None and not is_read(stated):  # TensorRT-LLM says itself which others it reads
        return open_huggingface(folder, dtype, as_stored=True)
    checkpoint = open_huggingface(folder, dtype)
    check_tensors(checkpoint.config, checkpoint.tensors, checkpoint.where)
    check_tied_head(checkpoint)
    return checkpoint
