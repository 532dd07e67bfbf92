"""A simulated cluster under faults: quorum, bookies, brokers and tiering workers over one bucket.

Scenarios add clients, and check what must hold when the faults are over.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, Final

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import UNKNOWN_OBJECT
from simulation.checkers.final_checks import FinalChecks
from simulation.checkers.one_coordinator import one_coordinator_at_a_time
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.checker_machine import run_in_checker
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, StoreFaults

BOOKIES: Final = 4
BROKERS: Final = 3
FINISH_S: Final = 120.0
LOOK_S: Final = 0.25
TOPIC_ALREADY_EXISTS: Final = 36


def bootstrap() -> list[str]:
    return [f"broker-{number}:{roles.KAFKA_PORT}" for number in range(1, BROKERS + 1)]


async def create_topic(client: KafkaClient, topic: str, partitions: int, copies: int, configs: Mapping[str, str]) -> None:
    """Create a topic. Retries until it is there."""
    while True:
        try:
            error = await client.create_topic(topic, partitions, copies, dict(configs))
        except NotServed:
            error = -1
        if error in (NONE, TOPIC_ALREADY_EXISTS):
            return
        await asyncio.sleep(0.5)


class Cluster(ABC):
    """The machines of one run, and their faults. ``simulate`` raises ``AssertionError`` if an invariant does not hold."""

    replication_factor = 3
    faults_s = 14.0

    def __init__(self, world: World, **broker_settings: Any) -> None:
        self.world = world
        self.bucket = Bucket()
        self.audit = world.audit = Audit(world.note, self.bucket)
        self.audit.copies.watch_answers(world.network)
        self.bucket.on_deleted = self.audit.deleted
        self.bucket.on_unknown = partial(world.coverage.meet, UNKNOWN_OBJECT)
        self.metadata = [self._machine("metadata", number, roles.run_metadata_node) for number in range(1, 4)]
        self.bookies = [self._machine("bookie", number, roles.run_bookie) for number in range(1, BOOKIES + 1)]
        self.brokers = [
            self._machine("broker", number, roles.broker(self.bucket, **broker_settings)) for number in range(1, BROKERS + 1)
        ]
        self.tiering = [self._machine("tiering", number, roles.tiering_worker(self.bucket)) for number in (1, 2)]
        self.members: list[Machine] = []
        self._clients: list[Machine] = []
        self._operators: list[Machine] = []
        """They end with the faults."""
        self._outsiders: list[Machine] = []

    def _machine(self, role: str, number: int, main: roles.Main) -> Machine:
        return Machine(self.world, f"{role}-{number}", main)

    @property
    def servers(self) -> list[Machine]:
        return [*self.metadata, *self.bookies, *self.brokers, *self.tiering]

    @property
    @abstractmethod
    def partitions(self) -> int:
        """The number of partitions of all topics, internal ones included."""

    def simulate(self) -> None:
        with one_coordinator_at_a_time(self.audit):
            self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        await self._begin()
        await self._faults()
        await self._end()

    async def _begin(self) -> None:
        for machine in self.servers:
            machine.boot()
        await self._in_checker(self._create_topics)
        self._boot_clients()

    def _boot_clients(self) -> None:
        for machine in [*self._clients, *self.members, *self._operators]:
            machine.boot()

    async def _end(self, lost: Set[int] = frozenset()) -> None:
        """Stop the operators and check everything. Bookies keep the ``lost`` ledgers, which metadata does not know."""
        for machine in self._operators:
            machine.crash()
        await self._finish()
        bookies = [f"{machine.name}:{roles.BOOKIE_PORT}" for machine in self.bookies if not machine.is_excused]
        await self._in_checker(FinalChecks(self.audit, self.bucket, bookies, self.partitions, lost).run)
        self._check_processes()

    @abstractmethod
    async def _create_topics(self, machine: Machine, ports: Ports) -> None: ...

    @abstractmethod
    async def _finish(self) -> None:
        """Stop the clients and check everything that they wrote, when the faults are over."""

    async def _comes(self, is_there: Callable[[], bool], failure: Callable[[], str]) -> None:
        """Wait until ``is_there``, for at most ``FINISH_S``. Raises ``AssertionError`` with what ``failure`` returns then."""
        for _ in range(int(FINISH_S / LOOK_S)):
            if is_there():
                return
            await asyncio.sleep(LOOK_S)
            self._check_processes()
        raise AssertionError(failure())

    async def _pass(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            self._check_processes()

    async def _faults(self) -> None:
        undo = self._begin_faults()
        await self._pass(self.faults_s)
        for each in undo:
            each()
        for machine in self.servers:
            machine.boot()

    def _authorities(self) -> list[Machine]:
        """Return the machines that an outdated broker does not reach."""
        return self.metadata

    def _plans(self) -> list[tuple[str, list[Machine], NemesisPlan]]:
        """Return the plan of each nemesis, with its name and its machines."""
        power = NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, clock_jump=0, power_cut=1.0, pause_mean_s=2.8)
        # Readers still reach a broker that is cut off from metadata and producers, and bookies get its requests.
        outdated = NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, cut_off=1.0, pause_mean_s=3.5, down_mean_s=3.0)
        return [
            ("metadata", self.metadata, NemesisPlan(crash=0.2, stop=0.1, disk=0.1, pause_mean_s=2.1)),
            ("bookies", self.bookies, NemesisPlan(crash=0.2, stop=0.1, disk=0.15, rot=0.15, pause_mean_s=1.0)),
            ("brokers", self.brokers, NemesisPlan(crash=0.2, stop=0.2, clock_jump=0.15, pause_mean_s=1.0, down_at_once_max=2)),
            ("outdated", self.brokers, outdated),
            ("tiering", self.tiering, NemesisPlan(crash=0.3, stop=0.4, partition=0, one_way=0, clock_jump=0, pause_mean_s=1.4)),
            ("power", [*self.bookies, *self.brokers], power),
        ]

    def _begin_faults(self) -> list[Callable[[], object]]:
        """Start the faults; return the functions that end them."""
        nemeses = [
            Nemesis(self.world, machines, plan, name=name, everyone=self.servers, authorities=self._authorities())
            for name, machines, plan in self._plans()
        ]
        tasks = [asyncio.get_running_loop().create_task(nemesis.run()) for nemesis in nemeses]
        faults = self.bucket.faults
        if self.world.decides("store"):
            faults.unavailable = faults.answer_lost = 0.05
            faults.damaged = faults.truncated = 0.03
            faults.slow = faults.happens_later = 0.02
            faults.listing_lag_s = 3.0
        return [
            lambda: setattr(self.bucket, "faults", StoreFaults()),
            *(nemesis.stop for nemesis in nemeses),
            *(task.cancel for task in tasks),
        ]

    async def _in_checker(self, work: roles.Main) -> None:
        await run_in_checker(self.world, work, FINISH_S)

    def _check_processes(self) -> None:
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.servers, *self._clients, *self.members, *self._operators, *self._outsiders]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
