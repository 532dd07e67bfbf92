"""Chooses faults from the seed and applies them one after another; removes all of them at the end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from simulation.world.disk import DiskFaults
from simulation.world.machine import Machine, World


@dataclass(frozen=True, slots=True, kw_only=True)
class NemesisPlan:
    """Chances that a step injects each fault (else it does nothing), and how many machines may be down at once."""

    crash: float = 0.3
    power_cut: float = 0.0
    """Several machines lose power at once, possibly all; they restart soon."""
    stop: float = 0.0
    """The process is suspended for a while, as by SIGSTOP, without noticing it."""
    cut_off: float = 0.0
    """One machine is cut off only from those in ``authorities``: it continues with stale state."""
    disk: float = 0.0
    """Syncs or writes fail, or the disk is full; later the machine restarts with a healthy disk."""
    rot: float = 0.0
    """A bit flips in a file. Only on the first machine, for the whole run."""
    partition: float = 0.2
    one_way: float = 0.1
    lossy: float = 0.1
    clock_jump: float = 0.05
    hang: float = 0.0
    """A disk completes nothing for a while and reports no error, for four times as long as a machine is down."""
    pause_mean_s: float = 0.8
    down_mean_s: float = 1.5
    back_mean_s: float = 0.3
    down_at_once_max: int = 1


class Nemesis:
    """Injects faults. ``run`` continues until ``stop``, which starts every machine and repairs every link."""

    def __init__(
        self,
        world: World,
        machines: Sequence[Machine],
        plan: NemesisPlan,
        *,
        name: str = "",
        everyone: Sequence[Machine] = (),
        authorities: Sequence[Machine] = (),
    ) -> None:
        self._world = world
        self._machines = machines
        self._everyone = everyone or machines
        self._authorities = authorities
        self._plan = plan
        self._name = name or "nemesis"
        self._random = random.Random()
        self._stopped = False
        self._healers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        for step in itertools.count(1):
            # Each step has its own random source: leaving a step out does not change the others.
            name = f"{self._name}#{step}"
            self._random = self._world.random(f"nemesis/{name}")
            await asyncio.sleep(self._random.expovariate(1 / self._plan.pause_mean_s))
            if self._stopped:
                return
            self._world.schedule.carry_out(name, self._world.loop.time(), self._world.trace, self._step)

    def stop(self) -> None:
        self._stopped = True
        for healer in self._healers:
            healer.cancel()
        self._world.note("nemesis ends: all links whole, all machines up")
        self._world.network.cut.clear()
        self._world.network.faults.loss_chance = 0.0
        for machine in self._machines:
            self._whole_disk(machine)
            if machine.disk_hangs:
                machine.crash()
            machine.go_on()
            self._boot(machine)

    def _step(self) -> None:
        plan, chance = self._plan, self._random.random()
        for share, act in (
            (plan.crash, self._crash),
            (plan.power_cut, self._power_cut),
            (plan.stop, self._stop),
            (plan.cut_off, self._cut_off),
            (plan.disk, self._disk),
            (plan.rot, self._rot),
            (plan.partition, self._partition),
            (plan.one_way, self._one_way),
            (plan.lossy, self._lossy),
            (plan.clock_jump, self._clock_jump),
            (plan.hang, self._hang),
        ):
            if chance < share:
                act()
                return
            chance -= share

    def _later(self, seconds: float, act: str, *arguments: object) -> None:
        async def heal() -> None:
            await asyncio.sleep(seconds)
            getattr(self, act)(*arguments)

        self._healers.append(asyncio.get_running_loop().create_task(heal()))

    def _crash(self) -> None:
        down = sum(not machine.is_up for machine in self._machines)
        up = [machine for machine in self._machines if machine.is_up]
        if down >= self._plan.down_at_once_max or not up:
            return
        victim = self._random.choice(up)
        callbacks = self._random.choice([0, 1, 10, 100])
        if callbacks:
            within = self._random.randrange(callbacks) + 1
            self._world.note(f"{victim.name} is to crash before its callback {within} from now")
            victim.crash_within(within)
        else:
            victim.crash()
        self._later(self._random.expovariate(1 / self._plan.down_mean_s), "_boot", victim)

    def _boot(self, machine: Machine) -> None:
        machine.crash_within(0)
        machine.boot()

    def _power_cut(self) -> None:
        up = [machine for machine in self._machines if machine.is_up]
        victims = self._random.sample(up, self._random.randint(min(2, len(up)), len(up)))
        for victim in victims:
            victim.crash()
            self._later(self._random.expovariate(1 / self._plan.back_mean_s), "_boot", victim)

    def _stop(self) -> None:
        up = [machine for machine in self._machines if machine.is_up]
        if up:
            victim = self._random.choice(up)
            self._world.note(f"{victim.name} is stopped")
            victim.stop()
            self._later(self._random.expovariate(1 / self._plan.down_mean_s), "_go_on", victim)

    def _go_on(self, machine: Machine) -> None:
        machine.go_on()

    def _cut_off(self) -> None:
        victim = self._victim()
        self._cut({(victim, other.name) for other in self._authorities}, both_ways=True)

    def _disk(self) -> None:
        if sum(_has_disk_fault(machine) for machine in self._machines) >= self._plan.down_at_once_max:
            return
        victim = self._random.choice(list(self._machines))
        fault = self._random.choice(["sync_fails", "write_fails", "read_fails", "full"])
        self._world.note(f"{victim.name}: disk fault {fault}")
        victim.disk.faults = DiskFaults(**{fault: True})
        victim.is_excused = True
        self._later(self._random.expovariate(1 / self._plan.down_mean_s), "_renew", victim)

    def _hang(self) -> None:
        up = [machine for machine in self._machines if machine.is_up]
        if up and sum(machine.disk_hangs for machine in up) < self._plan.down_at_once_max:
            self._random.choice(up).hang_disk(self._random.expovariate(1 / (4 * self._plan.down_mean_s)))

    def _renew(self, machine: Machine) -> None:
        if _has_disk_fault(machine):
            machine.crash()
            self._whole_disk(machine)
            machine.boot()

    def _whole_disk(self, machine: Machine) -> None:
        had_fault = _has_disk_fault(machine)
        machine.disk.faults = DiskFaults()
        if had_fault:
            machine.crash()
            machine.is_excused = machine.is_rotten

    def _rot(self) -> None:
        machine = self._machines[0]
        machine.is_rotten = machine.is_excused = True
        paths = sorted(path for path, content in machine.disk.content.items() if path.endswith(".log") and content.now)
        if paths:
            path = self._random.choice(paths)
            written = len(machine.disk.content[path].now.rstrip(b"\0"))
            position = self._random.randrange(max(written, 1))
            self._world.note(f"{machine.name}: a bit of {path} flips at {position}")
            machine.disk.flip_bit(path, position, self._random.randrange(8))

    def _partition(self) -> None:
        victim = self._victim()
        self._cut({(victim, other.name) for other in self._everyone}, both_ways=True)

    def _one_way(self) -> None:
        victim = self._victim()
        self._cut({(victim, other.name) for other in self._everyone}, both_ways=False)

    def _victim(self) -> str:
        return self._random.choice(list(self._machines)).name

    def _cut(self, pairs: set[tuple[str, str]], *, both_ways: bool) -> None:
        if both_ways:
            pairs |= {(target, source) for source, target in pairs}
        pairs = {(source, target) for source, target in pairs if source != target}
        self._world.note(f"cut: {_links(pairs)}")
        self._world.network.cut |= pairs
        self._later(self._random.expovariate(1 / self._plan.down_mean_s), "_mend", pairs)

    def _mend(self, pairs: set[tuple[str, str]]) -> None:
        self._world.note(f"mended: {_links(pairs)}")
        self._world.network.cut -= pairs

    def _lossy(self) -> None:
        self._world.network.faults.loss_chance = self._random.choice([0.01, 0.1, 0.3])
        self._world.note(f"links lose {self._world.network.faults.loss_chance:.0%}")
        self._later(self._random.expovariate(1 / self._plan.down_mean_s), "_lossless")

    def _lossless(self) -> None:
        self._world.network.faults.loss_chance = 0.0

    def _clock_jump(self) -> None:
        machine = self._random.choice(list(self._machines))
        by_ms = self._random.choice([-3_600_000, -60_000, -1_000, 1_000, 5_000])
        self._world.note(f"{machine.name}: wall clock jumps by {by_ms} ms")
        machine.clock.jump(by_ms)


def _has_disk_fault(machine: Machine) -> bool:
    return machine.disk.faults != DiskFaults()


def _links(pairs: set[tuple[str, str]]) -> str:
    """Return the cut links as text; ``->`` if only one direction is cut."""
    arrows = {
        f"{source} - {target}" if (target, source) in pairs else f"{source} -> {target}"
        for source, target in pairs
        if source < target or (target, source) not in pairs
    }
    return ", ".join(sorted(arrows))
