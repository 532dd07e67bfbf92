"""A semaphore that admits waiting tasks in batches, so that their requests are sent together."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class BatchedSemaphore:
    """A semaphore with ``at_once`` slots that admits waiting tasks when a quarter of the slots is free.

    A plain semaphore passes on each slot separately: the tasks get out of step, and requests that are batched per turn of the
    event loop are sent one by one. Waiting for all slots instead of a quarter would let slow tasks delay the waiting ones.
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
