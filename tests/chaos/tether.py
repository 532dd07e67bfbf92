"""Ties a process to its parent: when the parent ends in any way, this process is killed, even while it is stopped.

``python -m chaos.tether COMMAND …`` becomes the command, tied. The kernel watches the thread that started the process, so that
thread must live as long as the process should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
PARENT: Final = "STRATALOG_CHAOS_PARENT"
"""Environment variable: pid of the expected parent."""


def tether() -> None:
    """Have the kernel kill this process when its parent ends. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != int(os.environ[PARENT]):
        # The parent ended before this process was tied to it.
        sys.exit(1)


def tethered(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command``, tied to the process that ``tether_environment`` names."""
    return [sys.executable, "-m", "chaos.tether", *command]


def tether_environment() -> dict[str, str]:
    """Return this process's environment, for a process that is tied to it."""
    return {**os.environ, PARENT: str(os.getpid())}


if __name__ == "__main__":
    tether()
    os.execvp(sys.argv[1], sys.argv[1:])
