"""An event loop in simulated time: time stands still while callbacks run and jumps to the next timer when none is ready.

Every callback belongs to the process (see :class:`Process`) in whose context it was scheduled. After a process has crashed, its
callbacks are dropped: its tasks never resume, as after ``kill -9``, and none of their ``finally`` blocks runs. No failure goes
unnoticed: an exception that leaves a callback ends the run (``failure``), and so does every exception or task that
``unhandled.py`` finds.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, cast

from simulation.world.unhandled import NumberedTask, OwnedFuture, Unhandled

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
SHORTEST_WAIT_S: Final = 1e-6
MAXIMUM_TURNS_PER_S: Final = 200_000
"""Callbacks within a simulated second. The busiest second of a scenario has a tenth."""
LOOK_S: Final = 1.0


class SimulationStuck(Exception):
    """Nothing is ready, no timer is set and the simulation is not over; or time has stopped moving."""


class FailedInBackground(Exception):
    """A failure with no caller to receive it: in a callback, in a task that nobody awaits, or only in a log line."""


class Process:
    """One incarnation of a simulated process. ``alive`` becomes false at its crash and stays so.

    While the process is stopped, as by SIGSTOP or a suspended machine, ``held`` keeps its callbacks.
    """

    __slots__ = ("_context", "alive", "context", "fuse", "held", "is_special", "name", "on_fuse")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.held: list[_Handle] | None = None
        self.fuse = 0
        """The number of callbacks that may still run before ``on_fuse`` is called; 0: unlimited."""
        self.on_fuse: Callable[[], None] = _nothing
        self.is_special = False
        """True if the process is not simply alive: the loop must check its state before it runs a callback."""
        self._context = contextvars.Context()
        self._context.run(CURRENT.set, self)
        self.context: Callable[[], Context] = self._context.copy
        """Returns a fresh context whose callbacks belong to this process."""

    def end(self) -> None:
        """Mark the process as crashed."""
        self.alive = False
        self.is_special = True

    def light_fuse(self, callbacks: int, on_fuse: Callable[[], None]) -> None:
        """Call ``on_fuse`` before the ``callbacks``-th callback from now; 0: never."""
        self.fuse, self.on_fuse = callbacks, on_fuse
        self.is_special = True


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated_process", default=None)


class _Handle(asyncio.TimerHandle):
    """A callback that runs only while its process does. Written for speed: a run schedules a hundred thousand of them."""

    __slots__ = ("process",)

    def __init__(  # The base class would ask the loop for its debug mode.
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, when: float, process: Process | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self._cancelled = False
        self.process = process

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def __repr__(self) -> str:
        return f"<{self._callback!r} at {self._when}>"


class SimulatedLoop(asyncio.BaseEventLoop):
    """``turns`` counts the callbacks that have run: with the seed it identifies every point of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._handles: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self.unhandled = Unhandled()
        self._task_numbers = itertools.count()
        self._next_look = LOOK_S
        self._last_turn = MAXIMUM_TURNS_PER_S
        self.turns = 0
        self.is_over = False
        self.streams: Any = None
        self.failure: Exception | None = None
        self.set_exception_handler(lambda loop, context: self._complain(context))
        self.set_task_factory(cast(Any, self._make_task))

    def time(self) -> float:
        return self._now

    # -- scheduling: a quarter of a run's time was spent here, so these methods do not call one another

    def call_soon(
        self, callback: Callable[[Unpack[Arguments]], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = copy_context()
        handle = _Handle(callback, args, context, self._now, context.get(CURRENT))
        if not self.is_over:
            self._handles.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if context is None:
            context = copy_context()
        # Time advances on every wait: otherwise a clock that is slower than the loop's would be awaited in steps of zero.
        soonest = self._now + SHORTEST_WAIT_S
        when = when if when > soonest else soonest
        handle = _Handle(callback, args, context, when, context.get(CURRENT))
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if context is None:
            context = copy_context()
        when = self._now + (delay if delay > SHORTEST_WAIT_S else SHORTEST_WAIT_S)
        handle = _Handle(callback, args, context, when, context.get(CURRENT))
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later_as(self, process: Process | None, delay: float, callback: Callable[..., object], *args: Any) -> None:
        """``call_later`` for another process, or for none (the simulation itself)."""
        when = self._now + (delay if delay > SHORTEST_WAIT_S else SHORTEST_WAIT_S)
        context = Context() if process is None else process.context()
        heappush(self._timers, (when, next(self._numbers), _Handle(callback, args, context, when, process)))

    def call_at_as(self, process: Process | None, when: float, callback: Callable[..., object], *args: Any) -> None:
        """``call_at`` for another process, or for none (the simulation itself)."""
        self.call_later_as(process, when - self._now, callback, *args)

    def run_as(self, process: Process | None, call: Callable[..., Result], *args: Any) -> Result:
        """Call ``call``; every callback that it schedules belongs to ``process``."""
        context = Context() if process is None else process.context()
        return context.run(call, *args)

    def deliver_as(self, process: Process | None, call: Callable[..., object], *args: Any) -> None:
        """Deliver an external event to ``process``: run ``call`` now, or when a stopped process continues."""
        if process is None:
            Context().run(call, *args)
        elif process.held is None:
            process.context().run(call, *args)
        else:
            process.held.append(_Handle(call, args, process.context(), self._now, process))

    # -- running

    def _run_once(self) -> None:
        """Run until ``stop`` is called."""
        handles = self._handles
        last_turn = self._last_turn
        while not self._stopping:  # type: ignore[attr-defined]
            if not handles:
                self._jump()
                last_turn = self._last_turn
                continue
            handle = handles.popleft()
            if handle._cancelled:
                continue
            process = handle.process
            if process is not None and process.is_special and not self._lets_run(process, handle):
                continue
            self.turns += 1
            if self.turns > last_turn:
                self.fail(
                    SimulationStuck(f"more than {MAXIMUM_TURNS_PER_S} callbacks ran in a second, the last for {_name(process)}")
                )
            try:
                handle._context.run(handle._callback, *handle._args)
            except Exception as failure:
                self._complain({"message": f"a callback of {_name(process)} failed", "exception": failure})

    def _lets_run(self, process: Process, handle: _Handle) -> bool:
        """Return whether to run this callback: its process may be dead, stopped, or about to crash."""
        if process.alive and process.held is not None:
            process.held.append(handle)
            return False
        if process.alive and process.fuse:
            # A process may crash between any two callbacks, that is, at any await.
            process.fuse -= 1
            if not process.fuse:
                process.on_fuse()
        elif process.alive:
            process.is_special = False
        return process.alive

    def _jump(self) -> None:
        """Advance to the next timer's time and make all timers of that time ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            self.fail(SimulationStuck("every task waits and no timer is set"))
            return
        now, _, handle = heappop(timers)
        self._now = now
        self._handles.append(handle)
        while timers and timers[0][0] <= now:
            self._handles.append(heappop(timers)[2])
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._last_turn = self.turns + MAXIMUM_TURNS_PER_S
            self.check_unhandled()

    def stop_process(self, process: Process) -> None:
        """Hold the callbacks of the process until ``continue_process``; time goes on."""
        process.held = process.held if process.held is not None else []
        process.is_special = True

    def continue_process(self, process: Process) -> None:
        """Schedule the callbacks that were held, in the order in which they arrived."""
        held, process.held = process.held or [], None
        self._handles.extend(held)

    # -- failures

    def fail(self, failure: Exception, cause: BaseException | None = None) -> None:
        """End the run; only the first failure is kept."""
        if self.failure is None and not self.is_over:
            self.failure = failure
            self.failure.__cause__ = cause
            self.stop()

    def _complain(self, context: dict[str, Any]) -> None:
        """Fail the run with an error that asyncio would only log. Failures of crashed processes are ignored."""
        future = context.get("future")
        if isinstance(future, OwnedFuture) and future.process is not None and not future.process.alive:
            return
        failure = context.get("exception")
        what = f"{context.get('message')}: {failure!r}" if failure is not None else f"{context.get('message')}"
        self.fail(FailedInBackground(what), failure)

    def check_unhandled(self) -> None:
        """Fail if a live process has had an unhandled exception since the last check."""
        for what, failure in self.unhandled.look():
            self.fail(FailedInBackground(what), failure)

    def check_at_end(self) -> None:
        """Fail for every unhandled exception and unreachable task at the end of the run."""
        self.check_unhandled()
        self.check_unhandled()
        for what in self.unhandled.collect(self):
            self.fail(FailedInBackground(what))

    def create_future(self) -> OwnedFuture:
        return OwnedFuture(next(self._task_numbers), self, CURRENT.get())

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result], **kwargs: Any
    ) -> asyncio.Task[Result]:
        task = NumberedTask(next(self._task_numbers), coroutine, loop=loop, **kwargs)
        self.unhandled.add_task(task, CURRENT.get())
        return task

    def finish(self) -> None:
        """End the simulation: callbacks scheduled afterwards, while tasks are collected, have no effect."""
        self.is_over = True
        self.unhandled.clear()
        self._handles.clear()
        self._timers.clear()

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        factory, host, port = args
        return await self.streams.create_server(factory, host, port)

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Connect from the machine of the process that calls; see ``asyncio.loop.create_connection``."""
        factory, host, port = args
        process = CURRENT.get()
        assert process is not None, "a process of a machine connects"
        protocol = factory()
        transport = await self.streams.create_connection(protocol, process.name.partition("#")[0], host, port)
        await asyncio.sleep(0)  # asyncio calls ``connection_made`` before it returns
        return transport, protocol

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """An abandoned generator is not resumed: what it would clean up may belong to a process that has crashed."""

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def _nothing() -> None:
    pass


def _name(process: Process | None) -> str:
    return process.name if process is not None else "the scenario"
