"""Exceptions that no caller ever sees, and tasks that nothing can wake.

A task's exception is reported if nobody has retrieved it between two checks. A future's exception is reported when the future
is freed unread; those in reference cycles are freed by a collection at the end. The same collection destroys tasks that nothing
can wake, because only the task itself can reach the future that it awaits: its caller would wait forever. Crashed processes are
exempt.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world.loop import Process


class NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its number: a set of tasks has the same order in every run, wherever they are in memory."""

    __slots__ = ("number",)

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **kwargs: Any) -> None:
        self.number = number
        super().__init__(coroutine, **kwargs)

    def __hash__(self) -> int:
        return self.number


class OwnedFuture(asyncio.Future[Any]):
    """A future that knows the process that made it; it hashes by its number, as a ``NumberedTask`` does."""

    __slots__ = ("number", "process")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop, process: Process | None) -> None:
        self.number = number
        super().__init__(loop=loop)
        self.process = process

    def __hash__(self) -> int:
        return self.number


class Unhandled:
    """All tasks that have not ended."""

    def __init__(self) -> None:
        # Strong references: if a crashed process's task were freed early, its `finally` blocks would run at a moment that the
        # seed does not determine.
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self._suspects: list[tuple[asyncio.Task[Any], Process | None]] = []

    def add_task(self, task: asyncio.Task[Any], process: Process | None) -> None:
        self._tasks.append((task, process))

    def look(self) -> Iterator[tuple[str, BaseException | None]]:
        """Yield the failures of live processes' tasks that are unretrieved since the last call: a message and the exception."""
        for task, process in self._suspects:
            if task._log_traceback and (process is None or process.alive):
                owner = process.name if process is not None else "the scenario"
                yield f"nobody handles the failure of {task.get_name()} of {owner}: {task.exception()!r}", task.exception()
        self._suspects = [(task, process) for task, process in self._tasks if task.done() and task._log_traceback]
        self._tasks = [(task, process) for task, process in self._tasks if not task.done()]

    def collect(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Free all unreachable objects; return messages about live processes' lost tasks and futures. Call at a run's end."""
        owners = {id(task): process for task, process in self._tasks if process is not None and process.alive}
        lost: list[str] = []

        def freed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            what = context.get("task") or context.get("future")
            owner = what.process if isinstance(what, OwnedFuture) else owners.get(id(what))
            if owner is not None and owner.alive:
                lost.append(f"{context['message']} In {owner.name}: {what!r}")

        self._tasks = [(task, process) for task, process in self._tasks if id(task) not in owners]
        handler = loop.get_exception_handler()
        loop.set_exception_handler(freed)
        gc.collect()
        loop.set_exception_handler(handler)
        return lost

    def clear(self) -> None:
        """Forget all tasks, and keep asyncio from reporting them."""
        for task, _ in (*self._tasks, *self._suspects):
            task._log_traceback = False
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.clear()
        self._suspects.clear()
