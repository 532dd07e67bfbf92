"""Single flight: concurrent loads of one key run once.

A caller may wait with a time limit. At the limit it gets ``Unavailable`` and the load continues, for the retry. A cancelled
caller cancels the load, unless another caller waits for it or has waited until its time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from stratalog_core.errors import Unavailable

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Load(Generic[Value]):
    __slots__ = ("keep", "task", "waiters")

    def __init__(self, task: asyncio.Task[Value]) -> None:
        self.task = task
        self.waiters = 0
        self.keep = False


class SingleFlight(Generic[Key, Value]):
    """Loads in progress, by key. Results are not kept here: the load itself stores them."""

    def __init__(self) -> None:
        self._running: dict[Key, _Load[Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    def __len__(self) -> int:
        return len(self._running)

    def running(self, key: Key) -> asyncio.Task[Value] | None:
        """Return the load of ``key`` that is in progress; None if there is none."""
        running = self._running.get(key)
        return None if running is None else running.task

    def start(self, key: Key, load: Callable[[], Awaitable[Value]], *, keep: bool) -> asyncio.Task[Value]:
        """Start to load ``key`` unless a load is in progress. ``keep``: the load is not cancelled with its callers."""
        return self._begin(key, load, keep=keep).task

    def _begin(self, key: Key, load: Callable[[], Awaitable[Value]], *, keep: bool) -> _Load[Value]:
        running = self._running.get(key)
        # A load that has just ended may still be there: a caller that awaits it in a loop would never yield to the event loop.
        if running is None or running.task.done():
            running = _Load(asyncio.ensure_future(_awaited(load)))
            self._running[key] = running
            running.task.add_done_callback(lambda task: self._ended(key, task))
        running.keep = running.keep or keep
        return running

    async def get(
        self, key: Key, load: Callable[[], Awaitable[Value]], timeout_s: float | None = None, *, keep: bool = False
    ) -> Value:
        """Return the loaded value. Raises what the load raises, or ``Unavailable`` after ``timeout_s`` (None: no limit)."""
        running = self._begin(key, load, keep=keep)
        running.waiters += 1
        try:
            await asyncio.wait({running.task}, timeout=None if timeout_s is None else max(0.0, timeout_s))
        except asyncio.CancelledError:
            if running.waiters == 1 and not running.keep:
                self._give_up(key, running)
            raise
        finally:
            running.waiters -= 1
        if not running.task.done():
            running.keep = True
            raise Unavailable(f"{key} is not loaded yet; loading continues: retry")
        if running.task.cancelled():
            raise Unavailable(f"loading {key} was cancelled: retry")
        return running.task.result()

    def abandon(self, key: Key) -> None:
        """Cancel the load of ``key``, unless a caller waits for it or has waited for it."""
        running = self._running.get(key)
        if running is not None and not running.waiters and not running.keep:
            self._give_up(key, running)

    def _give_up(self, key: Key, running: _Load[Value]) -> None:
        # Removed at once: a new caller must not join a load that is being cancelled.
        if self._running.get(key) is running:
            del self._running[key]
        running.task.cancel()

    def _ended(self, key: Key, task: asyncio.Task[Value]) -> None:
        if self._running.get(key) is not None and self._running[key].task is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # Mark the exception as retrieved: a load without callers may fail silently.

    async def close(self) -> None:
        """Cancel all loads and wait until they have ended."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(load: Callable[[], Awaitable[Value]]) -> Value:
    return await load()
