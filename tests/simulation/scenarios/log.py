"""Scenario: a whole cluster under faults. Idempotent producers write, readers read, sealed ledgers are offloaded.

Checked all the time: no client ever sees two different records at one offset, or one that was not sent; and no broker serves a
partition after another has acknowledged something in it. ``audit.py`` checks metadata and bucket. Checked at the end, after all
faults: every acknowledged record is at its offset, none is there twice, offsets have no gap, each producer's records are in
order; then ``final_checks.py`` checks bucket, bookies and metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from simulation.checkers.audit import Audit
from simulation.checkers.coordinator_states import StoredStates
from simulation.checkers.coverage import COMMITTED, OFFLOADED, PROGRESS, UNKNOWN_OBJECT
from simulation.checkers.final_checks import FinalChecks
from simulation.checkers.log_truth import Truth, read_all
from simulation.clients.consumers import Groups
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.clients.near_reader import NearReader, ReplayedTopic
from simulation.clients.operators import Operator, lower_factor
from simulation.clients.producers import Producer, UnsafeProducer
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, StoreFaults

TOPIC: Final = "log"
PARTITIONS: Final = 4
BOOKIES: Final = 4
BROKERS: Final = 3
PRODUCERS: Final = 3
READERS: Final = 2
FAULTS_S: Final = 14.0
SETTLE_S: Final = 2.0
FINISH_S: Final = 120.0
LOOK_S: Final = 0.25
SEGMENT_MS: Final = 1_500


class Reader:
    """Reads all partitions repeatedly from random offsets, until ``stop`` is set."""

    def __init__(self, world: World, truth: Truth) -> None:
        self._world = world
        self._truth = truth
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, bootstrap())
        high = [0] * PARTITIONS
        while not self.stop:
            partition = ports.random.randrange(PARTITIONS)
            offset = ports.random.randrange(high[partition] + 1)
            acknowledged_end = self._truth.ends.get(partition, 0)
            try:
                error, watermark, records = await client.fetch(TOPIC, partition, offset, bytes_max=2_048)
            except NotServed:
                error, watermark, records = -1, -1, []
            if error != NONE:
                client.forget(TOPIC, partition)
            else:
                self._truth.serves(partition, watermark, acknowledged_end)
            high[partition] = max(high[partition], watermark)
            for record in records:
                self._truth.see(partition, record)
            await asyncio.sleep(ports.random.expovariate(1 / 0.1))


async def _in_time(event: Awaitable[object], what: str) -> None:
    try:
        await asyncio.wait_for(event, FINISH_S)
    except TimeoutError:
        raise AssertionError(f"{what} in {FINISH_S:g} s") from None


def bootstrap() -> list[str]:
    return [f"broker-{number}:{roles.KAFKA_PORT}" for number in range(1, BROKERS + 1)]


class Scenario:
    """One run. ``simulate`` raises ``AssertionError`` if an invariant does not hold."""

    segment_ms = SEGMENT_MS
    operators = 1
    replication_factor = 3
    offloaded_min = PROGRESS["log"][OFFLOADED]

    def configs(self) -> dict[str, str]:
        """Return the topic's configs."""
        return {
            "segment.ms": str(self.segment_ms),
            "retention.ms": "-1",
            "min.insync.replicas": "1",
            "message.timestamp.after.max.ms": "86400000",
        }

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket()
        self.audit = world.audit = Audit(world.note, self.bucket)
        self.audit.copies.watch_answers(world.network)
        self.bucket.on_deleted = self.audit.deleted
        self.bucket.on_unknown = partial(world.coverage.meet, UNKNOWN_OBJECT)
        self.truth = Truth(self.audit, world.coverage)
        self.metadata = [self._machine("metadata", number, roles.run_metadata_node) for number in range(1, 4)]
        self.bookies = [self._machine("bookie", number, roles.run_bookie) for number in range(1, BOOKIES + 1)]
        self.brokers = [self._machine("broker", number, roles.broker(self.bucket)) for number in range(1, BROKERS + 1)]
        self.tiering = [self._machine("tiering", number, roles.tiering_worker(self.bucket)) for number in (1, 2)]
        target = (TOPIC, PARTITIONS, bootstrap())
        self._producers = [Producer(world, self.truth, f"p{number}", *target) for number in range(PRODUCERS)]
        self._near = NearReader(world, self._replayed, bootstrap())
        self._unsafe = UnsafeProducer(world, self.truth, "u0", *target)
        self._readers = self._make_readers(world)
        self.group = Groups(world, self.audit, TOPIC, PARTITIONS, bootstrap())
        self.states = StoredStates(self.audit, self.bucket, TOPIC, self.group.committer.stored)
        members = self.group.members(self.truth.see)
        self.members = [self._machine("member", number, member.run) for number, member in enumerate(members)]
        self._operators = [self._machine("operator", number, Operator(TOPIC).run) for number in range(self.operators)]
        self._clients = [self._machine("producer", number, one.run) for number, one in enumerate(self._producers)]
        self._clients += [self._machine("reader", number, one.run) for number, one in enumerate(self._readers)]
        self._outsiders: list[Machine] = []
        self._clients.append(self._machine("near", 0, self._near.run))
        self._clients.append(self._machine("unsafe", 0, self._unsafe.run))
        self._clients.append(self._machine("committer", 0, self.group.committer.run))

    def _replayed(self) -> list[ReplayedTopic]:
        """Return the topics that the reader with a rack replays."""
        return [ReplayedTopic(TOPIC, PARTITIONS, self.truth)]

    def _make_readers(self, world: World) -> list[Reader]:
        return [Reader(world, self.truth) for _ in range(READERS)]

    def _machine(self, role: str, number: int, main: roles.Main) -> Machine:
        return Machine(self.world, f"{role}-{number}", main)

    @property
    def servers(self) -> list[Machine]:
        return [*self.metadata, *self.bookies, *self.brokers, *self.tiering]

    @property
    def partitions(self) -> int:
        """The number of partitions of all topics, internal ones included."""
        return PARTITIONS + roles.OFFSETS_PARTITIONS

    def simulate(self) -> None:
        self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        for machine in self.servers:
            machine.boot()
        await self._in_checker(self._create_topic)
        for machine in [*self._clients, *self.members, *self._operators]:
            machine.boot()
        await self._faults()
        for machine in self._operators:
            machine.crash()
        await self._do_without_rotten_bookies()
        await self._pass(SETTLE_S)
        clients: list[Reader | Producer | UnsafeProducer] = [*self._readers, *self._producers, self._unsafe]
        for client in clients:
            client.stop = True
        for producer in self._producers:
            await _in_time(producer.stopped.wait(), "a producer still waits for an answer")
        await self._group_has_polled_all()
        await self._near_reader_has_read_all()
        await self._has_offloaded()
        await self._positions_are_stored()
        await self._in_checker(self._check_everything)
        bookies = [f"{machine.name}:{roles.BOOKIE_PORT}" for machine in self.bookies if not machine.is_excused]
        await self._in_checker(FinalChecks(self.audit, self.bucket, bookies, self.partitions).run)
        self._check_processes()
        self.world.coverage.meet(COMMITTED, self.group.commits)
        self.world.note(
            f"{len(self.truth.acknowledged)} acknowledged, {len(self.truth.seen)} seen, {len(self.bucket.objects)} objects,"
            f" {self.audit.records_max} records at most, {self.group}"
        )

    async def _do_without_rotten_bookies(self) -> None:
        """Let the other bookies hold all copies: a bookie whose bits have flipped may refuse to start, rightly and for good."""
        healthy = sum(not machine.is_rotten for machine in self.bookies)
        if self.operators and healthy < BOOKIES:
            await self._in_checker(lambda machine, ports: lower_factor(TOPIC, healthy, ports))

    async def _group_has_polled_all(self) -> None:
        self.group.committer.stop = True
        await _in_time(self.group.committer.stopped.wait(), "a group's offsets could not be read")

        def unseen() -> list[tuple[int, int]]:
            return self.group.unseen(self.truth.acknowledged)

        await self._comes(
            lambda: not unseen(), lambda: f"a group has not polled {len(unseen())} acknowledged records: {unseen()[:3]}"
        )

    async def _near_reader_has_read_all(self) -> None:
        topic = self._replayed()[0]
        await self._comes(
            lambda: not self._near.unread(topic),
            lambda: f"a reader with a rack has not reached the ends of {self._near.unread(topic)}",
        )
        self._near.stop = True

    async def _positions_are_stored(self) -> None:
        """Wait until a restore would find every acknowledged commit."""
        await self._comes(
            lambda: self.group.committer.check_restored(self.states.restored(roles.OFFSETS_PARTITIONS)),
            lambda: f"acknowledged commits are in no stored state {FINISH_S:g} s after all faults",
        )

    async def _has_offloaded(self) -> None:
        """Wait until records are offloaded: a worker whose message was lost may wait longer for an answer than a run takes."""
        await self._comes(
            lambda: self.world.coverage.met[OFFLOADED] >= self.offloaded_min,
            lambda: f"{self.world.coverage.met[OFFLOADED]} offsets were offloaded {FINISH_S:g} s after all faults",
        )

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
        await self._pass(FAULTS_S)
        for each in undo:
            each()
        for machine in self.servers:
            machine.boot()

    def _begin_faults(self) -> list[Callable[[], object]]:
        """Start the faults; return the functions that end them."""
        power = NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, clock_jump=0, power_cut=1.0, pause_mean_s=2.8)
        # Readers still reach a broker that is cut off from metadata and producers, and bookies get its requests.
        outdated = NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, cut_off=1.0, pause_mean_s=3.5, down_mean_s=3.0)
        plans = [
            ("metadata", self.metadata, NemesisPlan(crash=0.2, stop=0.1, disk=0.1, pause_mean_s=2.1)),
            ("bookies", self.bookies, NemesisPlan(crash=0.2, stop=0.1, disk=0.15, rot=0.15, pause_mean_s=1.0)),
            ("brokers", self.brokers, NemesisPlan(crash=0.2, stop=0.2, clock_jump=0.15, pause_mean_s=1.0, down_at_once_max=2)),
            ("outdated", self.brokers, outdated),
            ("tiering", self.tiering, NemesisPlan(crash=0.3, stop=0.4, partition=0, one_way=0, clock_jump=0, pause_mean_s=1.4)),
            ("power", [*self.bookies, *self.brokers], power),
            ("members", self.members, NemesisPlan(crash=0.4, stop=0.3, lossy=0, pause_mean_s=1.8, down_mean_s=2.5)),
        ]
        authorities = [*self.metadata, *self._clients[:PRODUCERS]]
        nemeses = [
            Nemesis(self.world, machines, plan, name=name, everyone=self.servers, authorities=authorities)
            for name, machines, plan in plans
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

    async def _in_checker(self, work: object) -> None:
        assert callable(work)
        machine = Machine(self.world, "checker-0", work)
        machine.boot()
        await _in_time(machine.ended.wait(), f"{getattr(work, '__qualname__', work)} did not come to its end")
        if machine.failure is not None:
            raise machine.failure

    async def _create_topic(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        while True:
            try:
                error = await client.create_topic(TOPIC, PARTITIONS, self.replication_factor, self.configs())
            except NotServed:
                error = -1
            if error in (NONE, 36):
                return
            await asyncio.sleep(0.5)

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        for partition in range(PARTITIONS):
            start, records = await read_all(client, TOPIC, partition)
            assert start == 0, f"partition {partition} begins at {start}"
            for record in records:
                self.truth.see(partition, record)
            self.truth.check_final(partition, records)

    def _check_processes(self) -> None:
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.servers, *self._clients, *self.members, *self._operators, *self._outsiders]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
