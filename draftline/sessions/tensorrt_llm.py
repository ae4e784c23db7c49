"""The command that builds an engine with TensorRT-LLM up to 1.2.1, as one table.

Source: ``trtllm-build --help`` of TensorRT-LLM (``commands/build.py``), and the recipes of its Medusa and EAGLE
examples.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftline.errors import BuildError

PROGRAM = "trtllm-build"
CURE = "run it where TensorRT-LLM up to 1.2.1 is, such as a Triton container up to 26.07"
OWN_ENGINE = "tensorrt_llm-engine"  # beside the stages' directories: where build.sh leaves what the user builds
SPECULATIVE_DECODING_MODES = {"medusa": "medusa", "eagle1": "eagle"}

_LAST_LINES = 5  # of the log, in the message of a build that failed


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for. ``num_draft_tokens``: those of a step, 0 without a draft.

    Without chunked prefill, which TensorRT-LLM does not have beside EAGLE, a prompt fits in a step.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    block_size: int
    method: Literal["medusa", "eagle1"] | None = None
    num_draft_tokens: int = 0

    @property
    def chunks_prefill(self) -> bool:
        return self.method is None

    @property
    def max_input_len(self) -> int:
        longest = self.max_seq_len - 1
        return longest if self.chunks_prefill else min(longest, self.max_num_tokens)


def build_flags(limits: EngineLimits, dtype: str, world_size: int) -> dict[str, str]:
    """Return the options of ``trtllm-build`` but for the two directories."""
    flags = {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "tokens_per_block": limits.block_size,
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "use_paged_context_fmha": "enable",
        "gpt_attention_plugin": dtype,
        "gemm_plugin": dtype,
        "workers": world_size,
    }
    if limits.method is not None:
        flags["speculative_decoding_mode"] = SPECULATIVE_DECODING_MODES[limits.method]
        flags["max_draft_len"] = limits.num_draft_tokens
    return {name: str(value) for name, value in flags.items()}


def build_script(flags: dict[str, str]) -> str:
    """Return a script beside the checkpoint's folder: ``build.sh [ENGINE_DIRECTORY]``."""
    options = " ".join(f"--{name} {value}" for name, value in flags.items())
    lines = [
        "#!/bin/sh",
        f"# Builds the engine with TensorRT-LLM up to 1.2.1: build.sh [ENGINE_DIRECTORY]; {CURE}.",
        "set -eu",
        'here=$(cd -- "$(dirname -- "$0")" && pwd)',
        f'exec {PROGRAM} --checkpoint_dir "$here/../checkpoint" --output_dir "${{1:-$here/../{OWN_ENGINE}}}" {options}',
    ]
    return "\n".join(lines) + "\n"


def find_builder() -> str | None:
    """Return the path of ``trtllm-build``, None where it is not on PATH."""
    return shutil.which(PROGRAM)


def run_builder(builder: str, checkpoint: Path, engine: Path, flags: dict[str, str]) -> None:
    """Build an engine of the folder ``checkpoint`` into ``engine``; what the program says is in ``engine/build.log``.

    Raises: BuildError where the program fails, with its last lines.
    """
    options = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [builder, "--checkpoint_dir", str(checkpoint), "--output_dir", str(engine), *options]
    log_file = engine / "build.log"
    with log_file.open("wb") as log:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code != 0:
        told = " / ".join(log_file.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])
        rule = f"{PROGRAM} builds an engine of {checkpoint}"
        raise BuildError(
            PROGRAM, rule, f"exit code {code}: {told}", "read what it says, and its version's release notes"
        )
