"""Part ``speed``: tokens a second of the engines, with and without speculation and CUDA graphs."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from draftline.bench.gpu.engines import ENGINES, engine_path
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.texts import with_cuda_graphs
from draftline.bench.rounds import measure_rounds
from draftline.bench.systems import InProcessSystem
from draftline.bench.workloads import decode_workload
from draftline.generation import open_engine
from draftline.sessions.engine_config import load_engine_config

BATCH_SIZES, NUM_TOKENS, NUM_ROUNDS = (1, 8, 16), 128, 2
ENGINES_MEASURED = tuple(engine for engine in ENGINES if engine.dtype != "float32")


def check_speed(call: PartCall) -> None:
    """Nothing is compared. Prefill is left out of the numbers, tokenizer and runtime are in them."""
    for engine in ENGINES_MEASURED:
        directory = engine_path(call.output, engine.name)
        for has_graphs in (True, False):
            config = with_cuda_graphs(load_engine_config(directory), has_graphs)
            with ExitStack() as stack:
                loaded = stack.enter_context(open_engine(directory, config))
                systems = [InProcessSystem(loaded, "plain", speculate=False)]
                if config.drafts:
                    systems.append(InProcessSystem(loaded, "EAGLE-3"))
                for batch_size in BATCH_SIZES:
                    if call.is_over:
                        return
                    workload = decode_workload(batch_size, NUM_TOKENS)
                    for one in measure_rounds(systems, [workload], NUM_ROUNDS, lambda line: None, learns=True):
                        what = f"{engine.name}: {one.system}, batch {batch_size}"
                        what += ", CUDA graphs" if has_graphs else ", no CUDA graphs"
                        note = f"{NUM_ROUNDS} rounds, {min(one.values):.1f} to {max(one.values):.1f}"
                        call.tell(Finding(what, statistics.median(one.values), "tokens/s", note=note))
