"""Measure configurations on the GPU of this machine, and keep the fastest.

``python -m draftline.kernels.tuning --heads 32 --kv-heads 8 --head-size 128 --cache DIR`` writes what it finds to
``DIR``; ``load_tuned`` gives it to ``compile_kernels``. Nothing takes it unasked: bits depend on the configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftline.errors import ArtifactError, BuildError, DraftlineError
from draftline.kernels.configurations import candidates, default_configuration
from draftline.kernels.cost import WORKLOADS, Workload
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import source_hash
from draftline.whole_file import replace_file

WHERE = "tuning of kernels"
NUM_CALLS = 20
Measure = Callable[[KernelShape, KernelConfiguration, Workload], float]


def tuning_candidates(shape: KernelShape, architecture: int) -> Iterator[KernelConfiguration]:
    """Yield what is worth measuring: how keys are cut, shorter sections for trees, other tiles, warps and stages."""
    default = default_configuration(shape, architecture)
    yield default
    yield from (each for each in candidates(shape, architecture) if each != default)
    for min_keys_per_row in (8, 16):
        yield replace(default, min_keys_per_row=min_keys_per_row)
    for tile_keys in (32, 64, 128):
        for num_warps, num_stages in ((4, 2), (4, 3), (8, 2)):
            other = replace(default, tile_keys=tile_keys, num_warps=num_warps, num_stages=num_stages)
            if other != default:
                yield other


def tune(
    shape: KernelShape, architecture: int, measure: Measure, workloads: Sequence[Workload] = WORKLOADS
) -> KernelConfiguration:
    """Return the candidate with the least sum, over ``workloads``, of microseconds by those of the fastest.

    A candidate that the GPU cannot run (``measure`` raises BuildError) is left out.
    """
    found: list[tuple[KernelConfiguration, list[float]]] = []
    for candidate in tuning_candidates(shape, architecture):
        try:
            found.append((candidate, [measure(shape, candidate, workload) for workload in workloads]))
        except BuildError:
            continue
    if not found:
        raise BuildError(WHERE, "a configuration runs on this GPU", "none did", "report it with the shape and the GPU")
    fastest = [min(times) for times in zip(*(times for _, times in found), strict=True)]
    return min(found, key=lambda each: sum(time / best for time, best in zip(each[1], fastest, strict=True)))[0]


def tuned_path(shape: KernelShape, architecture: int, cache: Path) -> Path:
    name = "-".join(str(value) for value in asdict(shape).values())
    return cache / f"tuned-sm_{architecture}-{name}.json"


def write_tuned(shape: KernelShape, architecture: int, configuration: KernelConfiguration, cache: Path) -> Path:
    path = tuned_path(shape, architecture, cache)
    cache.mkdir(parents=True, exist_ok=True)
    document = {"source": source_hash(), "configuration": asdict(configuration)}
    with replace_file(path) as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load_tuned(shape: KernelShape, architecture: int, cache: Path) -> KernelConfiguration:
    """Load what was tuned. Raises: ArtifactError where nothing was, or for another version of the kernels."""
    path = tuned_path(shape, architecture, cache)
    cure = "run python -m draftline.kernels.tuning on the machine with the GPU"
    if not path.is_file():
        raise ArtifactError(path, "the configuration was tuned", "no such file", cure)
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["source"] != source_hash():
        raise ArtifactError(path, "was tuned for these kernels", "another version of them", cure)
    return KernelConfiguration(**document["configuration"])


def require_gpu() -> Any:
    """Return torch, or raise BuildError where it sees no NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available():
        cure = "run it on the machine with the GPU; the default configuration needs none"
        raise BuildError(WHERE, "this machine has an NVIDIA GPU", "none", cure)
    return torch


def measure_us(shape: KernelShape, configuration: KernelConfiguration, workload: Workload) -> float:
    """Measure a call on the GPU: the median of ``NUM_CALLS`` calls, each after the cache was written over."""
    from triton.runtime.errors import OutOfResources

    from draftline.kernels.calling import call_attention

    torch = require_gpu()
    inputs = _make_inputs(torch, shape, workload)
    out = inputs["q"].new_empty((len(inputs["q"]), shape.num_heads * shape.head_size))
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(NUM_CALLS + 2):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            call_attention(shape, configuration, inputs, out, scale=shape.head_size**-0.5)
        except OutOfResources as error:
            raise BuildError(WHERE, "the configuration fits the GPU", error, "it is left out") from error
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)))
    return sorted(times[2:])[NUM_CALLS // 2]


def _make_inputs(torch: Any, shape: KernelShape, workload: Workload) -> dict[str, Any]:
    """Make chains behind random committed tokens, blocks in random order."""
    count, nodes = workload.num_sequences, workload.num_nodes
    blocks = -(-workload.context // shape.block_size)
    rows = {"q": shape.num_heads, "k_new": shape.num_kv_heads, "v_new": shape.num_kv_heads}
    pool_shape = (count * blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
    if shape.kv_dtype == "float8_e4m3fn":
        pool = torch.randint(0, 0x7F, pool_shape, dtype=torch.uint8, device="cuda")
    else:
        pool = torch.randn(pool_shape, dtype=getattr(torch, shape.kv_dtype), device="cuda")
    in_step, words = torch.arange(nodes, device="cuda"), -(-nodes // 32)
    mask = (in_step[:, None] >= torch.arange(32 * words, device="cuda")).view(nodes, words, 32).long()
    packed = (mask << torch.arange(32, device="cuda")).sum(-1).to(torch.int32)
    return {
        **{
            name: torch.randn(count * nodes, heads, shape.head_size, device="cuda", dtype=getattr(torch, shape.dtype))
            for name, heads in rows.items()
        },
        "kv_pool": pool,
        "block_table": torch.randperm(count * blocks, device="cuda").view(count, blocks).to(torch.int32),
        "context_lengths": torch.full((count,), workload.context, dtype=torch.int32, device="cuda"),
        "sequence_starts": torch.arange(count + 1, dtype=torch.int32, device="cuda") * nodes,
        "packed_mask": packed.repeat(count, 1),
        "sinks": torch.zeros(shape.num_heads, device="cuda"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftline.kernels.tuning", description=__doc__)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--head-size", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--sinks", action="store_true", help="of a model with sinks in attention")
    parser.add_argument("--cache", type=Path, required=True, help="the folder to write to")
    options = parser.parse_args(arguments)
    try:
        shape = KernelShape(
            options.heads, options.kv_heads, options.head_size, options.block_size, options.dtype, options.kv_dtype,
            options.window, options.softcap, options.sinks,
        )  # fmt: skip
        major, minor = require_gpu().cuda.get_device_capability()
        architecture = 10 * major + minor
        configuration = tune(shape, architecture, measure_us)
        print(write_tuned(shape, architecture, configuration, options.cache), configuration)
    except DraftlineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
