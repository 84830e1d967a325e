"""Run commands of the shell at the same time: the first writes as it goes, what others wrote comes whole at the end.

python scripts/beside.py "make a" "make b"

The exit code is that of the first in the list that failed. All of them end with this process.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack

_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(commands: list[str]) -> int:
    """Run them; returns the exit code of the first that failed, or 0."""
    with ExitStack() as stack:
        later = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands[1:]]
        children = [
            # exec: a signal reaches the command, and not only a shell around it
            subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], stdout=out, stderr=out, preexec_fn=_die_with_parent)
            for command, out in zip(commands, [None, *later], strict=True)
        ]
        codes = [child.wait() for child in children]
        for out in later:
            out.seek(0)
            sys.stdout.buffer.write(out.read())
            sys.stdout.flush()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
