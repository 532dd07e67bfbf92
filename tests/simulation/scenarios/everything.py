"""Scenario: all faults at once.

The faults of ``log`` (crashes, power cuts, disks, links, clocks, the store) and those of ``ownership-changes`` (late commands,
crashes during recoveries, brokers cut off for about a lease, moves of partitions, openings that take effect late). In half of
the runs the store carries out no write for some seconds. Brokers are drained or shut down, an administrator creates, extends,
truncates and deletes topics (``administration.py``), segments are merged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Final, cast

import msgspec

from simulation.checkers.coverage import CONTROLLED_SHUTDOWN, DRAINED
from simulation.clients.administration import Administrator
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.clients.near_reader import ReplayedTopic
from simulation.scenarios import log, ownership_changes
from simulation.scenarios.cluster import FINISH_S, LOOK_S, bootstrap
from simulation.scenarios.unnoticed_handover import UnnoticedHandover
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import WriteFault
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import (
    NO_OWNER,
    DrainedBroker,
    Log,
    Partition,
    Topic,
    log_key,
    partition_key,
    topic_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put, VersionIs
from stratalog_tiering.format.object_keys import deleted_topic_of, parse_topic_key

DRAIN_MEAN_S: Final = 4.0
DRAINED_S: Final = 1.5
SHUTDOWN_MEAN_S: Final = 5.0
SHUTDOWN_S: Final = 3.0
WITHOUT_WRITES_FROM_S: Final = (2.0, 8.0)
WITHOUT_WRITES_S: Final = (2.0, 5.0)
TAKEOVER_S: Final = 0.02
"""About the time from the change of an owner until the next one serves."""
VIEW_LAG_S: Final = 1.0
"""Longer than a broker's view is behind the quorum without faults."""


