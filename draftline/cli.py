"""The command line. No logic: it reads arguments, calls one function, prints what that returns."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import draftline
from draftline.errors import DraftlineError

OVERRIDES = "values to replace, such as engine.weights_dtype=int8"
STAGE_NAMES = "convert, check, build, package, smoke"
TRAINING_STEPS = "convert, answers, train, export, measure"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 = done, 2 = an error was printed, 130 = interrupted."""
    arguments = _parse(argv)
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
        return status
    except DraftlineError as error:
        for line in str(error).splitlines():
            print(f"draftline: {line}", file=sys.stderr)
    except BrokenPipeError:  # the reader of a pipe had enough; what is left to flush goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"draftline: {_describe(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("draftline: interrupted", file=sys.stderr)
        return 130
    return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``; overrides may stand on both sides of an option, which argparse alone does not allow."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    strangers = rest if "overrides" not in arguments else [word for word in rest if word.startswith("-")]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _describe(error: OSError) -> str:
    where = error.filename if error.filename is not None else "a file"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    rule, cure = (
        ("the disk has room", "free some") if full else ("can be read and written", "check it and its permissions")
    )
    return f"{where}: {rule}; got {error.strerror or error}; {cure}"


def _validate(arguments: argparse.Namespace) -> int:
    from draftline.config import load_pipeline
    from draftline.stages.architectures import check_architectures

    check_architectures(load_pipeline(arguments.file, arguments.overrides), arguments.file.parent)
    print(f"{arguments.file}: valid")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from draftline.checkpoints.show import describe_checkpoint, is_checkpoint
    from draftline.config import load_pipeline
    from draftline.config.reference import write_reference
    from draftline.config.writing import pipeline_text
    from draftline.share import share_path

    if arguments.fields:
        print(write_reference(), end="")
    elif arguments.pipelines:
        print(*sorted(share_path("pipelines").glob("*.yaml")), sep="\n")
    elif is_checkpoint(str(arguments.file)):
        print(*describe_checkpoint(str(arguments.file), arguments.target, arguments.overrides), sep="\n")
    else:
        print(pipeline_text(load_pipeline(arguments.file, arguments.overrides)), end="")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from draftline.config import load_pipeline
    from draftline.config.writing import pipeline_text
    from draftline.stages.progress import Progress
    from draftline.stages.runner import run_pipeline

    pipeline = load_pipeline(arguments.file, arguments.overrides)
    output = arguments.output or Path("builds", pipeline.name)
    reports = run_pipeline(
        pipeline,
        output,
        root=arguments.file.parent,
        until=arguments.until,
        dry_run=arguments.dry_run,
        progress=Progress(quiet=arguments.dry_run),
    )
    if arguments.dry_run:
        print(pipeline_text(pipeline))
        for report in reports:
            print(f"{report.stage}: {'current' if report.reason is None else f'would run: {report.reason}'}")
    elif arguments.until is None:
        print(f"draftline serve {output}")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from draftline.config import load_pipeline
    from draftline.stages.progress import Progress
    from draftline.training.steps import check_packages

    pipeline = load_pipeline(arguments.file, arguments.overrides)
    check_packages()
    from draftline.training.train import train_draft

    report = train_draft(
        pipeline,
        arguments.output or Path("builds", pipeline.name),
        root=arguments.file.parent,
        until=arguments.until,
        progress=Progress(),
    )
    where = None if report.draft is None else f"the draft is in {report.draft}"
    for text in filter(None, (report.course, report.acceptance, where)):
        print(text)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from draftline.triton.server import serve

    return serve(
        arguments.build,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
    )


