"""Blocking calls of one disk: a share of the bookie's threads, so that a disk that hangs takes none from the other disks.

Calls for which a client waits can be given up while they are in progress. A call that was given up keeps its thread until it
ends: nothing can stop it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from stratalog_core.errors import StorageFailed
from stratalog_core.ports import Background

Result = TypeVar("Result")


class DiskCalls:
    """At most ``calls_max`` calls are in progress at a time. Implements :class:`stratalog_core.ports.Background`."""

    def __init__(self, background: Background, calls_max: int) -> None:
        self._background = background
        self._calls_max = calls_max
        self._threads = 0
        self._queued: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._in_progress: dict[int, Callable[[], None]] = {}
        self._last_number = 0
        self._refusal = ""

    @property
    def oldest(self) -> int | None:
        """Number of the call in progress that began first; None if there is none."""
        return next(iter(self._in_progress), None)

    def check(self) -> None:
        """Raise ``StorageFailed`` between ``give_up`` and ``resume``."""
        if self._refusal:
            raise StorageFailed(self._refusal, read_only=False)

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        """Raises ``StorageFailed`` as ``check`` does, and from the returned future if the call is given up."""
        self.check()
        waiting: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queued.append((waiting, call))
        self._start()
        return waiting

    def begin(self, give_up: Callable[[], None]) -> int:
        """Count a call that the kernel makes. Returns the number to pass to ``end``."""
        self._last_number += 1
        self._in_progress[self._last_number] = give_up
        return self._last_number

    def end(self, number: int) -> None:
        del self._in_progress[number]

    def give_up(self, reason: str) -> None:
        """Fail those that wait for calls, and refuse more until ``resume``."""
        self._refusal = reason
        queued, self._queued = self._queued, deque()
        for waiting, _ in queued:
            self._fail(waiting)
        for fail in list(self._in_progress.values()):
            fail()

    def resume(self) -> None:
        self._refusal = ""

    def close(self) -> None:
        """The threads belong to the bookie."""

    def _start(self) -> None:
        while self._queued and self._threads < self._calls_max:
            waiting, call = self._queued.popleft()
            if not waiting.done():
                job = asyncio.ensure_future(self._background.run(call))
                self._threads += 1
                job.add_done_callback(partial(self._ended, self.begin(partial(self._fail, waiting)), waiting))

    def _fail(self, waiting: asyncio.Future[Any]) -> None:
        if not waiting.done():
            waiting.set_exception(StorageFailed(self._refusal, read_only=False))

    def _ended(self, number: int, waiting: asyncio.Future[Any], job: asyncio.Future[Any]) -> None:
        self._threads -= 1
        self.end(number)
        if job.cancelled():
            waiting.cancel()
        elif (failure := job.exception()) is not None:
            if not waiting.done():
                waiting.set_exception(failure)
        elif not waiting.done():
            waiting.set_result(job.result())
        self._start()
