"""A semaphore that admits waiting tasks in batches, so that the requests which they send leave together."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class BatchedSemaphore:
    """A semaphore of ``at_once`` places. Waiting tasks are admitted when a quarter of the places is free.

    A plain semaphore hands over each place by itself. The tasks get out of step, and requests that are batched by turns of the
    event loop travel alone. A quarter and not all places, because slow tasks must not hold up those that wait.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._inside < self._at_once and not self._waiting:
            self._inside += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        free = self._at_once - self._inside
        if free < min(len(self._waiting), max(self._at_once // 4, 1)):
            return
        while self._waiting and self._inside < self._at_once:
            admitted = self._waiting.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self._inside += 1
