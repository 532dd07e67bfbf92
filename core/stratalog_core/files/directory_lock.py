"""Locks a directory or a file against other processes: a file below or beside it, held with ``flock``.

The kernel releases the lock when the process ends, however it ends, so there is no stale lock. The file is never removed: a
lock on a removed file would exclude no other process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from stratalog_core.errors import Conflict

LOCK_FILE: Final = "lock"
_HOLDER_BYTES_MAX: Final = 512


def lock_directory(root: Path) -> Callable[[], None]:
    """Lock ``root`` for this process and return a function that unlocks it. Raises ``Conflict`` or ``OSError``."""
    return _lock(root / LOCK_FILE, root, "directory")


def lock_file(path: Path) -> Callable[[], None]:
    """Lock the file at ``path``, which may not exist yet, by a file beside it. Raises ``Conflict`` or ``OSError``."""
    return _lock(path.with_name(path.name + ".lock"), path, "file")


def _lock(path: Path, locked: Path, kind: str) -> Callable[[], None]:
    """Lock the lock file at ``path``, on behalf of ``locked``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise Conflict(f"{locked} is in use by {holder}: stop that process, or give this one a {kind} of its own") from None
    except OSError:
        os.close(descriptor)
        raise
    # The holder's name is for people: a full disk must not keep a process from starting.
    with contextlib.suppress(OSError):
        name = f"pid {os.getpid()} on host {socket.gethostname()}\n".encode()
        os.pwrite(descriptor, name, 0)
        os.ftruncate(descriptor, len(name))
    return partial(os.close, descriptor)
