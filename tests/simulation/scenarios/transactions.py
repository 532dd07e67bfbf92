"""Scenario: transactions on several partitions with offsets in them, under the faults of ``log`` and ``ownership-changes``.

Brokers, which coordinate transactions and own partitions, are killed, stopped, cut off and drained at any step. The faults end,
and then every transaction is complete: nothing is torn, nothing aborted is read, no transaction is left open. A group whose
members change between the classic and the consumer protocol polls the other topic meanwhile. The transactions' topic is deleted
by mistake and restored, again and again: what ended meanwhile is ended in its partitions, too.

In half of the runs a producer id has few epochs, so that producers often get another id, also within a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from simulation.checkers.committed_reads import CommittedReads
from simulation.checkers.coverage import TRANSACTIONS_COMMITTED
from simulation.checkers.transaction_outcomes import Outcomes, read_committed, stable_offset
from simulation.clients.committed_reader import CommittedReader
from simulation.clients.consumer_protocol import GROUP, MEMBERS, Ownership
from simulation.clients.kafka import KafkaClient
from simulation.clients.migrating_members import MigratingMember, observed_heartbeats
from simulation.clients.topic_deleter import TopicDeleter
from simulation.clients.transactions import TransactionalWriter
from simulation.scenarios import everything, log
from simulation.scenarios.cluster import FINISH_S, LOOK_S, bootstrap, create_topic
from simulation.scenarios.overtaken_read import OvertakenRead
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_broker.coordination.transactions.core import coordinator, transaction
from stratalog_broker.coordination.transactions.core.coordinator import TransactionCoordinator
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_MAX, Transaction
from stratalog_broker.coordination.wake_times import Instant
from stratalog_metadata.records import DeferredMarker

TOPIC: Final = "transactions"
PARTITIONS: Final = 3
WRITERS: Final = 3
WRITERS_V2: Final = (1, 2)
"""Writers of transaction version 2; the others are of version 1."""
COMMITTED_READERS: Final = ("", roles.RACKS[0])
"""The rack of each reader of committed records."""


FEW_EPOCHS: Final = range(3, 12)


@contextlib.contextmanager
def limited_epochs(epoch_max: int) -> Iterator[None]:
    """Make ``epoch_max`` the greatest epoch of a producer id, while the context lasts."""
    modules = transaction, coordinator
    try:
        for module in modules:
            setattr(module, "EPOCH_MAX", epoch_max)  # noqa: B010 - it is final to the type checker
        yield
    finally:
        for module in modules:
            setattr(module, "EPOCH_MAX", EPOCH_MAX)  # noqa: B010


@contextlib.contextmanager
def observed_timeouts(timed_out: set[str]) -> Iterator[None]:
    """Collect the transactional ids whose transactions coordinators abort after their timeout, while the context lasts."""
    inner = TransactionCoordinator.timed_out

    def observed(self: TransactionCoordinator, now: Instant) -> Iterator[Transaction]:
        for aborted in inner(self, now):
            timed_out.add(aborted.transactional_id)
            yield aborted

    setattr(TransactionCoordinator, "timed_out", observed)  # noqa: B010 - it is a method to the type checker
    try:
        yield
    finally:
        setattr(TransactionCoordinator, "timed_out", inner)  # noqa: B010


class Scenario(everything.Scenario):
    """One run."""

    has_last_steps = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.outcomes = Outcomes()
        self.reads = CommittedReads(self.audit, self.outcomes)
        target = (TOPIC, PARTITIONS, bootstrap())
        epochs = world.random("epochs")
        self._epoch_max = epochs.choice((EPOCH_MAX, epochs.choice(FEW_EPOCHS)))
        self._committed_readers = [CommittedReader(world, self.reads, *target, rack) for rack in COMMITTED_READERS]
        self._writers = [
            TransactionalWriter(
                world, self.outcomes, f"t{number}", *target, is_v2=number in WRITERS_V2, epoch_max=self._epoch_max
            )
            for number in range(WRITERS)
        ]
        self._clients += [self._machine("writer", number, one.run) for number, one in enumerate(self._writers)]
        self.ownership = Ownership(self.audit, world.loop.time)
        members = [
            MigratingMember(world, self.ownership, f"balanced-{number}", log.TOPIC, log.PARTITIONS, bootstrap(), self.truth.see)
            for number in range(MEMBERS)
        ]
        self._clients += [self._machine("balanced", number, member.run) for number, member in enumerate(members)]
        self._clients += [self._machine("committed", number, one.run) for number, one in enumerate(self._committed_readers)]
        self._deleter = TopicDeleter(world, self.outcomes, TOPIC)
        self._clients.append(self._machine("deleter", 0, self._deleter.run))

    def _begin_faults(self) -> list[Callable[[], object]]:
        return [lambda: setattr(self._deleter, "stop", True), *super()._begin_faults()]

    @property
    def partitions(self) -> int:
        return super().partitions + PARTITIONS + roles.OFFSETS_PARTITIONS

    def simulate(self) -> None:
        limits = limited_epochs(self._epoch_max)
        with limits, observed_timeouts(self.outcomes.timed_out), observed_heartbeats(self.ownership):
            super().simulate()

    async def _create_topics(self, machine: Machine, ports: Ports) -> None:
        await super()._create_topics(machine, ports)
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        await create_topic(client, TOPIC, PARTITIONS, self.replication_factor, self.configs())

    async def _group_has_polled_all(self) -> None:
        await super()._group_has_polled_all()
        for _ in range(int(FINISH_S / LOOK_S)):
            unseen = self.ownership.unseen(self.truth.acknowledged)
            if not unseen:
                break
            await asyncio.sleep(LOOK_S)
            self._check_processes()
        self.audit.require(not unseen, f"group {GROUP} has not polled {len(unseen)} acknowledged records: {unseen[:3]}")
        commits, handovers, switches = self.ownership.commits, self.ownership.handovers, self.ownership.switches
        self.world.note(
            f"{commits} commits of group {GROUP}, {handovers} partitions handed over, {switches} changes of protocol"
        )

    async def _some_transaction_is_committed(self) -> None:
        """Wait for one if brokers crashed too often for that until now: without faults one comes."""
        for _ in range(int(FINISH_S / 2 / LOOK_S)):
            if self.world.coverage.met[TRANSACTIONS_COMMITTED]:
                break
            await asyncio.sleep(LOOK_S)

    def _deferred(self) -> list[DeferredMarker]:
        return [each for each in self.audit.records.values() if isinstance(each, DeferredMarker)]

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        await self._deleter.stopped.wait()
        await self._some_transaction_is_committed()
        for writer in self._writers:
            writer.stop = True
        for reader in self._committed_readers:
            reader.stop = True
        for writer in self._writers:
            try:
                await asyncio.wait_for(writer.stopped.wait(), FINISH_S / 2)
            except TimeoutError:
                failures = (client.failure for client in self._clients if client.failure is not None)
                raise next(failures, AssertionError("a transaction has no outcome")) from None
        client = KafkaClient(self.world, ports, machine.name, bootstrap())
        reads = [read_committed(client, TOPIC, partition) for partition in range(PARTITIONS)]
        try:
            partitions = await asyncio.wait_for(asyncio.gather(*reads), FINISH_S / 2)
        except TimeoutError:
            raise AssertionError("a transaction is left open") from None
        await self._comes(lambda: not self._deferred(), lambda: f"markers are still deferred: {self._deferred()[:3]}")
        self.outcomes.check_final(partitions)
        self.reads.check_final(partitions)
        for writer in self._writers:
            offset = await stable_offset(client, writer.group, TOPIC)
            expected = self.outcomes.expected_offset(writer.group.removeprefix("group-"))
            assert offset == expected, f"{writer.group} has offset {offset} after transaction {expected} committed it"
        await super()._check_everything(machine, ports)
        if self.world.decides("overtaken read"):
            await OvertakenRead(self.world, self.bucket, self.outcomes, TOPIC, self.brokers).run(machine, ports)
