"""Clients of compacted topics: producers of keyed records, in transactions and without, readers, and who deletes records.

Each producer has keys of its own. ``checkers/compacted_reads.py`` says what readers must find.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

from chaos.compaction.sends import NUMBER, Place, Send

from simulation.checkers.compacted_reads import CompactedReads
from simulation.checkers.coverage import (
    ACKNOWLEDGED,
    COMPACTED_RECORDS_DELETED,
    COMPACTED_RECORDS_KEPT,
    FROM_REPLICA,
)
from simulation.checkers.log_truth import OFFSET_OUT_OF_RANGE
from simulation.checkers.transaction_outcomes import Outcome
from simulation.clients.kafka import DUPLICATE_SEQUENCE, NONE, Fetched, KafkaClient, NotServed
from simulation.clients.producers import NO_ANSWER, RETRIABLE
from simulation.clients.transactions import TransactionalWriter
from simulation.world.machine import Machine, Ports, World
from stratalog_core.batches.batch import TRANSACTIONAL_BIT
from stratalog_core.batches.records import Record, build_batch

KEYS: Final = 6
TOMBSTONE_CHANCE: Final = 0.2
BATCH_RECORDS_MAX: Final = 3
PAUSE_MEAN_S: Final = 0.1
RETRY_S: Final = 0.05
DECISION_BATCHES: Final = 20
BACK_CHANCE: Final = 0.2
"""How often a reader begins anew somewhere earlier: there, history is hot or cold, compacted or not."""
DELETION_MEAN_S: Final = 0.8
POLICY_VIOLATION: Final = 44
PREFERRED_CHANCE: Final = 0.3
"""How often a reader with a rack fetches from any broker, as if an owner had named it."""
FETCH_BYTES: Final = 2_048


def _begin(reads: CompactedReads, place: Place, producer: str, outcome: Outcome | None, draw: random.Random) -> Send:
    """Note the producer's next record, under a random key: some are written often, others rarely."""
    key = f"{producer} {int(KEYS * draw.random() ** 2)}".encode()
    return reads.begin(place, key, outcome, is_tombstone=draw.random() < TOMBSTONE_CHANCE)


def _keyed_batch(
    sends: Sequence[Send], timestamp_ms: int, producer: tuple[int, int], sequence: int, attributes: int = 0
) -> bytes:
    records = [
        Record(
            offset=offset, timestamp_ms=timestamp_ms, key=send.key, value=send.value, headers=((NUMBER, b"%d" % send.number),)
        )
        for offset, send in enumerate(sends)
    ]
    return bytes(
        build_batch(records, producer_id=producer[0], producer_epoch=producer[1], base_sequence=sequence, attributes=attributes)
    )


class KeyedTransactionalWriter(TransactionalWriter):
    """Writes keyed records and tombstones."""

    pause_mean_s = 0.15

    def __init__(self, world: World, reads: CompactedReads, *others: Any, is_v2: bool) -> None:
        super().__init__(world, *others, is_v2=is_v2)
        self._reads = reads
        self._sent: dict[bytes, list[Send]] = {}

    def _make_batch(
        self, outcome: Outcome, partition: int, count: int, ports: Ports, producer: tuple[int, int], sequence: int
    ) -> bytes:
        place = self._topic, partition
        sends = [_begin(self._reads, place, self._name, outcome, ports.random) for _ in range(count)]
        batch = _keyed_batch(sends, ports.clock.wall_ms(), producer, sequence, TRANSACTIONAL_BIT)
        self._sent[batch] = sends
        return batch

    def _acknowledged(self, batch: bytes, base_offset: int) -> None:
        self._reads.acknowledge(self._sent.pop(batch), base_offset)


class KeyedProducer:
    """Idempotent, with one batch in flight, which it repeats until it is acknowledged."""

    def __init__(
        self, world: World, reads: CompactedReads, name: str, topic: str, partitions: int, bootstrap: list[str]
    ) -> None:
        self._world = world
        self._reads = reads
        self._name = name
        self._topic = topic
        self._bootstrap = bootstrap
        self._sequences = [0] * partitions
        self.stop = False
        self.stopped = asyncio.Event()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        producer = await self._identify(client)
        turn = 0
        while not self.stop:
            turn += 1
            if self._world.decides(f"{self._name}/{turn // DECISION_BATCHES}"):
                await self._produce(client, ports, producer, ports.random.randrange(len(self._sequences)))
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))
        self.stopped.set()

    async def _identify(self, client: KafkaClient) -> tuple[int, int]:
        while True:
            try:
                return await client.init_producer_id()
            except NotServed:
                await asyncio.sleep(RETRY_S)

    async def _produce(self, client: KafkaClient, ports: Ports, producer: tuple[int, int], partition: int) -> None:
        place = self._topic, partition
        count = 1 + ports.random.randrange(BATCH_RECORDS_MAX)
        sends = [_begin(self._reads, place, self._name, None, ports.random) for _ in range(count)]
        batch = _keyed_batch(sends, ports.clock.wall_ms(), producer, self._sequences[partition])
        self._sequences[partition] += count
        while True:
            try:
                error, offset = await client.produce(self._topic, partition, batch)
            except NotServed:
                error, offset = NO_ANSWER, -1
            if error in (NONE, DUPLICATE_SEQUENCE):
                break
            assert error == NO_ANSWER or error in RETRIABLE, f"{self._name} got error {error} in {place}"
            client.forget(self._topic, partition)
            await asyncio.sleep(RETRY_S)
        self._world.coverage.meet(ACKNOWLEDGED, count)
        if offset >= 0:
            self._reads.acknowledge(sends, offset)


