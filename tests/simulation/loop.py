"""An event loop without a machine: time stands still while callbacks run and jumps to the next timer when none is ready.

Every callback belongs to the process (see :class:`Process`) in whose context it was scheduled. When a process has crashed,
its callbacks are dropped: its tasks just never go on, as after ``kill -9``, and no ``finally`` of theirs runs.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack, cast

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
SHORTEST_WAIT_S = 1e-6
MAXIMUM_TURNS_WITHOUT_TIME = 200_000


class SimulationStuck(Exception):
    """Nothing is ready, no timer is set and the simulation is not over; or time has stopped moving."""


class Process:
    """One incarnation of a simulated process. ``alive`` goes false at its crash and never comes back.

    While it is stopped, as by SIGSTOP or a suspended machine, ``held`` keeps what it would have run.
    """

    __slots__ = ("alive", "held", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.held: list[tuple[_Guarded, tuple[Any, ...]]] | None = None


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated_process", default=None)


class _Guarded:
    """A callback that runs only while its process does. ``handle`` says whether a held one was cancelled meanwhile."""

    __slots__ = ("callback", "context", "handle", "loop", "process")

    def __init__(self, loop: SimulatedLoop, callback: Callable[..., object], context: Context) -> None:
        self.loop = loop
        self.callback = callback
        self.context = context
        self.process = context.get(CURRENT)
        self.handle: asyncio.Handle | None = None

    def __call__(self, *args: Any) -> None:
        process = self.process
        if process is not None:
            if not process.alive:
                return
            if process.held is not None:
                process.held.append((self, args))
                return
        self.loop.count_turn()
        self.callback(*args)

    def again(self, args: tuple[Any, ...]) -> None:
        """The process goes on: run what was held, unless it was cancelled before its turn came."""
        if self.handle is None or not self.handle.cancelled():
            self(*args)


class _Selector(Protocol):
    def select(self, timeout: float | None) -> list[Any]: ...
    def close(self) -> None: ...


class _JumpingSelector:
    """Instead of waiting for sockets, moves the loop's clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise SimulationStuck("every task waits and no timer is set")
        self._loop.advance(timeout)
        return []

    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.BaseEventLoop):
    """``turns`` counts callbacks that have run: with the seed it names every point of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._selector: _Selector = _JumpingSelector(self)
        self._now = 0.0
        self._turns_at_this_time = 0
        self.turns = 0
        self.is_over = False
        self.abandoned: list[asyncio.Task[Any]] = []
        self.streams: Any = None
        self._clock_resolution = 1e-9
        self.stuck: SimulationStuck | None = None
        self.set_exception_handler(self._stop_when_stuck)
        self.set_task_factory(cast(Any, self._make_task))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds > 0:
            self._now += seconds
            self._turns_at_this_time = 0

    def call_soon(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_over:
            return asyncio.Handle(callback, args, self, context)
        guarded = _Guarded(self, callback, context or contextvars.copy_context())
        guarded.handle = super().call_soon(cast(Any, guarded), *args, context=guarded.context)
        return guarded.handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        # However short a wait, time moves: a clock that runs slower than the loop's would be waited for in steps of nothing.
        when = max(when, self._now + SHORTEST_WAIT_S)
        guarded = _Guarded(self, callback, context or contextvars.copy_context())
        handle = super().call_at(when, cast(Any, guarded), *args, context=guarded.context)
        guarded.handle = handle
        return handle

    def stop_process(self, process: Process) -> None:
        """Nothing of it runs until ``continue_process``; time goes on."""
        process.held = process.held if process.held is not None else []

    def continue_process(self, process: Process) -> None:
        """What came meanwhile runs now, in the order in which it came."""
        held, process.held = process.held or [], None
        for guarded, args in held:
            super().call_soon(guarded.again, args, context=guarded.context)

    def count_turn(self) -> None:
        self.turns += 1
        self._turns_at_this_time += 1
        if self._turns_at_this_time > MAXIMUM_TURNS_WITHOUT_TIME:
            raise SimulationStuck(f"{MAXIMUM_TURNS_WITHOUT_TIME} callbacks ran and time did not move")

    def _stop_when_stuck(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio would log it and go on."""
        if isinstance(context.get("exception"), SimulationStuck):
            self.stuck = cast(SimulationStuck, context["exception"])
            self.stop()
        else:
            self.default_exception_handler(context)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result], **kwargs: Any
    ) -> asyncio.Task[Result]:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        # Tasks of crashed processes are kept: collected early, their `finally` blocks would run at a moment no seed decides.
        self.abandoned.append(task)
        return task

    def finish(self) -> None:
        """The simulation is over: what is left is forgotten, and what its tasks do while they are collected has no effect."""
        self.is_over = True
        for task in self.abandoned:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.abandoned.clear()
        self.set_exception_handler(lambda loop, context: None)

    def run_as(self, process: Process | None, call: Callable[..., Result], *args: Any) -> Result:
        """Call with every callback that it schedules belonging to ``process``."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        return context.run(call, *args)

    def deliver_as(self, process: Process | None, call: Callable[..., object], *args: Any) -> None:
        """Something reaches ``process`` from outside: ``call`` now, or when it goes on."""
        if process is None or process.held is None:
            self.run_as(process, call, *args)
            return
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        process.held.append((_Guarded(self, call, context), args))

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        factory, host, port = args
        return await self.streams.create_server(factory, host, port)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
