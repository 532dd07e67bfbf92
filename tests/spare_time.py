"""``python tests/spare_time.py COMMAND …`` becomes a command that runs while all other processes leave a processor idle."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Replace this process by the command, in a session of its own: the kernel may share processors by session first."""
    with suppress(PermissionError):  # It leads a group already.
        os.setsid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # Kernels without groups of sessions lack the file.
        Path("/proc/self/autogroup").write_text("19")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