def _generate(arguments: argparse.Namespace) -> int:
    from draftline.triton.generate import allows_colour, generate

    return generate(
        arguments.prompt,
        url=arguments.url,
        raw=arguments.raw,
        show_acceptance=arguments.show_acceptance,
        use_colour=allows_colour(sys.stdout, os.environ),
        out=sys.stdout,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop_words=arguments.stop,
        bad_words=arguments.bad_words,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        min_tokens=arguments.min_tokens,
        speculate=arguments.speculate,
        max_draft_tokens=arguments.max_draft_tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftline",
        description="Build and serve language models from one YAML file.",
        epilog="Start: draftline run pipelines/smollm2-135m.yaml && draftline serve builds/smollm2-135m; "
        'then, in another terminal: draftline generate "Why is the sky blue?"',
    )
    parser.add_argument("--version", action="version", version=f"draftline {draftline.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("validate", help="check a pipeline file, reporting every problem at once")
    _add_pipeline(command)
    command.set_defaults(command=_validate)

    command = commands.add_parser(
        "show", help="print a pipeline with its defaults, what a checkpoint is, the fields, or the shipped pipelines"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a pipeline file, or a checkpoint")
    command.add_argument("--target", metavar="CHECKPOINT", help="what a checkpoint of a draft is compared with")
    what.add_argument("--fields", action="store_true", help="print the reference of all fields")
    what.add_argument("--pipelines", action="store_true", help="print where the pipeline files of this package are")
    command.add_argument("overrides", nargs="*", metavar="block.key=value", help=OVERRIDES)
    command.set_defaults(command=_show)

    command = commands.add_parser("run", help="convert, check, build, package and try a pipeline")
    _add_pipeline(command)
    command.add_argument("--until", metavar="STAGE", help=f"the last stage to run: {STAGE_NAMES}")
    command.add_argument("--dry-run", action="store_true", help="say what would run and why, and write nothing")
    command.add_argument("--output", type=Path, metavar="DIR", help="the build directory (default: builds/<name>)")
    command.set_defaults(command=_run)

    command = commands.add_parser("train", help="train the draft that a pipeline's train block describes")
    _add_pipeline(command)
    command.add_argument("--until", metavar="STEP", help=f"the last step to take: {TRAINING_STEPS}")
    command.add_argument("--output", type=Path, metavar="DIR", help="the build directory (default: builds/<name>)")
    command.set_defaults(command=_train)

    command = commands.add_parser("serve", help="start the Triton server on a build directory")
    command.add_argument("build", type=Path, metavar="BUILD", help="a build directory, such as builds/smollm2-135m")
    for name in ("http", "grpc", "metrics"):
        command.add_argument(f"--{name}-port", type=int, metavar="PORT", help="default: the pipeline's")
    command.set_defaults(command=_serve)

    command = commands.add_parser("generate", help="stream an answer from a server")
    command.add_argument("prompt", metavar="PROMPT")
    command.add_argument("--url", default="127.0.0.1:8001", help="the server's gRPC address (default: %(default)s)")
    command.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    command.add_argument("--temperature", type=float, metavar="T", help="0 = greedy, the default")
    command.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    command.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens of mass P")
    command.add_argument("--seed", type=int, metavar="SEED", help="the same seed gives the same answer")
    command.add_argument(
        "--stop", nargs="+", action="extend", default=[], metavar="WORD", help="end before any of these"
    )
    command.add_argument(
        "--bad-words", nargs="+", action="extend", default=[], metavar="WORD", help="never write any of these"
    )
    command.add_argument("--repetition-penalty", type=float, metavar="X", help="1 = off, the default")
    command.add_argument("--presence-penalty", type=float, metavar="X", help="0 = off, the default")
    command.add_argument("--frequency-penalty", type=float, metavar="X", help="0 = off, the default")
    command.add_argument("--min-tokens", type=int, metavar="N", help="do not end before so many tokens")
    command.add_argument(
        "--speculate",
        action=argparse.BooleanOptionalAction,
        help="whether to draft tokens (default: as the server does); the answer is the same",
    )
    command.add_argument("--max-draft-tokens", type=int, metavar="N", help="draft at most so many tokens per step")
    command.add_argument("--show-acceptance", action="store_true", help="mark the tokens that were drafted")
    command.add_argument("--raw", action="store_true", help="send the prompt as it is, without the chat template")
    command.set_defaults(command=_generate)
    return parser


def _add_pipeline(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="a pipeline file, such as pipelines/smollm2-135m.yaml")
    command.add_argument("overrides", nargs="*", metavar="block.key=value", help=OVERRIDES)
