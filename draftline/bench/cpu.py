"""``python -m draftline.bench.cpu BUILD``: the CPU engine against the floor, openvino-genai and transformers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftline.bench import cpu_decode, cpu_steps
from draftline.bench.cpu_decode import DRAFTLINE, OPENVINO, TRANSFORMERS, Case, Floor, Say
from draftline.bench.cpu_engines import EngineShape, Precision, build_bench_engine, count_kv_bytes, count_weight_bytes
from draftline.bench.cpu_report import draw_cpu_report, write_cpu_table
from draftline.bench.cpu_systems import DraftlineSystem, OpenVinoSystem, TokenSystem, TransformersTokens
from draftline.bench.machine import describe_machine
from draftline.bench.openvino_model import PIP_LINE, write_openvino_model
from draftline.bench.openvino_reference import OpenVinoReference, describe_defaults
from draftline.bench.report import Report, import_matplotlib, write_report
from draftline.bench.rounds import Measurement, Ratio, compute_ratio
from draftline.bench.workloads import PROMPTS
from draftline.errors import DraftlineError
from draftline.generation import load_engine
from draftline.sessions.engine_config import PoolDtype, load_engine_config
from draftline.sessions.native_kernels import Kernels, instruction_set, why_not_native
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

SECTIONS = ("decode", "curve", "attention", "profile")
PRECISIONS: tuple[Precision, ...] = ("float32", "int8")
CURVE_CONTEXT, CURVE_GOAL, CURVE_GOAL_ROWS = 256, 1.4, 8
# Batch, context, dtype of the pool, and how many times the graph without attention the whole one may take.
ATTENTION_CASES: tuple[tuple[int, int, PoolDtype, float], ...] = (
    (16, 1024, "float32", 2.0),
    (16, 1024, "float16", 1.6),
    (1, 256, "float32", 1.15),
)
_AGREEMENT = "tokens that are those of transformers, up to the first that is not"


@dataclass(frozen=True)
class Settings:
    """``num_tokens`` by context. Larger batches of context tokens than the limits are cut, and named in the table."""

    sections: tuple[str, ...] = SECTIONS
    num_rounds: int = 4
    batch_sizes: tuple[int, ...] = (1, 4, 8, 16, 32)
    num_tokens: dict[int, int] = field(default_factory=lambda: {64: 24, 512: 16, 2048: 10})
    max_context_tokens: int = 16 * 2048
    max_transformers_tokens: int = 8 * 2048
    num_answers: int = 8
    num_answer_tokens: int = 32
    num_step_rounds: int = 7
    row_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    num_profiled_forwards: int = 20


QUICK = Settings(
    num_rounds=2,
    batch_sizes=(1, 8),
    num_tokens={64: 16, 512: 8},
    num_answers=2,
    num_step_rounds=2,
    row_counts=(1, 8),
    num_profiled_forwards=5,
)


class Bench:
    """One run over the converted checkpoint of a build; ``folder`` holds engines and models meanwhile."""

    def __init__(self, checkpoint: Path, settings: Settings, say: Say, folder: Path) -> None:
        self._checkpoint, self._settings, self._say, self._folder = checkpoint, settings, say, folder
        self._kernels: Kernels = "onnxruntime" if instruction_set() is None else "native"
        self._measurements: list[Measurement] = []
        self._ratios: list[Ratio] = []
        self._findings: dict[str, dict[str, float]] = {}
        self._notes: list[str] = []

    def run(self) -> Report:
        machine = describe_machine()
        if self._kernels != "native":
            self._note(f"no native kernels ({why_not_native()}): ONNX Runtime's operators were measured")
        sections: dict[str, Callable[[], None]] = {
            "decode": self._decode,
            "curve": self._curve,
            "attention": self._attention,
            "profile": self._profile,
        }
        for name in self._settings.sections:
            self._say(f"section: {name}")
            sections[name]()
        return Report(
            machine,
            asdict(self._settings),
            tuple(self._measurements),
            tuple(self._ratios),
            self._findings,
            HOW_TO_READ,
            tuple(self._notes),
        )

    def _note(self, line: str) -> None:
        self._notes.append(line)
        self._say(line)

    def _engine(
        self, name: str, precision: Precision, kernels: Kernels, shape: EngineShape, pool: PoolDtype = "float32"
    ) -> Path:
        folder = self._folder / name
        if not folder.exists():
            build_bench_engine(self._checkpoint, folder, precision, kernels, shape, pool)
        return folder

    def _decode(self) -> None:
        settings = self._settings
        num_tokens = settings.num_tokens
        cases = [Case(size, context, num_tokens[context]) for context in num_tokens for size in settings.batch_sizes]
        too_large = [case.name for case in cases if case.num_context_tokens > settings.max_context_tokens]
        if too_large:
            self._note(f"cut for all systems: {'; '.join(too_large)} (prefilling alone would take minutes)")
            cases = [case for case in cases if case.name not in too_large]
        with ExitStack() as stack:
            systems, floors, vocab_size, texts = self._open_systems(stack, cases)
            self._findings[_AGREEMENT] = cpu_decode.compare_answers(
                systems, texts, settings.num_answer_tokens, TRANSFORMERS
            )
            for name, share in self._findings[_AGREEMENT].items():
                goal = 1.0 if name == f"{DRAFTLINE} float32" else None
                self._ratios.append(Ratio("greedy answers", name, TRANSFORMERS, (share,), goal))
            for system in systems:
                cut = [case.name for case in cases if case.num_context_tokens > system.max_context_tokens]
                if cut:
                    self._note(f"{system.name} was cut: {'; '.join(cut)} (it would take minutes)")
            prompts = cpu_decode.write_prompts(max(settings.batch_sizes), max(num_tokens), vocab_size)
            measured = cpu_decode.measure_decoding(systems, floors, cases, prompts, settings.num_rounds, self._say)
        self._measurements += measured
        self._ratios += cpu_decode.compare_decoding(measured, cases)

    def _open_systems(
        self, stack: ExitStack, cases: Sequence[Case]
    ) -> tuple[list[TokenSystem], list[Floor], int, list[list[int]]]:
        limit = self._settings.max_context_tokens
        tokens = max(case.batch_size * (case.context + case.num_tokens) for case in cases)
        longest = max(case.context + case.num_tokens for case in cases)
        # Every prompt stays whole, the longest context of each of them.
        shape = EngineShape(max(case.batch_size for case in cases), longest + 64, tokens)
        systems: list[TokenSystem] = []
        floors = []
        for precision in PRECISIONS:
            pool: PoolDtype = "float16" if precision == "int8" and self._kernels == "native" else "float32"
            engine = self._engine(f"decode-{precision}", precision, self._kernels, shape, pool)
            loaded = stack.enter_context(load_engine(engine))
            systems.append(DraftlineSystem(loaded, f"{DRAFTLINE} {precision}", limit))
            floors.append(Floor(precision, count_weight_bytes(engine), count_kv_bytes(loaded.config)))
            self._note(f"{DRAFTLINE} {precision}: {self._kernels} kernels, {pool} keys and values")
        systems += self._open_openvino(shape, limit)
        systems.append(TransformersTokens(self._checkpoint, TRANSFORMERS, self._settings.max_transformers_tokens))
        texts = [loaded.tokenizer.encode(text) for text in PROMPTS[: self._settings.num_answers]]
        return systems, floors, loaded.config.model.vocab_size, texts

    def _open_openvino(self, shape: EngineShape, limit: int) -> list[TokenSystem]:
        missing = [name for name in ("openvino_genai", "nncf") if importlib.util.find_spec(name) is None]
        if missing:
            self._note(f"{OPENVINO} was not measured: {', '.join(missing)} not installed; {PIP_LINE}")
            return []
        self._note(
            f"{OPENVINO} float32: all in float32; int8: nncf's int8 weights, else its defaults here, "
            f"{describe_defaults()}"
        )
        systems: list[TokenSystem] = []
        for precision in PRECISIONS:
            folder = self._folder / f"openvino-{precision}"
            folder.mkdir()
            write_openvino_model(self._checkpoint, folder, int8=precision == "int8")
            reference = OpenVinoReference(
                folder,
                float32=precision == "float32",
                num_threads=len(os.sched_getaffinity(0)),
                max_batch_size=shape.max_batch_size,
                cache_gib=self._cache_gib(shape),
            )
            systems.append(OpenVinoSystem(reference, f"{OPENVINO} {precision}", limit))
        return systems

    def _cache_gib(self, shape: EngineShape) -> int:
        """Of float32 keys and values, with room for what answers leave."""
        config = load_engine_config(self._folder / "decode-float32")
        return -(-int(1.5 * shape.max_context_tokens * count_kv_bytes(config)) // 2**30)

    def _curve(self) -> None:
        settings = self._settings
        shape = EngineShape(16, 2048, 2048)
        kinds: list[Kernels] = ["native", "onnxruntime"] if self._kernels == "native" else ["onnxruntime"]
        for precision in PRECISIONS:
            with ExitStack() as stack:
                sessions = {}
                for kernels in kinds:
                    engine = self._engine(f"steps-{precision}-{kernels}", precision, kernels, shape)
                    config = load_engine_config(engine)
                    session = OnnxRuntimeSession(engine, config)
                    stack.callback(session.close)
                    cpu_steps.fill_pool(session, config)
                    sessions[f"{kernels} {precision}"] = session
                steps = {
                    _rows_title(rows): cpu_steps.make_step(config, 1, rows, CURVE_CONTEXT)
                    for rows in settings.row_counts
                }
                measured = cpu_steps.measure_steps(sessions, steps, settings.num_step_rounds, self._say)
            self._measurements += measured
            self._ratios += [ratio for name in sessions for ratio in self._curve_ratios(measured, name)]

    def _curve_ratios(self, measured: Sequence[Measurement], name: str) -> list[Ratio]:
        one = next(m for m in measured if m.system == name and m.workload == _rows_title(1))
        ratios = []
        for rows in self._settings.row_counts[1:]:
            title = _rows_title(rows)
            many = next(m for m in measured if m.system == name and m.workload == title)
            values = tuple(a / b for a, b in zip(many.values, one.values, strict=True))
            goal = CURVE_GOAL if name == "native float32" and rows == CURVE_GOAL_ROWS else None
            ratios.append(Ratio(title, name, "of one token", values, goal, at_most=True))
        return ratios

    def _attention(self) -> None:
        if self._kernels != "native":
            self._note("attention was not measured apart: it is one operator with native kernels only")
            return
        for index, (size, context, pool, goal) in enumerate(ATTENTION_CASES):
            shape = EngineShape(size, context + 64, size * (context + 64))
            engine = self._engine(f"attention-{index}", "float32", "native", shape, pool)
            config = load_engine_config(engine)
            whole, without = f"{pool} pool", f"{pool} pool, no attention"
            with ExitStack() as stack:
                session = OnnxRuntimeSession(engine, config)
                stack.callback(session.close)
                cut = cpu_steps.open_without_attention(engine, self._folder / f"attention-{index}-cut")
                stack.callback(cut.close)
                cpu_steps.fill_pool(session, config)
                title = f"forward, batch {size}, context {context}"
                steps = {title: cpu_steps.make_step(config, size, 1, context)}
                sessions = {whole: session, without: cut}
                measured = cpu_steps.measure_steps(sessions, steps, self._settings.num_step_rounds, self._say)
            self._measurements += measured
            self._ratios.append(compute_ratio(measured, title, whole, without, goal, at_most=True))

    def _profile(self) -> None:
        shape = EngineShape(16, 2048, 16 * 640)
        for precision in PRECISIONS:
            engine = self._engine(f"profile-{precision}", precision, self._kernels, shape)
            config = load_engine_config(engine)
            for size in (1, 16):
                title = f"profile: {precision}, batch {size}, context 512 (ms of a forward)"
                step = cpu_steps.make_step(config, size, 1, 512)
                self._say(title)
                self._findings[title] = cpu_steps.profile_step(
                    engine, step, self._settings.num_profiled_forwards, self._folder
                )


def _rows_title(num_rows: int) -> str:
    return f"step of {num_rows} tokens, batch 1, context {CURVE_CONTEXT}"


HOW_TO_READ = """\
Decode speeds leave the prefill out: contexts are prefilled once and kept by each system's prefix cache (transformers:
by copies of its keys and values), and speeds count the tokens of the whole batch from the moment when every answer has
its first token until the first answer has its last. Contexts are random tokens, the same for all systems; all decode
greedily. Every round measures all systems one after another, in a turning order; a ratio divides numbers of the same
round. Numbers are the median over the rounds, with the lowest and the highest in brackets; a goal is met where the
median reaches it. "floor": the weights that every step reads and the keys and values of all live tokens, over the read
bandwidth measured right before and right after (their mean; the C library's memchr in one thread per core over 0.5 GiB,
best of five passes). "step of N tokens": one sequence, all its tokens sampled, as in verification. "no attention": the
same graph whose attention operators return their queries. Profiles are ONNX Runtime's own, which slows what it
watches."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="bench_cpu", description=__doc__)
    parser.add_argument("build", type=Path, metavar="BUILD", help="build directory of the target, float32")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where bench.json and bench.png go")
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it work, roughly how fast")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of %(default)s, with commas")
    options = parser.parse_args(arguments)
    try:
        sections = tuple(options.sections.split(","))
        if unknown := set(sections) - set(SECTIONS):
            rule = f"are some of {', '.join(SECTIONS)}"
            raise DraftlineError("--sections", rule, ", ".join(sorted(unknown)), "name sections with commas")
        import_matplotlib()
        report = run_cpu_bench(
            options.build,
            Settings(sections) if not options.quick else _quick(sections),
            lambda line: print(line, file=sys.stderr, flush=True),
            options.output,
        )
        write_report(report, options.output, draw_cpu_report)
    except DraftlineError as error:
        print(f"bench_cpu: {error}", file=sys.stderr)
        return 2
    print(write_cpu_table(report))
    return 0


def _quick(sections: tuple[str, ...]) -> Settings:
    return Settings(**{**vars(QUICK), "sections": sections})


def run_cpu_bench(build: Path, settings: Settings, say: Say, output: Path) -> Report:
    """Measure the converted float32 checkpoint of a build; engines stand in ``output`` until the end.

    Raises: DraftlineError where a system cannot be built or answers wrongly; whatever loading raises.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix="engines-") as folder:
        return Bench(build / "checkpoint", settings, say, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main())
