"""Scenario: a compacted topic in the object store, with tombstones and transactions, while workers crash and the store fails.

An owner appends ledgers of keyed records, some in transactions that commit or abort, some that expire. Workers offload and
compact them, with a map of four keys, so that a pass needs several rounds; they crash, stop and lose answers. Beside them the
core of ``stratalog job compact`` removes superseded records that it has found some time before. Checked at every commit: the
newest committed record of each key is there and unchanged, a tombstone or an expired record until ``delete.retention.ms`` after
the start of the pass that compacted it first as one; no offset holds another record than was written; in what is compacted,
each key occurs once and no record of an aborted transaction is left. At the end everything is compacted and read back as a
broker reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from simulation.checkers.audit import Audit
from simulation.checkers.compacted import CompactedHistory, Written
from simulation.checkers.coverage import COMPACTED, EXPIRED_DELETED, TOMBSTONE_DELETED
from simulation.clients.history_compactor import HistoryCompactor
from simulation.clients.sealed_ledgers import LedgersOfProcess, append_sealed, end_of
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.checker_machine import run_in_checker
from simulation.world import roles
from simulation.world.clock import SimulatedClock
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults
from stratalog_core.batches.batch import CONTROL_BIT, TRANSACTIONAL_BIT
from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    Ledger,
    Log,
    ManifestPointer,
    TierRequest,
    Topic,
    log_key,
    manifest_pointer_key,
    tier_request_key,
)
from stratalog_metadata.records import Record as MetadataRecord
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, Put
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.compaction_plan import Cleanable, cleanable
from stratalog_tiering.core.policy import CompactionPolicy
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.maintenance import compaction as maintenance
from stratalog_tiering.maintenance.compaction import KEY_BYTES
from stratalog_tiering.offload.ports import WorkerPorts, worker_ports
from stratalog_tiering.worker.worker import TieringWorker

RETENTION_MS: Final = 4_000
TOPIC: Final = Topic(
    name="compacted", topic_id=UUID(int=0xC), partition_count=1, replication_factor=1,
    configs={
        "cleanup.policy": "compact", "delete.retention.ms": str(RETENTION_MS), "min.cleanable.dirty.ratio": "0.2",
        "min.compaction.lag.ms": "300", "max.compaction.lag.ms": "4000", "stratalog.record.expiry.header": "expires",
    },
)  # fmt: skip
KEYS: Final = (*(b"key %d" % number for number in range(16)), *(b"a key longer than its digest, %d" % n for n in range(8)))
"""The first ones are written most."""
MAP_KEYS: Final = 4
MARKERS: Final = {False: b"\x00\x00\x00\x00", True: b"\x00\x00\x00\x01"}
PRODUCER: Final = 7
FAULTS_S: Final = 12.0
QUIET_S: Final = 4.0
FINISH_S: Final = 60.0
LOOK_S: Final = 0.25
READ_AT_ONCE: Final = 200


class Sealed(NamedTuple):
    """The content of one ledger."""

    base_offset: int
    batches: tuple[bytes, ...]


class Ledgers:
    """Sealed ledgers that every process can read, behind tiering's port."""

    def __init__(self) -> None:
        self.sealed: dict[int, Sealed] = {}

    def entries(self, ledger_id: int) -> list[bytes]:
        sealed = self.sealed[ledger_id]
        return [*encode_checkpoint(Checkpoint(offset=sealed.base_offset)), *sealed.batches]


class Owner:
    """Appends sealed ledgers, and tells the checker what they hold."""

    def __init__(self, ledgers: Ledgers, history: CompactedHistory) -> None:
        self._ledgers = ledgers
        self._history = history
        self.stop = False

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        while True:
            await asyncio.sleep(ports.random.uniform(0.2, 0.6))
            if not self.stop:
                await self._append(client, ports)

    async def _append(self, client: QuorumClient, ports: Ports) -> None:
        found = client.view.get(log_key(TOPIC.topic_id, 0))
        if found is None or not isinstance(found.record, Log):
            return
        base, now_ms = end_of(client.view, found.record), ports.clock.wall_ms()
        batches, written = _content(ports, base, now_ms)
        ledger_id, offsets = len(self._ledgers.sealed) + 1, range(base, base + len(written))
        self._ledgers.sealed[ledger_id] = Sealed(base, batches)
        self._history.offer(ledger_id, written)
        await append_sealed(client, found.record, found.version, ledger_id, batches, offsets, now_ms)


