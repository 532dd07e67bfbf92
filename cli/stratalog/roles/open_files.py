"""Raises this process's limit of open files and connections to the hard limit.

The soft limit is 1,024 on many systems, for programs that still use select(2); the hard limit is the administrator's choice.
A broker needs one file per client, a bookie one per log file and connection.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 512
"""File descriptors that a broker needs besides its clients': other roles, the object store, the cold cache, libraries."""
_log = logging.getLogger(__name__)


def raise_open_files() -> int:
    """Raise the soft limit to the hard one and return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems allow less than the hard limit (macOS has a second limit). The soft limit then stays.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files_max()


def open_files_max() -> int:
    """Return how many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31 - 1


def connections_within(wanted: int, open_files: int) -> int:
    """Return ``wanted`` client connections, or fewer if ``open_files`` is too small, so that the broker refuses the excess."""
    room = max(open_files - min(OWN_FILES, open_files // 2), 1)
    if room < wanted:
        text = (
            "connections_max is %d, but the process may open only %d files: it accepts at most %d clients;"
            " raise the limit with `ulimit -Hn`"
        )
        _log.warning(text, wanted, open_files, room)
    return min(wanted, room)
