"""``python tests/spare_time.py COMMAND …`` becomes a command that runs while all other processes leave a processor idle."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Replace this process by the command, in a session of its own: the kernel may share processors by session first."""
    with suppress(OSError):  # It leads a group already.
        os.setsid()
    with suppress(OSError, AttributeError):  # The system does not have the policy.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # The kernel shares processors among processes only.
        Path("/proc/self/autogroup").write_text("19")
    os.nice(19)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
