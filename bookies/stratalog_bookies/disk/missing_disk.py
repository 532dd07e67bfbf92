"""Stands in for a disk that cannot be used: it is empty, and every read or write of it raises an error."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NoReturn

from stratalog_core.ports import File


class MissingFiles:
    """Implements :class:`stratalog_core.ports.Files` by refusing; its directories are empty."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def lock(self) -> Callable[[], None]:
        return lambda: None

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        self._refuse()

    def read(self, path: str) -> bytes:
        self._refuse()

    def write_atomic(self, path: str, content: bytes) -> None:
        self._refuse()

    def exists(self, path: str) -> bool:
        return False

    def list(self, directory: str) -> list[str]:
        return []

    def rename(self, source: str, target: str) -> None:
        self._refuse()

    def remove(self, path: str) -> None:
        self._refuse()

    def make_directory(self, path: str) -> None:
        """Creates nothing."""

    def sync_directory(self, path: str) -> None:
        self._refuse()

    def free_bytes(self) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise OSError(errno.ENODEV, self._reason)
