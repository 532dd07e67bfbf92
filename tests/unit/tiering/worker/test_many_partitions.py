"""A worker with ten thousand partitions: idle ones cost next to nothing, and sealed ledgers do not wait behind them.

In simulated time, with the metadata's state machine and a store that answers in 30 ms. Requests are counted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from simulation.world.background import SimulatedBackground
from simulation.world.clock import SimulatedClock
from simulation.world.loop import SimulatedLoop
from simulation.world.object_store import Bucket, SimulatedStore

from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_metadata.client.memory_metadata import MemoryMetadata
from stratalog_metadata.records import (
    Cluster,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Topic,
    log_key,
    manifest_pointer_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.format.manifest import SegmentEntry, empty_manifest, pointer_to, segment_entry
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.object_keys import marker_key, segment_key
from stratalog_tiering.format.segment import SegmentIdentity, SegmentWriter
from stratalog_tiering.offload.ports import EntryHead
from stratalog_tiering.worker.worker import TieringWorker

TOPICS: Final = 100
PARTITIONS: Final = 100
HOUR_S: Final = 3600.0
RECORDS: Final = 3
SEALS_PER_S: Final = TOPICS * PARTITIONS / HOUR_S


class Entry(NamedTuple):
    entry_id: int
    payload: memoryview


class Ledgers:
    """Sealed ledgers in memory."""

    def __init__(self) -> None:
        self.entries: dict[int, list[bytes]] = {}

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> list[Entry]:
        return [Entry(number, memoryview(self.entries[ledger.ledger_id][number])) for number in range(first, last + 1)]

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        raise AssertionError("the store is never away here")

    async def read_lac(self, ledger: Ledger) -> int:
        raise AssertionError("the store is never away here")

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        for ledger_id in ledger_ids:
            self.entries.pop(ledger_id, None)


class CountedStore(SimulatedStore):
    """Counts every request that reaches it."""

    requests = 0

    async def _reach(self) -> None:
        self.requests += 1
        await super()._reach()


class Many:
    """Ten thousand partitions, each with one cold segment and nothing hot."""

    def __init__(self) -> None:
        self.loop = SimulatedLoop()
        self.clock = SimulatedClock(self.loop)
        self.bucket = Bucket()
        self.bucket.faults.delay_mean_s = 0.03
        self.store = CountedStore(self.bucket, self.loop, random.Random(1))
        self.ledgers = Ledgers()
        self.metadata = MemoryMetadata()
        self.topics = [UUID(int=number) for number in range(1, TOPICS + 1)]
        self._ledger_ids = iter(range(1, 1_000_000))

    async def make(self) -> None:
        await self.metadata.propose(Command(updates=(Put(record=Cluster(cluster_id="AAAAAAAAAAAAAAAAAAAAAA")),)))
        segment = self._segment()
        for topic_id in self.topics:
            topic = Topic(name=f"topic-{topic_id.int}", topic_id=topic_id, partition_count=PARTITIONS, replication_factor=1)
            updates = [Put(record=topic)]
            for index in range(PARTITIONS):
                log = Log(topic_id=topic_id, index=index)
                updates += [Put(record=log), Put(record=self._manifest(topic, index, segment))]
            await self.metadata.propose(Command(updates=tuple(updates)))

    def _batch(self, base_offset: int) -> bytes:
        now_ms = self.clock.wall_ms()
        records = [Record(offset=base_offset + n, timestamp_ms=now_ms, key=None, value=b"v") for n in range(RECORDS)]
        return bytes(build_batch(records))

    def _segment(self) -> tuple[SegmentEntry, bytes]:
        identity = SegmentIdentity(
            cluster_id="c", topic_id=UUID(int=1), topic_name="t", partition=0, base_offset=0, ledger_ids=(1,)
        )
        writer = SegmentWriter(identity, 4096)
        writer.append(self._batch(0))
        written = writer.finish(created_at_ms=self.clock.wall_ms())
        return segment_entry("", written), written.leaves

    def _manifest(self, topic: Topic, index: int, segment: tuple[SegmentEntry, bytes]) -> ManifestPointer:
        entry, leaves = segment
        first = Previous(manifest=empty_manifest(topic.topic_id, topic.name, index, 0))
        edit = ManifestEdit(first, writer="test", random_id=lambda: 7)
        edit.append(msgspec.structs.replace(entry, key=segment_key(topic.topic_id, index, 0, 0, 7)), leaves)
        new = edit.finish(created_at_ms=self.clock.wall_ms())
        for key, content in ((new.key, new.content), (marker_key(new.key), b"{}")):
            self.bucket.objects[key] = (content, 1, self.clock.wall_ms())
        return pointer_to(new.manifest, new.key, new.sha256)

    async def seal(self, topic_id: UUID, index: int) -> None:
        """A ledger of the partition is sealed."""
        entries = [*encode_checkpoint(Checkpoint(offset=RECORDS)), self._batch(RECORDS)]
        ledger = Ledger(
            ledger_id=next(self._ledger_ids), topic_id=topic_id, partition=index, base_offset=RECORDS, leader_epoch=0,
            write_quorum=1, ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("b",)),), state=LedgerState.CLOSED,
            last_entry=len(entries) - 1, payload_bytes=100, end_offset=2 * RECORDS, closed_at_ms=self.clock.wall_ms(),
        )  # fmt: skip
        self.ledgers.entries[ledger.ledger_id] = entries
        log = self.metadata.find(Log, log_key(topic_id, index))
        assert log is not None
        ref = LedgerRef(ledger_id=ledger.ledger_id, base_offset=RECORDS, leader_epoch=0)
        log = msgspec.structs.replace(log, ledgers=(ref,))
        await self.metadata.propose(Command(updates=(Put(record=ledger), Put(record=log))))

    async def offloaded_within_s(self, topic_id: UUID, index: int) -> float:
        """Return the time until a ledger that is sealed now is cold."""
        began_s = self.loop.time()
        await self.seal(topic_id, index)
        while True:
            pointer = self.metadata.find(ManifestPointer, manifest_pointer_key(topic_id, index))
            assert pointer is not None
            if pointer.end_offset == 2 * RECORDS:
                return self.loop.time() - began_s
            await asyncio.sleep(0.5)

    async def lags_s(self, names: Sequence[tuple[UUID, int]], window_s: float) -> list[float]:
        """Seal a ledger of each partition, at random times within ``window_s``; return how long each took to be cold."""
        sealed_s: dict[tuple[UUID, int], float] = {}
        cold_s: dict[tuple[UUID, int], float] = {}

        def follow(changes: Sequence[Change]) -> None:
            for change in changes:
                pointer = change.after.record if change.after is not None else None
                if isinstance(pointer, ManifestPointer) and pointer.end_offset == 2 * RECORDS:
                    cold_s.setdefault((pointer.topic_id, pointer.index), self.loop.time())

        stop, began_s, randomness = self.metadata.subscribe(follow), self.loop.time(), random.Random(4)
        for at_s, name in zip(sorted(randomness.uniform(0, window_s) for _ in names), names, strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - self.loop.time()))
            sealed_s[name] = self.loop.time()
            await self.seal(*name)
        while not all(name in cold_s for name in names):  # noqa: ASYNC110 - `follow` sees each commit
            await asyncio.sleep(1.0)
        stop()
        return sorted(cold_s[name] - sealed_s[name] for name in names)

    def worker(self, **changes: Any) -> TieringWorker:
        background = SimulatedBackground(self.loop, random.Random(2))
        settings = TieringSettings(worker_id="worker-1", **changes)
        return TieringWorker(settings, self.metadata, self.store, self.ledgers, self.clock, random.Random(3), background)


def test_ten_thousand_idle_partitions_cost_little_and_keep_no_ledger_waiting() -> None:
    many = Many()
    found: Counter[str] = Counter()
    lags_s: list[float] = []

    async def scenario() -> None:
        await many.make()
        worker = many.worker()
        await worker.start()
        waits_s = [await many.offloaded_within_s(many.topics[number], number) for number in range(5)]
        await asyncio.sleep(HOUR_S)
        before = many.store.requests
        await asyncio.sleep(HOUR_S)
        found["requests"] = many.store.requests - before
        waits_s += [await many.offloaded_within_s(many.topics[number], number) for number in range(5, 10)]
        found["longest wait"] = int(max(waits_s))
        lags_s.extend(await many.lags_s([(topic_id, 50) for topic_id in many.topics], TOPICS / SEALS_PER_S))
        await worker.close()

    try:
        many.loop.run_until_complete(scenario())
    finally:
        many.loop.finish()
        many.loop.close()
    assert many.loop.failure is None
    assert found["requests"] < TOPICS * PARTITIONS, "less than one request an hour for each idle partition"
    assert found["longest wait"] < 30, "seconds until a sealed ledger was cold"
    assert lags_s[int(0.99 * len(lags_s))] < 60, "seconds until a ledger is cold, if each partition seals one in an hour"
