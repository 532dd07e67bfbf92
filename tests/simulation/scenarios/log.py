"""Scenario: a whole cluster under faults. Idempotent producers write, readers read, sealed ledgers are offloaded.

Checked all the time: no client ever sees two different records at one offset, or one that was not sent; and no broker serves a
partition after another has acknowledged something in it. ``audit.py`` checks metadata and bucket. Checked at the end, after all
faults: every acknowledged record is at its offset, none is there twice, offsets have no gap, each producer's records are in
order; then ``final_checks.py`` checks bucket, bookies and metadata.
"""

from __future__ import annotations

import asyncio
from typing import Final

from simulation.checkers.coordinator_states import StoredStates
from simulation.checkers.coverage import COMMITTED, OFFLOADED, PROGRESS
from simulation.checkers.log_truth import Truth, read_all
from simulation.clients.consumers import Groups
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.clients.near_reader import NearReader, ReplayedTopic
from simulation.clients.operators import Operator, lower_factor
from simulation.clients.producers import Producer, UnsafeProducer
from simulation.faults.nemesis import NemesisPlan
from simulation.scenarios.checker_machine import in_time
from simulation.scenarios.cluster import BOOKIES, FINISH_S, Cluster, bootstrap, create_topic
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World

TOPIC: Final = "log"
PARTITIONS: Final = 4
PRODUCERS: Final = 3
READERS: Final = 2
SETTLE_S: Final = 2.0
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


class Scenario(Cluster):
    """One run."""

    segment_ms = SEGMENT_MS
    operators = 1
    offloaded_min = PROGRESS["log"][OFFLOADED]
    first_epoch = 0
    """The least leader epoch of this life of the cluster."""

    def configs(self) -> dict[str, str]:
        """Return the topic's configs."""
        return {
            "segment.ms": str(self.segment_ms),
            "retention.ms": "-1",
            "min.insync.replicas": "1",
            "message.timestamp.after.max.ms": "86400000",
        }

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.truth = Truth(self.audit, world.coverage)
        self._make_clients(first=0)

    def _make_clients(self, first: int, suffix: str = "") -> None:
        """Make all clients. Machines are numbered from ``first`` on; names of producers and groups end with ``suffix``."""
        world, target = self.world, (TOPIC, PARTITIONS, bootstrap())
        self._producers = [Producer(world, self.truth, f"p{number}{suffix}", *target) for number in range(PRODUCERS)]
        self._near = NearReader(world, self._replayed, bootstrap())
        self._unsafe = UnsafeProducer(world, self.truth, f"u0{suffix}", *target)
        self._readers = self._make_readers(world)
        self.group = Groups(world, self.audit, TOPIC, PARTITIONS, bootstrap(), suffix)
        self.states = StoredStates(self.audit, self.bucket, TOPIC, self.group.committer.stored, self.first_epoch)
        members = self.group.members(self.truth.see)
        self.members = [self._machine("member", number, member.run) for number, member in enumerate(members, first)]
        self._operators = [self._machine("operator", first + number, Operator(TOPIC).run) for number in range(self.operators)]
        self._clients = [self._machine("producer", number, one.run) for number, one in enumerate(self._producers, first)]
        self._clients += [self._machine("reader", number, one.run) for number, one in enumerate(self._readers, first)]
        self._clients.append(self._machine("near", first, self._near.run))
        self._clients.append(self._machine("unsafe", first, self._unsafe.run))
        self._clients.append(self._machine("committer", first, self.group.committer.run))

    def _replayed(self) -> list[ReplayedTopic]:
        """Return the topics that the reader with a rack replays."""
        return [ReplayedTopic(TOPIC, PARTITIONS, self.truth)]

    def _make_readers(self, world: World) -> list[Reader]:
        return [Reader(world, self.truth) for _ in range(READERS)]

    @property
    def partitions(self) -> int:
        return PARTITIONS + roles.OFFSETS_PARTITIONS

    async def _finish(self) -> None:
        await self._do_without_rotten_bookies()
        await self._pass(SETTLE_S)
        clients: list[Reader | Producer | UnsafeProducer] = [*self._readers, *self._producers, self._unsafe]
        for client in clients:
            client.stop = True
        for producer in self._producers:
            await in_time(producer.stopped.wait(), "a producer still waits for an answer", FINISH_S)
        await self._group_has_polled_all()
        await self._near_reader_has_read_all()
        await self._has_offloaded()
        await self._positions_are_stored()
        await self._in_checker(self._check_everything)
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
        await in_time(self.group.committer.stopped.wait(), "a group's offsets could not be read", FINISH_S)

        def unseen() -> list[tuple[int, int]]:
            return self.group.unseen(self.truth.acknowledged)

        await self._comes(
            lambda: not unseen(), lambda: f"a group has not polled {len(unseen())} acknowledged records: {unseen()[:3]}"
        )

    async def _near_reader_has_read_all(self) -> None:
        topic = self._replayed()[0]
        self._near.catches_up = True
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

    def _authorities(self) -> list[Machine]:
        return [*super()._authorities(), *self._clients[:PRODUCERS]]

    def _plans(self) -> list[tuple[str, list[Machine], NemesisPlan]]:
        members = NemesisPlan(crash=0.4, stop=0.3, lossy=0, pause_mean_s=1.8, down_mean_s=2.5)
        return [*super()._plans(), ("members", self.members, members)]

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        await create_topic(client, TOPIC, PARTITIONS, self.replication_factor, self.configs())

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        for partition in range(PARTITIONS):
            start, records = await read_all(client, TOPIC, partition)
            assert start == 0, f"partition {partition} begins at {start}"
            for record in records:
                self.truth.see(partition, record)
            self.truth.check_final(partition, records)
