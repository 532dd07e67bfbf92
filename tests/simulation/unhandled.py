"""Exceptions that no caller ever sees, and tasks that nothing can wake.

asyncio reports an exception of a task or a future that nobody awaits when the object is freed, which reference cycles postpone
without limit. Here it is reported when nobody has retrieved it between two looks. A task that nothing can wake awaits a future
that only the task itself can reach: its caller waits forever, and a garbage collection would destroy it. Crashed processes are
exempt.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.loop import Process

Awaited = asyncio.Future[Any]


class OwnedFuture(asyncio.Future[Any]):
    """A future that knows the process that made it."""

    __slots__ = ("_unhandled", "process")

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process | None, unhandled: Unhandled) -> None:
        super().__init__(loop=loop)
        self.process = process
        self._unhandled = unhandled

    def set_exception(self, exception: type[BaseException] | BaseException) -> None:
        super().set_exception(exception)
        self._unhandled.add_failed(self)


class Unhandled:
    """All tasks that have not ended, and all futures that have failed since the last look."""

    def __init__(self) -> None:
        # Strong references: a task of a crashed process that was freed early would run its `finally` blocks at a moment that
        # no seed decides.
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self._failed: list[tuple[Awaited, Process | None]] = []
        self._suspects: list[tuple[Awaited, Process | None]] = []

    def add_task(self, task: asyncio.Task[Any], process: Process | None) -> None:
        self._tasks.append((task, process))

    def add_failed(self, future: OwnedFuture) -> None:
        self._failed.append((future, future.process))

    def owner(self, awaited: object) -> Process | None:
        """The process that made ``awaited``; None if that is unknown."""
        if isinstance(awaited, OwnedFuture):
            return awaited.process
        return next((process for task, process in [*self._tasks, *self._suspects] if task is awaited), None)

    def look(self) -> Iterator[tuple[str, BaseException | None]]:
        """What has not been handled since the look before the last, of processes that live: a message and the exception."""
        for awaited, process in self._suspects:
            if awaited._log_traceback and (process is None or process.alive):
                name = awaited.get_name() if isinstance(awaited, asyncio.Task) else "a future"
                owner = process.name if process is not None else "the scenario"
                yield f"nobody handles the failure of {name} of {owner}: {awaited.exception()!r}", awaited.exception()
        ended = [(task, process) for task, process in self._tasks if task.done()]
        self._suspects = [each for each in (*ended, *self._failed) if each[0]._log_traceback]
        self._failed = []
        if ended:
            self._tasks = [(task, process) for task, process in self._tasks if not task.done()]

    def collect_lost_tasks(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Tasks of live processes that nothing can wake. For the end of a run: their ``finally`` blocks run here."""
        owners = {id(task): process.name for task, process in self._tasks if process is not None and process.alive}
        lost: list[str] = []

        def destroyed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            owner = owners.get(id(context.get("task")))
            if owner is not None:
                lost.append(f"{owner} has a task that nothing can wake: {context['task']!r}")

        handler = loop.get_exception_handler()
        loop.set_exception_handler(destroyed)
        self._tasks = [(task, process) for task, process in self._tasks if id(task) not in owners]
        gc.collect()
        loop.set_exception_handler(handler)
        return lost

    def clear(self) -> None:
        """Forget everything, and keep asyncio from reporting it."""
        for awaited, _ in (*self._tasks, *self._failed, *self._suspects):
            awaited._log_traceback = False
        for task, _ in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        self._failed.clear()
        self._suspects.clear()
