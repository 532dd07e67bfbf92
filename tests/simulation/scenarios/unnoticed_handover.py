"""A step of ``everything``: a partition is handed over, and its last owner does not learn that it was.

No message of the metadata nodes reaches the owner from the moment at which its handover takes effect. The next owner
acknowledges records; the last one, whose session goes on for a while, must not tell readers that the log ends before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import HANDED_OVER_UNNOTICED
from simulation.checkers.log_truth import Truth
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_core.batches.records import Record as LogRecord
from stratalog_core.batches.records import build_batch
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.raft import Entry
from stratalog_metadata.records import Broker, Partition, Record, Topic, partition_key, topic_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put, VersionIs

LOOK_S: Final = 0.02
DONE_S: Final = 10.0
READ_S: Final = 1.0
"""Less than a broker's session."""


class UnnoticedHandover:
    """``topic`` has a partition 0, to which nobody else writes any more. ``bootstrap`` has a broker's address by its number."""

    def __init__(
        self, world: World, truth: Truth, topic: str, metadata: Sequence[Machine], bootstrap: Mapping[int, str]
    ) -> None:  # fmt: skip
        assert world.audit is not None
        self._world = world
        self._audit: Audit = world.audit
        self._truth = truth
        self._topic = topic
        self._metadata = metadata
        self._bootstrap = bootstrap
        self._cut: set[tuple[str, str]] = set()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        topic = client.view.find(Topic, topic_key(self._topic))
        assert topic is not None, "it has been written to"
        key = partition_key(topic.topic_id, 0)
        async with asyncio.timeout(DONE_S):
            while (owned := _ownership(client.view, key)) is None:  # noqa: ASYNC110 - a takeover may be under way
                await asyncio.sleep(LOOK_S)
        partition, version, target = owned
        reader = KafkaClient(self._world, ports, machine.name, [self._bootstrap[partition.owner]])
        others = [address for number, address in self._bootstrap.items() if number != partition.owner]
        writer = KafkaClient(self._world, ports, machine.name, others)
        order = Put(record=msgspec.structs.replace(partition, next_owner=target))
        with self._cut_off_by_the_handover(partition), contextlib.suppress(NotServed, StratalogError, TimeoutError):
            await reader.fetch(self._topic, 0, 0, wait_ms=0)  # The reader then knows the last owner, and asks nobody else.
            await client.propose(Command(updates=(order,), requirements=(VersionIs(key=key, version=version),)))
            async with asyncio.timeout(DONE_S):
                while not self._cut:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(LOOK_S)
                await self._write(writer, ports)
            await self._read(reader)
        self._world.network.cut -= self._cut
        await client.close()

    @contextlib.contextmanager
    def _cut_off_by_the_handover(self, partition: Partition) -> Iterator[None]:
        """Cut the owner off from what metadata nodes say before they say that it has handed the partition over."""
        noted = self._audit.on_committed

        def committed(entry: Entry, changes: Sequence[Change], records: Mapping[str, Record]) -> None:
            noted(entry, changes, records)
            for change in changes:
                now = change.after.record if change.after is not None else None
                if change.key == partition.key() and isinstance(now, Partition) and now.leader_epoch > partition.leader_epoch:
                    self._cut = {(node.name, f"broker-{partition.owner}") for node in self._metadata}
                    self._world.network.cut |= self._cut

        self._audit.on_committed = committed
        try:
            yield
        finally:
            self._audit.on_committed = noted

    async def _write(self, writer: KafkaClient, ports: Ports) -> None:
        """Return once the next owner has acknowledged a record."""
        for number in itertools.count():
            value = b"handover/%d" % number
            self._truth.send([value])
            batch = bytes(build_batch([LogRecord(offset=0, timestamp_ms=ports.clock.wall_ms(), key=None, value=value)]))
            with contextlib.suppress(NotServed):
                error, offset = await writer.produce(self._topic, 0, batch)
                if error == NONE:
                    self._truth.acknowledge(0, offset, [value])
                    return
            writer.forget(self._topic, 0)
            await asyncio.sleep(LOOK_S)

    async def _read(self, reader: KafkaClient) -> None:
        """Require that the last owner serves all that is acknowledged, or nothing."""
        until, end = self._world.loop.time() + READ_S, self._truth.ends[0]
        while self._world.loop.time() < until:
            error, watermark, _ = await reader.fetch(self._topic, 0, end - 1, wait_ms=0)
            if error == NONE:
                self._truth.serves(0, watermark, end)
            self._world.coverage.meet(HANDED_OVER_UNNOTICED)
            await asyncio.sleep(LOOK_S)


def _ownership(view: MetadataView, key: str) -> tuple[Partition, int, int] | None:
    """Return the partition, the version of its record, and a broker that may be its next owner; None if it cannot move now."""
    stored = view.get(key)
    live = [each.broker_id for each in view.all(Broker)]
    if stored is None or not isinstance(stored.record, Partition) or stored.record.owner not in live or len(live) < 2:
        return None
    return stored.record, stored.version, next(each for each in live if each != stored.record.owner)
