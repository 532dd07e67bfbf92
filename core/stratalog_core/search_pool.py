"""Runs searches inside batches outside the event loop, a few at a time, within one memory budget per process.

The queue is bounded. A search whose caller is cancelled ends at its next piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.record_search import FoundInBatch, IsWanted, first_reaching, search_bytes
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Background, Buffer

WAITING_MAX: Final = 1_000
READS_AT_ONCE: Final = 8
_Result = TypeVar("_Result")


class InlineBackground:
    """Runs calls in the calling thread, for programs whose event loop has nothing else to do."""

    async def run(self, call: Callable[[], _Result]) -> _Result:
        return call()

    def close(self) -> None: ...


class SearchPool:
    """One per process. ``background`` limits how many searches run at once, ``bytes_max`` the memory of all of them."""

    def __init__(self, background: Background, bytes_max: int, waiting_max: int = WAITING_MAX) -> None:
        self._background = background
        self._bytes_max = bytes_max
        self._waiting_max = waiting_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.bytes_held = 0
        self.reads = asyncio.Semaphore(READS_AT_ONCE)
        """Held while a batch is read in order to be searched."""

    async def first_reaching(
        self, batch: Buffer, header: BatchHeader, timestamp_ms: int, from_offset: int
    ) -> FoundInBatch | None:
        """Run ``record_search.first_reaching``. Raises ``Overloaded`` if ``waiting_max`` searches are queued."""
        return await self.run(
            search_bytes(batch, header),
            lambda is_wanted: first_reaching(
                batch, header, timestamp_ms, from_offset, is_wanted=is_wanted, memory_bytes=self._bytes_max
            ),
        )

    @property
    def bytes_max(self) -> int:
        """Memory of all searches that run at once."""
        return self._bytes_max

    async def run(self, memory_bytes: int, call: Callable[[IsWanted], _Result]) -> _Result:
        """Run a call that takes up to ``memory_bytes``, and may end early when it is not wanted any more.

        Raises ``Overloaded`` if ``waiting_max`` calls are queued.
        """
        size = min(memory_bytes, self._bytes_max)
        await self._admitted(size)
        is_wanted = True
        search = asyncio.ensure_future(self._background.run(lambda: call(lambda: is_wanted)))
        search.add_done_callback(lambda search: self._ended(search, size))
        try:
            return await asyncio.shield(search)
        finally:
            is_wanted = False

    async def _admitted(self, size: int) -> None:
        """Wait until ``size`` bytes are free, in order of arrival."""
        if not self._waiting and (not self.bytes_held or self.bytes_held + size <= self._bytes_max):
            self.bytes_held += size
            return
        if len(self._waiting) >= self._waiting_max:
            raise Overloaded(f"{len(self._waiting)} searches are waiting, which is the maximum: retry later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(size)
            raise

    def _ended(self, search: asyncio.Future[_Result], size: int) -> None:
        if not search.cancelled():
            search.exception()
        self._free(size)

    def _free(self, size: int) -> None:
        self.bytes_held -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if self.bytes_held and self.bytes_held + wanted > self._bytes_max:
                    return
                self.bytes_held += wanted
                turn.set_result(None)
            self._waiting.popleft()
