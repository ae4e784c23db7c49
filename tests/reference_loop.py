"""Speculative decoding of one sequence in plain Python: what the runtime must do, written to be obvious."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class ReferenceStep:
    """One draft + verify cycle. ``emitted`` is what of ``accepted`` and ``bonus_token`` became part of the answer."""

    num_drafted: int  # nodes of the tree, without the root
    accepted: list[int]
    bonus_token: int
    emitted: list[int]


@dataclass
class ReferenceAnswer:
    """``token_ids`` = the token that the prompt's prefill draws, then what every step emitted."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[ReferenceStep] = field(default_factory=list)
    finish_reason: str | None = None

    def emit(self, run: Sequence[int], max_tokens: int, end_ids: Collection[int]) -> list[int]:
        """Append a run until the answer ends, before an end id or behind ``max_tokens``; return what was appended."""
        before = len(self.token_ids)
        for token in run:
            if token in end_ids:
                self.finish_reason = "end_id"
                break
            self.token_ids.append(token)
            if len(self.token_ids) == max_tokens:
                self.finish_reason = "max_tokens"
                break
        return self.token_ids[before:]


def reference_loop(
    prompt: Sequence[int],
    target: Callable[[Sequence[int]], int],
    propose: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    max_tokens: int,
    end_ids: Collection[int] = (),
) -> ReferenceAnswer:
    """Decode with drafts: ``target`` says which token follows a text, a pure function of all its tokens;
    ``propose`` gives paths of draft tokens to follow it, which share their beginnings (a path may be empty)."""
    answer = ReferenceAnswer()
    answer.emit([target(prompt)], max_tokens, end_ids)
    while answer.finish_reason is None:
        text = [*prompt, *answer.token_ids]
        # Draft: the tree is the set of all beginnings of all paths; () is the root, the last token of the text.
        tree = {tuple(path[:depth]) for path in [(), *propose(text)] for depth in range(len(path) + 1)}
        # Verify: the target draws a token after every node.
        drawn = {node: target([*text, *node]) for node in tree}
        # Accept: walk while the token that was drawn is a child.
        node: tuple[int, ...] = ()
        while (*node, drawn[node]) in tree:
            node = (*node, drawn[node])
        emitted = answer.emit([*node, drawn[node]], max_tokens, end_ids)
        answer.steps.append(ReferenceStep(len(tree) - 1, list(node), drawn[node], emitted))
    return answer


def plain_loop(
    prompt: Sequence[int], target: Callable[[Sequence[int]], int], max_tokens: int, end_ids: Collection[int] = ()
) -> ReferenceAnswer:
    """Decode without drafts: every step verifies the root alone."""
    return reference_loop(prompt, target, lambda text: [], max_tokens, end_ids)
