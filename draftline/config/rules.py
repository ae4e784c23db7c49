"""Rules that tie fields of a pipeline together, as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """``holds`` is asked with the values of ``fields``, the first of which is to blame; texts may name values."""

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    rule: str
    cure: str


@dataclass(frozen=True)
class BrokenRule:
    field: str
    rule: str
    got: str
    cure: str


RULES = (
    Rule(
        ("kv_cache.max_blocks", "kv_cache.block_size", "engine.max_seq_len"),
        lambda max_blocks, block_size, max_seq_len: max_blocks * block_size >= max_seq_len,
        "max_blocks * block_size holds one request of engine.max_seq_len {2} tokens",
        "raise kv_cache.max_blocks or lower engine.max_seq_len to max_blocks * block_size",
    ),
    Rule(
        ("engine.max_num_tokens", "engine.max_batch_size"),
        lambda max_num_tokens, max_batch_size: max_num_tokens >= max_batch_size,
        "a step holds one token of each of engine.max_batch_size {1} requests",
        "set engine.max_num_tokens to {1} or more",
    ),
    Rule(
        ("serve.grpc_port", "serve.http_port"),
        lambda grpc_port, http_port: grpc_port != http_port,
        "differs from serve.http_port",
        "choose another port",
    ),
    Rule(
        ("serve.metrics_port", "serve.http_port", "serve.grpc_port"),
        lambda metrics_port, http_port, grpc_port: metrics_port not in (http_port, grpc_port),
        "differs from serve.http_port {1} and serve.grpc_port {2}",
        "choose another port",
    ),
    Rule(
        ("draft.checkpoint", "draft.method"),
        lambda checkpoint, method: (checkpoint is None) == (method == "ngram"),
        "is given, except with method ngram, which has no weights",
        "add the draft's checkpoint, or remove it from a {1} draft that needs none",
    ),
    Rule(
        ("tree", "draft"),
        lambda tree, draft: tree is None or draft is not None,
        "stands beside a draft block only",
        "remove tree, or add draft",
    ),
    Rule(
        ("tree.max_depth", "tree.max_nodes"),
        lambda max_depth, max_nodes: max_depth < max_nodes,
        "a path of max_depth tokens and the root fit in tree.max_nodes {1}",
        "lower tree.max_depth or raise tree.max_nodes",
    ),
    Rule(
        ("tree.max_nodes", "engine.max_num_tokens"),
        lambda max_nodes, max_num_tokens: max_nodes <= max_num_tokens,
        "one tree fits in a step of engine.max_num_tokens {1}",
        "lower tree.max_nodes or raise engine.max_num_tokens",
    ),
)


def broken_rules(values: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield the rules that ``values`` (dotted names) break; a rule with an absent field is not asked."""
    for rule in RULES:
        if not all(field in values for field in rule.fields):
            continue
        arguments = [values[field] for field in rule.fields]
        if not rule.holds(*arguments):
            got = "nothing" if arguments[0] is None else arguments[0]
            got = "a block" if rule.fields[0] == "tree" else got
            yield BrokenRule(rule.fields[0], rule.rule.format(*arguments), str(got), rule.cure.format(*arguments))