def _content(ports: Ports, base: int, now_ms: int) -> tuple[tuple[bytes, ...], list[Written]]:
    """The batches of a ledger, and their records. A transaction begins and ends in one ledger."""
    batches, written = list[bytes](), list[Written]()
    for _ in range(ports.random.randint(1, 3)):
        rows = [
            (
                KEYS[int(len(KEYS) * ports.random.random() ** 2)],
                None if ports.random.random() < 0.2 else b"%d" % (base + len(written) + step),
            )
            for step in range(ports.random.randint(1, 4))
        ]
        kind = ports.random.choice(["plain", "plain", "committed", "aborted"])
        producer: dict[str, int] = {}
        if kind != "plain":
            producer = {"producer_id": PRODUCER, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT}
        first = base + len(written)
        records = [
            Record(offset=first + step, timestamp_ms=now_ms, key=key, value=value, headers=_headers(first + step, now_ms))
            for step, (key, value) in enumerate(rows)
        ]
        sequence = {"base_sequence": first} if producer else {}
        codec = ports.random.choice([0, 4])
        batches.append(bytes(build_batch(records, compression=codec, **producer, **sequence)))
        written += [Written(each.offset, each.key, each.value, kind != "aborted", _expires_ms(each)) for each in records]
        if producer:
            producer["attributes"] |= CONTROL_BIT
            marker = Record(offset=base + len(written), timestamp_ms=now_ms, key=MARKERS[kind == "committed"], value=bytes(6))
            batches.append(bytes(build_batch([marker], **producer)))
            written.append(Written(marker.offset, None, None, is_committed=False))
    return tuple(batches), written


def _headers(offset: int, now_ms: int) -> tuple[tuple[str, bytes], ...]:
    """Every third record expires: after 1 to 3 s, or long after the run."""
    after_ms = 3_600_000 if offset % 2 else 1_000 + offset * 37 % 2_000
    return () if offset % 3 else (("expires", b"%d" % (now_ms + after_ms)),)


def _expires_ms(record: Record) -> int | None:
    return int(record.headers[0][1] or b"") if record.headers else None


async def _fulfilled(client: QuorumClient) -> None:
    while True:
        (request,) = await client.read([tier_request_key(TOPIC.topic_id, 0)])
        if request is None:
            return
        await asyncio.sleep(LOOK_S)


class CompactionAudit(Audit):
    """Also checks each version of the compacted history, but no epochs: the single owner is no broker."""

    def __init__(self, world: World, bucket: Bucket) -> None:
        super().__init__(world.note, bucket)
        # Delete horizons are compared with it.
        self.history = CompactedHistory(self.require, bucket, SimulatedClock(world.loop).wall_ms, RETENTION_MS)

    def _check(self, change: Change) -> None:
        super()._check(change)
        record: MetadataRecord | None = change.after.record if change.after is not None else None
        if isinstance(record, Ledger):
            self.history.appended(record.ledger_id)
        elif isinstance(record, ManifestPointer):
            self.history.check(record)

    def _log_changed(self, before: Log, after: Log) -> None:
        self.require(after.log_start_offset == before.log_start_offset, f"the start of {after.key()} moved")


