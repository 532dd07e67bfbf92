"""A disk that completes nothing, and reports no error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stratalog_core.ports import File, Files


class HangingFiles:
    """Hangs until ``works`` is set, in the calls for which ``hangs`` is true of their name."""

    def __init__(self, files: Files, hangs: Callable[[str], bool] = lambda name: True) -> None:
        self._files = files
        self._hangs = hangs
        self.works = threading.Event()
        self.works.set()

    def __getattr__(self, name: str) -> Any:
        return self.waiting(name, getattr(self._files, name))

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> HangingFile:
        return HangingFile(self.waiting("open", self._files.open)(path, create=create, direct=direct), self)

    def waiting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*arguments: Any, **named: Any) -> Any:
            if self._hangs(name):
                self.works.wait()
            return call(*arguments, **named)

        return wait_and_call


class HangingFile:
    """Threads write and read it: the kernel's transfers would not hang."""

    def __init__(self, file: File, disk: HangingFiles) -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        if name.startswith("begin_"):
            raise AttributeError(name)
        return self._disk.waiting(name, getattr(self._file, name))
