"""How many files and connections this process may have open: as many as the system lets it, without being asked.

A shell's soft limit is 1,024 on many systems, for programs that still use select(2); the hard limit is what the
administrator means. A broker takes one for each client, a bookie one for each log file and connection.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 512
"""File descriptors of a broker beside its clients: other roles, the object store, the cold cache, libraries."""
_log = logging.getLogger(__name__)


def raise_open_files() -> int:
    """Raise the soft limit to the hard one; how many may be open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems allow less than they say (macOS has a second limit): then it stays as it was.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files_max()


def open_files_max() -> int:
    """How many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31 - 1


def connections_within(wanted: int, open_files: int) -> int:
    """As many of ``wanted`` client connections as there is room for: the next is refused by us, not by the system."""
    room = max(open_files - min(OWN_FILES, open_files // 2), 1)
    if room < wanted:
        text = (
            "connections_max is %d and the process may open %d files: %d clients at most are let in; raise it with `ulimit -Hn`"
        )
        _log.warning(text, wanted, open_files, room)
    return min(wanted, room)
