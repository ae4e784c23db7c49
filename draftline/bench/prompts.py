"""Prompts to measure with: a file of a user's own, a JSON object with a ``prompt`` in each line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from draftline.bench.timeline import decode_tokens_per_second
from draftline.bench.workloads import Workload
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.errors import DraftlineError
from draftline.triton.chat import ChatTemplate, publish_chat_template


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file of JSON lines; other keys are ignored, so that published sets can be read.

    Raises: DraftlineError for what is no such file, or holds none.
    """
    cure = 'write a line {"prompt": "..."} for each'
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DraftlineError(path, "is a readable file of prompts", str(error), cure) from error
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, IndexError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise DraftlineError(f"{path}:{number}", "holds a prompt", line[:60], cure)
        prompts.append(prompt)
    if not prompts:
        raise DraftlineError(path, "holds prompts", "none", cure)
    return prompts


def render_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """Return each as a user's turn where the model has a chat template, else as it is."""
    if tokenizer.chat_template is None:
        return list(prompts)
    template = ChatTemplate.from_parameters(publish_chat_template(tokenizer))
    return [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]


def prompts_workload(prompts: Sequence[str], batch_size: int, num_tokens: int, num_rounds: int) -> Workload:
    """Decode ``batch_size`` answers together; the rounds take prompts from all over the list, in its order."""
    wanted = batch_size * (num_rounds + 1)  # one round is not counted
    step = max(len(prompts) // wanted, 1)
    spread = [prompts[place * step % len(prompts)] for place in range(wanted)]
    return Workload(
        f"decode, batch {batch_size}",
        "tokens/s",
        batch_size,
        num_tokens,
        lambda number: spread[number * batch_size : (number + 1) * batch_size],
        decode_tokens_per_second,
    )
