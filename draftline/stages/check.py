"""check: what converted checkpoints must be before an engine is built from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.known_positions import known_positions
from draftline.errors import CheckpointError, RequestError
from draftline.stages import build
from draftline.stages.gpu import gpu_inputs
from draftline.stages.stage import Stage, StageCall
from draftline.stages.tensorrt_llm import is_tensorrt_llm, load_target

if TYPE_CHECKING:
    from draftline.checkpoints.llmapi import Published
    from draftline.checkpoints.tokenizer import Tokenizer
    from draftline.config import Pipeline
    from draftline.sessions.tensorrt.network_check import NetworkReport
    from draftline.stages.check_drafts import DraftReport
    from draftline.stages.perplexity import PerplexityReport

PLAIN_TEXT = "The quick brown fox jumps over 13 lazy dogs."
WIDE_TEXT = "naïve café, 東京, 🙂"
NETWORK_SETTINGS = (
    "engine.compute_capabilities",
    "kv_cache.block_size",
    "tree.kind",
    "tree.choices",
    "tree.max_nodes",
    "tree.top_k",
)


@dataclass(frozen=True)
class CheckResult:
    """``keeps_wide_text``: accents, CJK and emoji survive the tokenizer. ``has_chat_template``: and it renders.

    ``perplexity``: None where ``check.perplexity`` leaves it out. ``network``: of engines on a GPU; None where
    ``check.network`` leaves it out.
    """

    architecture: str
    max_position_embeddings: int
    vocab_size: int
    keeps_wide_text: bool
    has_chat_template: bool
    drafts: tuple[DraftReport, ...]
    perplexity: PerplexityReport | None
    network: tuple[NetworkReport, ...] | None


def run(call: StageCall) -> CheckResult:
    """Check limits, tokenizer and drafts against the model, measure its perplexity, and write ``report.json``."""
    from draftline.checkpoints.tokenizer import load_tokenizer
    from draftline.checkpoints.trtllm import load_checkpoint_config
    from draftline.sessions.batch_split import count_parameters
    from draftline.stages.check_drafts import check_drafts, write_no_choice
    from draftline.stages.check_perplexity import check_perplexity
    from draftline.stages.gpu import check_network, pool_scales

    checkpoint = call.build_directory / "checkpoint"
    is_ours = not is_tensorrt_llm(call.pipeline)  # else the network is the vendor's
    target = load_checkpoint_config(checkpoint) if is_ours else load_target(call)
    tokenizer = load_tokenizer(checkpoint)
    where = call.pipeline.target.checkpoint
    limit = check_length(num_positions(where, target), call.pipeline.engine.max_seq_len)
    if isinstance(target, CheckpointConfig):
        for line in describe_factors(target.rotary_scaling, call.pipeline.engine.max_seq_len):
            call.say(line)
    check_tokenizer(where, tokenizer, target.vocab_size)
    drafts: tuple[DraftReport, ...] = ()
    perplexity, network = None, None
    if isinstance(target, CheckpointConfig) and is_ours:
        scales = pool_scales(call, call.advance)
        token_ids = tokenizer.encode(PLAIN_TEXT + WIDE_TEXT)
        network = check_network(call, checkpoint, count_parameters(target), token_ids, scales)
        drafts = check_drafts(call, checkpoint, target, tokenizer)
        perplexity = check_perplexity(call, checkpoint, target, tokenizer, scales)
    else:
        write_no_choice(call)  # convert has checked the draft
    result = CheckResult(
        target.architecture,
        limit,
        target.vocab_size,
        keeps_wide_text=_round_trip(tokenizer, WIDE_TEXT) == WIDE_TEXT,
        has_chat_template=check_chat_template(where, tokenizer),
        drafts=drafts,
        perplexity=perplexity,
        network=network,
    )
    (call.destination / "report.json").write_text(json.dumps(asdict(result), indent=2) + "\n", "utf-8")
    return result


def check_heads(where: str, config: CheckpointConfig) -> None:
    """Raise CheckpointError where the query heads do not divide among the key/value heads."""
    if config.num_attention_heads % config.num_key_value_heads:
        rule = "num_attention_heads is a multiple of num_key_value_heads"
        got = f"{config.num_attention_heads} and {config.num_key_value_heads}"
        raise CheckpointError(where, rule, got, "correct its config.json")


def num_positions(where: str, target: CheckpointConfig | Published) -> int:
    """Return how many positions a model knows, its rotary scaling included. Raises: as ``check_heads``."""
    if isinstance(target, CheckpointConfig):
        check_heads(where, target)
        return known_positions(target.max_position_embeddings, target.rotary_scaling)
    return target.num_positions


def check_length(limit: int, max_seq_len: int) -> int:
    """Return the positions that the model knows. Raises: CheckpointError where ``max_seq_len`` is more."""
    if max_seq_len > limit:
        rule = f"the model knows {limit} positions"
        cure = f"lower engine.max_seq_len to {limit}, or use a checkpoint with rope_scaling"
        raise CheckpointError("engine.max_seq_len", rule, max_seq_len, cure)
    return limit


def describe_factors(scaling: Mapping[str, Any] | None, max_seq_len: int) -> Iterator[str]:
    """Say which of longrope's two lists of factors all texts of the engine have, as its limit chooses."""
    if scaling is not None and scaling["rope_type"] == "longrope":
        original = int(scaling["original_max_position_embeddings"])
        if max_seq_len > original:
            yield (
                f"longrope turns by the factors of texts beyond {original} tokens, as engine.max_seq_len is "
                f"{max_seq_len}; where no text is longer set it to {original}"
            )
        else:
            text = f"longrope turns by the factors of texts within {original} tokens"
            yield f"{text}, as engine.max_seq_len is {max_seq_len}"


