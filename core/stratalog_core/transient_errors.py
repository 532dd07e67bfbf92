"""Transient errors of the operating system: no space, no file descriptors, no memory.

They say nothing about the disk, and the caller retries later. Every other ``OSError`` of a write, sync or rename fails the
disk, because the content of the file is then unknown.
"""

from __future__ import annotations

import errno
from typing import Final

_NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_NO_RESOURCES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def is_transient(failure: BaseException) -> bool:
    """Whether the same call may succeed later, with nothing lost in between."""
    return isinstance(failure, OSError) and failure.errno in _NO_SPACE | _NO_RESOURCES


def lacks_resources(failure: BaseException) -> bool:
    """Whether the process lacked a file descriptor or memory: the disk or the client was not accessed."""
    return isinstance(failure, OSError) and failure.errno in _NO_RESOURCES
