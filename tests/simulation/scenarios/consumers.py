"""Scenario: consumers with fetch sessions, and an administrator of groups, under faults of brokers, bookies and links.

Partitions are handed over meanwhile, brokers have room for few sessions, and consumers crash and leave theirs behind. While the
administrator changes a group, its coordinator's writes may be slow or lost, and the coordinator may die when it has answered.
At the end each consumer has read everything, and the groups are as their administrator knows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from simulation.checkers.coverage import OFFLOADED, PROGRESS
from simulation.checkers.log_truth import Truth
from simulation.clients.fetch_sessions import SessionConsumer
from simulation.clients.group_administration import GroupAdministrator
from simulation.clients.kafka import BY_TOPIC_ID, VERSIONS, KafkaClient
from simulation.clients.operators import order_handovers
from simulation.clients.producers import Producer
from simulation.faults.coordinator_faults import CoordinatorFaults
from simulation.faults.nemesis import NemesisPlan
from simulation.scenarios.checker_machine import in_time
from simulation.scenarios.cluster import FINISH_S, Cluster, bootstrap, create_topic
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_broker.requests import fetch_sessions

TOPIC: Final = "consumed"
PARTITIONS: Final = 6
PRODUCERS: Final = 2
ADMINISTRATORS: Final = 3
VERSIONS_OF_CONSUMERS: Final = (VERSIONS, BY_TOPIC_ID, VERSIONS)
CONFIGS: Final = {
    "segment.ms": "800", "retention.ms": "-1", "min.insync.replicas": "1", "message.timestamp.after.max.ms": "86400000"
}  # fmt: skip
SESSIONS_MAX: Final = (2, 3, 1_000)
EVICTABLE_AFTER_S: Final = 1.0
SETTLE_S: Final = 2.0


@contextlib.contextmanager
def sessions_evicted_soon() -> Iterator[None]:
    """Make a session evictable after a second instead of two minutes while the context lasts."""
    after_s = fetch_sessions.EVICTABLE_AFTER_S
    setattr(fetch_sessions, "EVICTABLE_AFTER_S", EVICTABLE_AFTER_S)  # noqa: B010 - it is a constant to the type checker
    try:
        yield
    finally:
        setattr(fetch_sessions, "EVICTABLE_AFTER_S", after_s)  # noqa: B010


class Scenario(Cluster):
    """One run."""

    faults_s = 10.0

    def __init__(self, world: World) -> None:
        sessions_max = world.random("sessions").choice(SESSIONS_MAX)
        super().__init__(world, group_initial_rebalance_delay_ms=0, fetch_sessions_max=sessions_max)
        self.truth = Truth(self.audit, world.coverage)
        target = (TOPIC, PARTITIONS, bootstrap())
        self._producers = [Producer(world, self.truth, f"p{number}", *target) for number in range(PRODUCERS)]
        self._consumers = [SessionConsumer(world, self.truth, *target, versions) for versions in VERSIONS_OF_CONSUMERS]
        self._coordinator_faults = CoordinatorFaults(world, self.brokers)
        self._administrators = [
            GroupAdministrator(world, f"administrator-{number}", *target, self._coordinator_faults)
            for number in range(ADMINISTRATORS)
        ]
        self._clients = [self._machine("producer", number, one.run) for number, one in enumerate(self._producers)]
        self._clients += [self._machine("administrator", number, one.run) for number, one in enumerate(self._administrators)]
        self.members = [self._machine("consumer", number, one.run) for number, one in enumerate(self._consumers)]
        self._operators = [self._machine("mover", 0, order_handovers)]

    @property
    def partitions(self) -> int:
        return PARTITIONS + roles.OFFSETS_PARTITIONS

    def simulate(self) -> None:
        with sessions_evicted_soon():
            super().simulate()

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        await create_topic(client, TOPIC, PARTITIONS, self.replication_factor, CONFIGS)

    def _authorities(self) -> list[Machine]:
        return [*super()._authorities(), *self._clients]

    def _plans(self) -> list[tuple[str, list[Machine], NemesisPlan]]:
        plans = {name: (machines, plan) for name, machines, plan in super()._plans()}
        bookies = NemesisPlan(crash=0.2, stop=0.2, pause_mean_s=2.0)
        consumers = NemesisPlan(crash=0.5, stop=0.2, lossy=0, pause_mean_s=1.5, down_mean_s=1.0)
        return [
            *((name, *plans[name]) for name in ("metadata", "brokers", "outdated", "tiering")),
            ("bookies", self.bookies, bookies),
            ("consumers", self.members, consumers),
        ]

    def _begin_faults(self) -> list[Callable[[], object]]:
        self._coordinator_faults.begin()
        return [*super()._begin_faults(), self._coordinator_faults.end]

    async def _finish(self) -> None:
        await self._pass(SETTLE_S)
        for producer in self._producers:
            producer.stop = True
        for producer in self._producers:
            await in_time(producer.stopped.wait(), "a producer still waits for an answer", FINISH_S)
        for consumer in self._consumers:
            consumer.catches_up = True

        def unread() -> list[tuple[int, int]]:
            return [each for consumer in self._consumers for each in consumer.unread()]

        await self._comes(lambda: not unread(), lambda: f"consumers have not reached the ends of {unread()}")
        for consumer in self._consumers:
            consumer.stop = True
        for administrator in self._administrators:
            administrator.stop = True
        for administrator in self._administrators:
            await in_time(administrator.stopped.wait(), "a group could not be read", FINISH_S)
        offloaded_min = PROGRESS["consumers"][OFFLOADED]
        await self._comes(
            lambda: self.world.coverage.met[OFFLOADED] >= offloaded_min,
            lambda: f"{self.world.coverage.met[OFFLOADED]} offsets were offloaded {FINISH_S:g} s after all faults",
        )
        self.world.note(f"{len(self.truth.acknowledged)} acknowledged, {len(self.truth.seen)} seen")