class Scenario(ownership_changes.Scenario):
    """One run."""

    reassigns = False
    has_last_steps = True
    """Whether, at the end, a partition is handed over unnoticed, and a topic deleted and restored while the bucket gets its
    marker late."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.segment_ms = world.random("segments").choice([400, log.SEGMENT_MS])
        self._administrator = Administrator(world, bootstrap())
        self._clients.append(self._machine("administrator", 0, self._administrator.run))

    def _replayed(self) -> list[ReplayedTopic]:
        administered = (ReplayedTopic(one.name, one.partitions, one.truth) for one in self._administrator.live)
        return [*super()._replayed(), *administered]

    @property
    def partitions(self) -> int:
        return super().partitions + sum(topic.partitions for topic in self._administrator.live)

    def simulate(self) -> None:
        with roles.merges_of_few_segments(), roles.deletions_in_steps(), roles.new_segments_verified_by_checksum():
            super().simulate()

    def _begin_faults(self) -> list[Callable[[], object]]:
        drainer = Machine(self.world, "drainer-0", self._drain)
        drainer.boot()
        shutdowns = asyncio.get_running_loop().create_task(self._shut_down())
        without_writes = asyncio.get_running_loop().create_task(self._refuse_writes())
        undo = [*log.Scenario._begin_faults(self), *super()._begin_faults(), drainer.crash, shutdowns.cancel]
        undo.append(without_writes.cancel)
        self._outsiders.append(drainer)
        return [lambda: setattr(self._administrator, "stop", True), *undo]

    async def _refuse_writes(self) -> None:
        """Let the store carry out no write for a while, in half of the runs."""
        chance = self.world.random("store without writes")
        fault, is_drawn = chance.choice([*WriteFault]), chance.random() < 0.5
        await asyncio.sleep(chance.uniform(*WITHOUT_WRITES_FROM_S))
        if is_drawn and self.world.decides("store without writes"):
            self.world.note(f"the store {fault.value}")
            self.bucket.faults.writes = fault
            await asyncio.sleep(chance.uniform(*WITHOUT_WRITES_S))
            self.bucket.faults.writes = None

    async def _drain(self, machine: Machine, ports: Ports) -> None:
        """Drain one broker for a while, then revoke the order."""
        client = await roles.connect_metadata(ports)
        for turn in itertools.count():
            await asyncio.sleep(ports.random.expovariate(1 / DRAIN_MEAN_S))
            if not self.world.decides(f"drain#{turn}"):
                continue
            record = DrainedBroker(broker_id=roles.number_of(ports.random.choice(self.brokers)))
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Put(record=record),)))
            for _ in range(int(DRAINED_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if all(each.owner != record.broker_id for each in client.view.all(Partition)):
                    self.world.coverage.meet(DRAINED)
                    break
            await self._undrain(machine, ports)

    async def _undrain(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        for record in list(client.view.all(DrainedBroker)):
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Delete(key=record.key()),)))
        await client.close()

    async def _shut_down(self) -> None:
        for turn in itertools.count():
            randomness = self.world.random(f"shutdown/{turn}")
            await asyncio.sleep(randomness.expovariate(1 / SHUTDOWN_MEAN_S))
            broker = randomness.choice(self.brokers)
            if not self.world.decides(f"shutdown#{turn}"):
                continue
            if await broker.terminate(SHUTDOWN_S):
                self.world.coverage.meet(CONTROLLED_SHUTDOWN)
            broker.boot()

    async def _delete_during_a_takeover(self, machine: Machine, ports: Ports) -> None:
        """Delete a log's records while a broker takes it over: the last change of the log that any broker sees."""
        client = await roles.connect_metadata(ports)
        for topic in self._administrator.live:
            index = ports.random.randrange(topic.partitions)
            found = client.view.find(Topic, topic_key(topic.name))
            assert found is not None, f"{topic.name} is live"
            key, log = partition_key(found.topic_id, index), log_key(found.topic_id, index)
            owned = client.view.find(Partition, key)
            end = topic.truth.ends.get(index, 0)
            if owned is None or owned.owner == NO_OWNER or not end or not self.world.decides(f"takeover of {topic.name}"):
                continue
            topic.truth.deleted_to[index] = end
            owner = self.brokers[owned.owner - 1]
            owner.crash()
            owner.boot()
            while (now := self.audit.records.get(key)) is None or now == owned:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.001)
            await asyncio.sleep(ports.random.uniform(0.0, TAKEOVER_S))
            while (seen := client.view.get(log)) is not None and cast(Log, seen.record).log_start_offset < end:
                record = msgspec.structs.replace(cast(Log, seen.record), log_start_offset=end)
                with contextlib.suppress(StratalogError):
                    await client.propose(
                        Command(updates=(Put(record=record),), requirements=(VersionIs(key=log, version=seen.version),))
                    )
                await asyncio.sleep(0.001)
            await self._begins_at(KafkaClient(self.world, ports, machine.name, bootstrap()), topic.name, index, end)

    async def _begins_at(self, client: KafkaClient, topic: str, index: int, start: int) -> None:
        """Require that the owner, once it serves, tells readers to begin at ``start`` or later: nothing is wrong any more."""
        until = self.world.loop.time() + FINISH_S / 2
        is_served = False
        while self.world.loop.time() < until:
            try:
                found = await client.start_offset(topic, index)
                if found >= start and (await client.fetch(topic, index, found, wait_ms=0))[0] == NONE:
                    return
                until = until if is_served else self.world.loop.time() + VIEW_LAG_S
                is_served = True
            except NotServed:
                client.forget(topic, index)
            await asyncio.sleep(0.1)
        raise AssertionError(f"readers of {topic}-{index} do not begin at {start}, from which its log starts")

    async def _check_everything(self, machine: Machine, ports: Ports) -> None:
        await self._undrain(machine, ports)
        await self._administrator.stopped.wait()
        for topic in self._administrator.live:
            topic.producer.stop = True
            topic.producer.check_stopped()
        for topic in self._administrator.live:
            await topic.producer.stopped.wait()
        await self._delete_during_a_takeover(machine, ports)
        if self.has_last_steps and self.world.decides("unnoticed handover"):
            brokers = {roles.number_of(broker): address for broker, address in zip(self.brokers, bootstrap(), strict=True)}
            await UnnoticedHandover(self.world, self.truth, log.TOPIC, self.metadata, brokers).run(machine, ports)
        await super()._check_everything(machine, ports)
        await self._administrator.check(machine, ports)
        if self.has_last_steps:
            await self._administrator.delete_with_a_late_marker(machine, ports, self.bucket)
        for _ in range(int(FINISH_S / 2 / LOOK_S)):
            if not self._administrator.leftovers() and not self._hidden():
                return
            await asyncio.sleep(LOOK_S)
        assert not self._hidden(), f"readers of the bucket do not see {self._hidden()}, which is not deleted"
        raise AssertionError(f"deleted topics are still there: {self._administrator.leftovers()}")

    def _hidden(self) -> str:
        """Return the names of live topics that the bucket describes and marks as deleted; empty if there are none."""
        described = {parsed.topic_id for key in self.bucket.objects if (parsed := parse_topic_key(key)) is not None}
        marked = {deleted_topic_of(key) for key in self.bucket.objects} & described
        return ", ".join(
            each.name for each in self.audit.records.values() if isinstance(each, Topic) and each.topic_id in marked
        )

    def _check_processes(self) -> None:
        super()._check_processes()
        for topic in self._administrator.topics:
            if topic.machine.failure is not None:
                raise AssertionError(f"{topic.machine.name} failed: {topic.machine.failure!r}") from topic.machine.failure
