"""A program: ``python die_with_parent.py PID PROGRAM ARGUMENT...`` becomes PROGRAM, which dies when process PID does.

A step of its own rather than ``preexec_fn``, which is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # survives exec
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