def check_tokenizer(where: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise CheckpointError where the tokenizer makes ids the model does not know, or loses plain text."""
    cure = "use the tokenizer.json the model was trained with"
    largest = max(tokenizer.encode(PLAIN_TEXT + WIDE_TEXT))
    if largest >= vocab_size:
        raise CheckpointError(where, f"token ids are below the vocabulary's {vocab_size}", largest, cure)
    text = _round_trip(tokenizer, PLAIN_TEXT)
    if text != PLAIN_TEXT:
        raise CheckpointError(where, f"the tokenizer gives back the text {PLAIN_TEXT!r}", repr(text), cure)


def check_chat_template(where: str, tokenizer: Tokenizer) -> bool:
    """Return whether there is a chat template. Raises: CheckpointError where it does not render one message."""
    if tokenizer.chat_template is None:
        return False
    rule, cure = "the chat template renders a user's message", "correct chat_template in tokenizer_config.json"
    try:
        text = tokenizer.render_chat([{"role": "user", "content": PLAIN_TEXT}])
    except RequestError as error:
        raise CheckpointError(where, rule, error.got, cure) from error
    if PLAIN_TEXT not in text:
        raise CheckpointError(where, rule, repr(text), cure)
    return True


def _round_trip(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip()


def machine(pipeline: Pipeline) -> Mapping[str, str]:
    """Return the kernels that perplexity and acceptance are measured with, and what the network check follows from."""
    if is_tensorrt_llm(pipeline):
        return {}
    measures_acceptance = bool(pipeline.draft) and pipeline.check.acceptance != "never"
    kernels = build.machine(pipeline) if pipeline.check.perplexity != "never" or measures_acceptance else {}
    return {**kernels, **gpu_inputs(pipeline, NETWORK_SETTINGS)}


STAGE = Stage(
    name="check",
    directory="check",
    run=run,
    settings=(
        "engine.backend",
        "engine.kernels",
        "engine.weights_dtype",
        "engine.max_seq_len",
        "kv_cache.dtype",
        "draft.method",
        "tree.max_depth",
        "check.acceptance",
        "check.perplexity",
        "check.network",
    ),
    needs=("convert",),
    packages=("tokenizers", "jinja2", "numpy", "onnx", "onnxruntime"),
    modules=("draftline.stages.check",),
    shared=("plugins",),
    machine=machine,
)
