"""``python -m draftline.training.prompts NAME``: print a held-out set as JSON lines, for ``bench_speculation``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from draftline.errors import DraftlineError
from draftline.training.prompts.held_out import PACKAGES, load_held_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a set; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="prompts", description=__doc__)
    parser.add_argument("name", choices=sorted(PACKAGES), metavar="NAME", help=" or ".join(sorted(PACKAGES)))
    try:
        for prompt in load_held_out(parser.parse_args(arguments).name):
            print(json.dumps({"name": prompt.name, "prompt": prompt.text}))
    except DraftlineError as error:
        print(f"prompts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