class RecordDeleter:
    """Deletes records of compacted topics: of those that also delete, and, in vain, of those that are only compacted.

    Checked, also at the next owner: what was deleted is not there any more, and nothing else was deleted.
    """

    def __init__(self, world: World, places: Sequence[Place], only_compacted: frozenset[str], bootstrap: list[str]) -> None:
        assert world.audit is not None
        self._world = world
        self._audit = world.audit
        self._places = places
        self._only_compacted = only_compacted
        self._bootstrap = bootstrap
        self._deleted_to = dict.fromkeys(places, 0)
        """By place: the end of the last acknowledged deletion."""

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap)
        turn = 0
        while True:
            turn += 1
            await asyncio.sleep(ports.random.expovariate(1 / DELETION_MEAN_S))
            place = ports.random.choice(self._places)
            if not self._world.decides(f"{machine.name}#{turn}"):
                continue
            try:
                await self._delete(client, ports, place)
            except NotServed:
                client.forget(*place)

    async def _delete(self, client: KafkaClient, ports: Ports, place: Place) -> None:
        """Delete some of the oldest records. Raises ``NotServed``."""
        start, end = await client.start_offset(*place), await client.end_offset(*place)
        self.check_start(place, start)
        offset = start + ports.random.randrange((end - start) // 2 + 1)
        error = await client.delete_records(*place, offset)
        name, is_kept = f"{place[0]}-{place[1]}", place[0] in self._only_compacted
        if error in RETRIABLE:
            raise NotServed(f"DeleteRecords answers {error}")
        expected = POLICY_VIOLATION if is_kept else NONE
        self._audit.require(error == expected, f"DeleteRecords of {name} below {offset} is answered with {error}")
        self._world.coverage.meet(COMPACTED_RECORDS_KEPT if is_kept else COMPACTED_RECORDS_DELETED)
        if not is_kept:
            self._world.note(f"records of {name} below {offset} are deleted")
            self._deleted_to[place] = max(offset, self._deleted_to[place])

    def check_start(self, place: Place, start: int) -> None:
        """Check the start of a log: only records of topics that also delete are deleted, and stay so."""
        name, deleted_to = f"{place[0]}-{place[1]}", self._deleted_to[place]
        self._audit.require(start >= deleted_to, f"{name} begins at {start}, and was deleted up to {deleted_to}")
        is_right = place[0] not in self._only_compacted or not start
        self._audit.require(is_right, f"{name}, which is only compacted, begins at {start}")


class CompactedReader:
    """Reads all places, from random offsets on, until ``stop`` is set. ``rack``: see ``KafkaClient``."""

    def __init__(
        self,
        world: World,
        reads: CompactedReads,
        places: Sequence[Place],
        bootstrap: list[str],
        rack: str,
        *,
        is_committed: bool,
    ) -> None:
        self._world = world
        self._reads = reads
        self._places = places
        self._bootstrap = bootstrap
        self._rack = rack
        self._is_committed = is_committed
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, rack=self._rack)
        offsets = dict.fromkeys(self._places, 0)
        while not self.stop:
            place = ports.random.choice(self._places)
            offset = offsets[place]
            if ports.random.random() < BACK_CHANCE:
                offset = ports.random.randrange(offset + 1)
            if self._rack and ports.random.random() < PREFERRED_CHANCE:
                client.prefer(*place, ports.random.choice(self._bootstrap))
            offsets[place] = await self._read(client, place, offset)
            await asyncio.sleep(ports.random.expovariate(1 / PAUSE_MEAN_S))

    async def _read(self, client: KafkaClient, place: Place, offset: int) -> int:
        """Read once; return the next offset."""
        fetched = await fetch(client, place, offset, is_committed=self._is_committed)
        if fetched is None or fetched.error != NONE:
            client.forget(*place)
            is_deleted = fetched is not None and fetched.error == OFFSET_OUT_OF_RANGE
            return await start_of(client, place) or offset if is_deleted else offset
        self._world.coverage.meet(FROM_REPLICA, client.was_near and fetched.first_offset >= 0)
        self._reads.read(place, offset, fetched, is_committed=self._is_committed)
        return fetched.next_offset


async def fetch(client: KafkaClient, place: Place, offset: int, *, is_committed: bool) -> Fetched | None:
    """Fetch once; None if there is no answer."""
    try:
        return await client.fetch_isolated(*place, offset, FETCH_BYTES, is_committed=is_committed)
    except NotServed:
        return None


async def start_of(client: KafkaClient, place: Place) -> int | None:
    """Return the start of the log; None if there is no answer."""
    try:
        return await client.start_offset(*place)
    except NotServed:
        client.forget(*place)
        return None
