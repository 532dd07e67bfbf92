"""A simulated machine: a disk and clocks that outlive its processes, and the ports of one incarnation of a process."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import Coverage
from simulation.checkers.observers import ChangeObserver, observe_answers
from simulation.world.background import SimulatedBackground
from simulation.world.clock import SimulatedClock
from simulation.world.direct import SimulatedTransfers
from simulation.world.disk import Disk, SimulatedFiles
from simulation.world.loop import Process, SimulatedLoop
from simulation.world.network import Network, SimulatedTransport
from simulation.world.schedule import Schedule
from simulation.world.streams import Streams


class World:
    """State shared by all machines.

    Every source of randomness is drawn from the one seed, by name, so that adding a machine does not change the others.
    """

    def __init__(self, seed: int, schedule: Schedule | None = None) -> None:
        self.seed = seed
        self.schedule = schedule or Schedule()
        self.loop = SimulatedLoop()
        self.network = Network(self.loop, self.random("network"))
        self.streams = Streams(self.loop, self.network)
        self.trace: list[str] = []
        self.failure = ""
        self.coverage = Coverage()
        self.changes = ChangeObserver(self.coverage)
        self.network.on_settled = observe_answers(self.coverage)
        self.audit: Audit | None = None
        self.machines: list[Machine] = []

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def decides(self, name: str) -> bool:
        """Return whether to do a step that a shortened run may leave out (see ``schedule.py``)."""
        return self.schedule.allows(name, self.loop.time())

    def note(self, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.loop.time():10.4f} {what}")


class Ports:
    """The simulated ports of one incarnation of a process."""

    def __init__(self, machine: Machine) -> None:
        world = machine.world
        self.loop = world.loop
        self.audit = world.audit
        if world.audit is not None:
            world.network.connections.on_broken = world.audit.promise_checker.connection_broke
        self.random = world.random(f"{machine.name}/{machine.starts}")
        self.clock = machine.clock
        self.transport = SimulatedTransport(world.network, machine.name)
        self.background = SimulatedBackground(world.loop, world.random(f"{machine.name}/{machine.starts}/background"))

    @property
    def now(self) -> float:
        return self.loop.time()


class Machine:
    """``boot`` starts one incarnation of ``main``; ``crash`` ends it as a power cut would."""

    def __init__(self, world: World, name: str, main: Callable[[Machine, Ports], Coroutine[Any, Any, None]]) -> None:
        self.world = world
        self.name = name
        self.clock = SimulatedClock(world.loop, rate=1 + world.random(f"{name}/clock").uniform(-0.02, 0.02))
        self.disk = Disk(name, world.random(f"{name}/disk"))
        self.starts = 0
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()
        self.is_excused = False
        """The disk is faulty, so that the process may fail."""
        self.is_rotten = False
        """Bits have flipped on the disk, and nothing repairs them."""
        self.terminated = asyncio.Event()
        """Set when the process is asked to end, as by SIGTERM."""
        self._main = main
        self._process: Process | None = None
        self._ports: Ports | None = None
        self._task: asyncio.Task[None] | None = None
        world.machines.append(self)

    @property
    def is_up(self) -> bool:
        return self._process is not None

    @property
    def files(self) -> SimulatedFiles:
        """The disk's files for one incarnation of a process."""
        randomness = self.world.random(f"{self.name}/{self.starts}/transfers")
        return self.disk.mount(SimulatedTransfers(self.world.loop, randomness, self._disk_hangs_until).open_direct)

    def boot(self) -> None:
        if self._process is not None:
            return
        self.starts += 1
        self.terminated = asyncio.Event()
        self.world.note(f"{self.name} boots, incarnation {self.starts}")
        self._process = Process(f"{self.name}#{self.starts}")
        self._ports = Ports(self)
        self._task = self.world.loop.run_as(self._process, self.world.loop.create_task, self._main(self, self._ports))
        self._task.add_done_callback(self._ended)

    def crash(self) -> None:
        if self._process is None:
            return
        self.world.note(f"{self.name} crashes")
        self._process.end()
        self.world.streams.process_died(self._process)
        self.world.network.connections.process_died(self._process)
        self._process = None
        if self._ports is not None:
            self._ports.background.crash(self.disk)
        self.disk.crash()

    def crash_within(self, callbacks: int) -> None:
        """Crash before the ``callbacks``-th callback from now, even between two of the same instant. 0: cancel."""
        if self._process is not None:
            self._process.light_fuse(callbacks, functools.partial(self.world.loop.run_as, None, self.crash))

    async def terminate(self, patience_s: float) -> bool:
        """Ask the process to end, as SIGTERM does, and wait for it. False: it took longer than ``patience_s``, or crashed."""
        if self._process is None or self._task is None:
            return False
        process, task = self._process, self._task
        self.world.note(f"{self.name} is told to end")
        self.world.loop.deliver_as(process, self.terminated.set)
        await asyncio.wait([task], timeout=patience_s)
        if self._process is process:
            self.crash()
        return task.done()

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does, until ``go_on``; time and other processes continue."""
        if self._process is not None:
            self.world.loop.stop_process(self._process)

    def go_on(self) -> None:
        if self._process is not None and self._process.held is not None:
            self.world.note(f"{self.name} goes on after having been stopped")
            self.world.loop.continue_process(self._process)

    def hang_disk(self, seconds: float) -> None:
        """Let the disk complete nothing, and report no error, for ``seconds``."""
        if self._ports is not None:
            self.world.note(f"the disk of {self.name} hangs")
            self._ports.background.hang(seconds)

    def _disk_hangs_until(self) -> float:
        return self._ports.background.hangs_until if self._ports is not None else 0.0

    @property
    def disk_hangs(self) -> bool:
        return self._ports is not None and self._ports.background.is_hanging

    def _ended(self, task: Any) -> None:
        self.ended.set()
        if not task.cancelled() and task.exception() is not None:
            self.failure = None if self.is_excused else task.exception()
            self.world.note(f"{self.name} failed: {task.exception()!r}")
