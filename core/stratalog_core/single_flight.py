"""Single flight: equal loads that are asked for at the same time run once.

A load can be waited for with a time limit. A caller that reaches it gets ``Unavailable``, and the load goes on for the
retry. A caller that is cancelled cancels the load, unless another caller waits for it or has waited for it in vain.
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
    """What is being loaded, by key. Results are not kept here: the load itself puts them where they belong."""

    def __init__(self) -> None:
        self._running: dict[Key, _Load[Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._running

    def __len__(self) -> int:
        return len(self._running)

    def start(self, key: Key, load: Callable[[], Awaitable[Value]], *, keep: bool) -> _Load[Value]:
        """Begin to load ``key`` unless that is under way. ``keep``: nobody's cancellation ends it."""
        running = self._running.get(key)
        if running is None:
            running = _Load(asyncio.ensure_future(_awaited(load)))
            self._running[key] = running
            running.task.add_done_callback(lambda task: self._ended(key, task))
        running.keep = running.keep or keep
        return running

    async def get(
        self, key: Key, load: Callable[[], Awaitable[Value]], timeout_s: float | None = None, *, keep: bool = False
    ) -> Value:
        """The loaded value. Raises what the load raises, or ``Unavailable`` after ``timeout_s`` (None: no limit)."""
        running = self.start(key, load, keep=keep)
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
            raise Unavailable(f"{key} is not loaded yet; it goes on loading: ask again")
        if running.task.cancelled():
            raise Unavailable(f"loading {key} was given up: ask again")
        return running.task.result()

    def abandon(self, key: Key) -> None:
        """Stop loading ``key`` if nobody waits for it or has waited for it."""
        running = self._running.get(key)
        if running is not None and not running.waiters and not running.keep:
            self._give_up(key, running)

    def _give_up(self, key: Key, running: _Load[Value]) -> None:
        # Out of the table at once: a caller that asks now must not join a load that is being cancelled.
        if self._running.get(key) is running:
            del self._running[key]
        running.task.cancel()

    def _ended(self, key: Key, task: asyncio.Task[Value]) -> None:
        if self._running.get(key) is not None and self._running[key].task is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # A load that nobody waits for may fail unseen: a caller meets the failure itself.

    async def close(self) -> None:
        """Cancel everything and wait until it has ended."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(load: Callable[[], Awaitable[Value]]) -> Value:
    return await load()