@contextlib.contextmanager
def observed_passes(passes_ms: set[int]) -> Iterator[None]:
    """Collect the times at which workers look for something to compact, from which a pass counts, while the context lasts."""

    def observed(segments: Sequence[SegmentEntry], policy: CompactionPolicy, hot_offset: int, now_ms: int) -> Cleanable:
        passes_ms.add(now_ms)
        return cleanable(segments, policy, hot_offset, now_ms)

    setattr(maintenance, "cleanable", observed)  # noqa: B010 - it is a function to the type checker
    try:
        yield
    finally:
        setattr(maintenance, "cleanable", cleanable)  # noqa: B010


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bucket = Bucket()
        self.audit = CompactionAudit(world, self.bucket)
        world.audit = self.audit
        self.history = self.audit.history
        self.bucket.on_deleted = self.audit.deleted
        self.ledgers = Ledgers()
        self.owner = Owner(self.ledgers, self.history)
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        self.tiering = [Machine(world, f"tiering-{number}", self._run_worker) for number in (1, 2)]
        self.owners = [Machine(world, "owner-0", self.owner.run)]
        self.compactor = HistoryCompactor(world, TOPIC.topic_id, self._job_ports)
        self.jobs = [Machine(world, "job-0", self.compactor.run)]
        for machine in [*self.tiering, *self.jobs, *self.owners]:
            machine.clock = SimulatedClock(world.loop)  # delete horizons are compared

    def simulate(self) -> None:
        with observed_passes(self.history.passes_ms):
            self.world.loop.run_until_complete(self._run())

    async def _run_worker(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        settings = TieringSettings(
            worker_id=f"{machine.name}-{machine.starts}", session_lease_ms=2_000, deletion_lag_ms=200, block_bytes=256,
            segment_bytes=2_000, grace_ms=4_000, retention_interval_ms=200, sweep_interval_ms=2_000, retry_ms_max=500,
            compaction_map_bytes=MAP_KEYS * KEY_BYTES,
        )  # fmt: skip
        store = SimulatedStore(self.bucket, ports.loop, ports.random)
        source = LedgersOfProcess(self.ledgers.entries, ports.random)
        await TieringWorker(settings, metadata, store, source, ports.clock, ports.random, ports.background).start()
        await asyncio.Event().wait()

    def _job_ports(self, client: QuorumClient, ports: Ports) -> WorkerPorts:
        store, source = (
            SimulatedStore(self.bucket, ports.loop, ports.random),
            LedgersOfProcess(self.ledgers.entries, ports.random),
        )
        settings = TieringSettings(worker_id="job-compact", block_bytes=256)
        return worker_ports(settings, client, store, source, ports.clock, ports.random, ports.background)

    async def _run(self) -> None:
        for machine in self.metadata:
            machine.boot()
        await self._in_checker(self._create_topic)
        for machine in [*self.tiering, *self.jobs, *self.owners]:
            machine.boot()
        plan = NemesisPlan(crash=0.3, stop=0.3, partition=0.1, one_way=0, lossy=0, clock_jump=0, pause_mean_s=1.0)
        machines = [*self.tiering, *self.jobs]
        nemesis = Nemesis(self.world, machines, plan, name="tiering", everyone=[*self.metadata, *machines])
        task = asyncio.get_running_loop().create_task(nemesis.run())
        if self.world.decides("store"):
            self.bucket.faults = StoreFaults(
                unavailable=0.03, answer_lost=0.03, damaged=0.02, truncated=0.02, slow=0.02, happens_later=0.02,
                listing_lag_s=3.0,
            )  # fmt: skip
        await self._pass_time(FAULTS_S)
        self.bucket.faults = StoreFaults()
        nemesis.stop()
        task.cancel()
        for machine in machines:
            machine.boot()
        await self._pass_time(QUIET_S)
        self.owner.stop = self.compactor.stop = True
        await self._pass_time(1.0)
        await self._in_checker(self._compact_everything)
        await self._in_checker(self._read_everything)
        self.world.coverage.meet(COMPACTED, self.history.compacted_segments)
        self.world.coverage.meet(TOMBSTONE_DELETED, self.history.deleted_tombstones)
        self.world.coverage.meet(EXPIRED_DELETED, self.history.expired_records)
        self.world.note(
            f"{len(self.history.records)} records, {self.history.compacted_segments} compacted segments,"
            f" {self.history.deleted_tombstones} tombstones deleted"
        )

    async def _create_topic(self, machine: Machine, ports: Ports) -> None:
        client = await roles.connect_metadata(ports)
        log = Log(topic_id=TOPIC.topic_id, index=0)
        await client.propose(Command(updates=(Put(record=TOPIC), Put(record=log))))

    async def _compact_everything(self, machine: Machine, ports: Ports) -> None:
        """Request a compaction when nothing is young any more, twice: the second one finds all horizons over."""
        client = await roles.connect_metadata(ports)
        for _ in range(2):
            await asyncio.sleep(RETENTION_MS / 1000 + 0.5)
            request = TierRequest(
                topic_id=TOPIC.topic_id, index=0, end_offset=self.history.end_offset, delete_hot=True, compact=True
            )
            await client.propose(Command(updates=(Put(record=request),)))
            await _fulfilled(client)
        self.history.require_compacted()

    async def _read_everything(self, machine: Machine, ports: Ports) -> None:
        """Check that a reader finds the records that the segments hold, across all gaps."""
        reader = ColdReader(SimulatedStore(self.bucket, ports.loop, ports.random), ColdReaderSettings(), ports.clock)
        pointer = self.audit.records[manifest_pointer_key(TOPIC.topic_id, 0)]
        assert isinstance(pointer, ManifestPointer)
        for start in sorted({0, *ports.random.sample(range(pointer.end_offset), 5)}):
            offset, found = start, dict[int, bytes | None]()
            while offset < pointer.end_offset:
                run = await reader.fetch(pointer, offset, READ_AT_ONCE, 10.0)
                assert run.end_offset > offset, f"a read at offset {offset} makes no progress"
                found.update(self.history.read(run.batches, offset))
                offset = run.end_offset
            expected = {each: value for each, value in self.history.present.items() if each >= start}
            assert found == expected, f"read from offset {start}: {found}, not {expected}"
        await reader.close()

    async def _in_checker(self, work: Callable[[Machine, Ports], Any]) -> None:
        await run_in_checker(self.world, work, FINISH_S)
        self._check()

    async def _pass_time(self, seconds: float) -> None:
        until = self.world.loop.time() + seconds
        while self.world.loop.time() < until:
            await asyncio.sleep(min(LOOK_S, max(0.001, until - self.world.loop.time())))
            self._check()

    def _check(self) -> None:
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.metadata, *self.tiering, *self.jobs, *self.owners]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
