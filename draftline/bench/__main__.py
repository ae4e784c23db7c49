"""``python -m draftline.bench BUILD...``: the decode benchmark."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from draftline.bench.decode import QUICK, Settings, run_decode_bench
from draftline.bench.report import import_matplotlib, write_report, write_table
from draftline.errors import DraftlineError


def main() -> int:
    """Run the benchmark; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__)
    parser.add_argument("builds", type=Path, nargs="+", metavar="BUILD", help="build directories of one target")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where bench.json and bench.png go")
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it work, roughly how fast")
    arguments = parser.parse_args()
    try:
        import_matplotlib()
        arguments.output.mkdir(parents=True, exist_ok=True)
        settings = QUICK if arguments.quick else Settings()
        report = run_decode_bench(
            arguments.builds, settings, lambda line: print(line, file=sys.stderr, flush=True), arguments.output
        )
        write_report(report, arguments.output)
    except DraftlineError as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 2
    print(write_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
