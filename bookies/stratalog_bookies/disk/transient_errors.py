"""Errors of the operating system that pass by themselves: no space, no file descriptors, no memory. Pure.

They say nothing about the disk: whoever meets one puts its work off and tries again. Every other ``OSError`` of a write, a
sync or a rename retires the disk, for what it holds afterwards is unknown.
"""

from __future__ import annotations

import errno
from typing import Final

_NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_NO_RESOURCES: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def is_transient(failure: BaseException) -> bool:
    """Whether the same call may succeed later, with nothing lost in between."""
    return isinstance(failure, OSError) and failure.errno in _NO_SPACE | _NO_RESOURCES


def lacks_resources(failure: BaseException) -> bool:
    """Whether the process lacked a file descriptor or memory: it could not even look at the disk."""
    return isinstance(failure, OSError) and failure.errno in _NO_RESOURCES
