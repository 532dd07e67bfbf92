"""Fixtures of the tiering tests: stores in a temporary directory, stores that misbehave, batches with known records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio
from support.archive_writer import ArchiveWriter
from support.embedded_quorum import embedded_quorum
from unit.metadata.watching import until

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.checkpoint import Checkpoint, encode_checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer, Clock
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    TierStatus,
    Topic,
    log_key,
    manifest_pointer_key,
    tier_status_key,
)
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.store import KeyRing, Locked, ObjectInfo, ObjectStore, StoreFeatures, Upload, UploadedPart, open_store
from stratalog_tiering.worker.worker import TieringWorker

BatchMaker = Callable[..., list[bytes]]


class FaultyStore:
    """A real store whose calls can be counted, delayed, failed before, or failed after they took effect."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], BaseException | None] = lambda name, key: None
        self.after: Callable[[str, str], BaseException | None] = lambda name, key: None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.deleted = asyncio.Event()
        self.held: Callable[[str], bool] = lambda key: False
        """Objects that are kept from being deleted, as under a legal hold."""

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def keys(self) -> KeyRing:
        return self._inner.keys

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    async def _enter(self, name: str, key: str) -> None:
        self.calls.append((name, key))
        self.entered.set()
        failure = self.before(name, key)
        if failure is not None:
            raise failure
        if self.gate is not None:
            await self.gate.wait()

    def _leave(self, name: str, key: str) -> None:
        failure = self.after(name, key)
        if failure is not None:
            raise failure

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        await self._enter("put", key)
        await self._inner.put(key, parts, if_absent=if_absent, storage_class=storage_class, lock=lock)
        self._leave("put", key)

    async def get(self, key: str) -> bytes:
        await self._enter("get", key)
        return await self._inner.get(key)

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        await self._enter("get_range", key)
        return await self._inner.get_range(key, start, length, uncached=uncached, or_less=or_less)

    async def head(self, key: str) -> ObjectInfo:
        await self._enter("head", key)
        return await self._inner.head(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._enter("list", prefix)
        async for info in self._inner.list(prefix):
            yield info

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list(prefix):
            yield info.key

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._enter("delete", key)
        held = [key for key in keys if self.held(key)]
        await self._inner.delete([key for key in keys if key not in held])
        self.deleted.set()
        if held:
            raise Locked("held", until_ms=0, keys=held)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        await self._enter("create_upload", key)
        return await self._inner.create_upload(key, part_bytes, storage_class, lock, if_absent=if_absent)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        await self._enter("put_part", upload.key)
        return await self._inner.put_part(upload, number, parts)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        await self._enter("complete_upload", upload.key)
        checksum = await self._inner.complete_upload(upload, parts)
        self._leave("complete_upload", upload.key)
        return checksum

    async def abort_upload(self, upload: Upload) -> None:
        await self._enter("abort_upload", upload.key)
        await self._inner.abort_upload(upload)

    async def list_uploads(self) -> AsyncIterator[Upload]:
        async for upload in self._inner.list_uploads():
            yield upload

    async def features(self, key: str) -> StoreFeatures:
        await self._enter("features", key)
        return await self._inner.features(key)

    async def close(self) -> None:
        await self._inner.close()


@pytest.fixture
def background() -> Iterator[ThreadBackground]:
    threads = ThreadBackground(4, "test")
    yield threads
    threads.close()


@pytest.fixture
def store_directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest_asyncio.fixture
async def store(store_directory: Path, background: ThreadBackground) -> FaultyStore:
    inner = open_store(str(store_directory), background=background, clock=SystemClock(), random=random.Random(3))
    return FaultyStore(inner)


@pytest.fixture
def topic() -> Topic:
    return Topic(
        name="flights", topic_id=UUID(int=0xAA), partition_count=2, replication_factor=1, configs={"retention.ms": "-1"}
    )


@pytest.fixture
def new_writer(store: FaultyStore, topic: Topic) -> Callable[..., ArchiveWriter]:
    limits = ManifestLimits(inline_segments_max=4, page_segments=2, page_fan_in=3)

    def make(*, block_bytes_target: int = 400, zstd_level: int | None = None, version_objects: bool = False) -> ArchiveWriter:
        return ArchiveWriter(
            store, topic, SystemClock(), random.Random(5), block_bytes_target=block_bytes_target, limits=limits,
            zstd_level=zstd_level, version_objects=version_objects,
        )  # fmt: skip

    return make


@pytest.fixture
def writer(new_writer: Callable[..., ArchiveWriter]) -> ArchiveWriter:
    return new_writer()


@pytest.fixture
def make_batches() -> BatchMaker:
    def make(
        base_offset: int, counts: Sequence[int], *, timestamps: Sequence[int] | None = None, epoch: int = 0
    ) -> list[bytes]:
        """Batches of so many records; ``timestamps`` go to records in order (default: the offset)."""
        batches, offset, times = [], base_offset, iter(timestamps or ())
        for count in counts:
            records = [
                Record(offset=offset + step, timestamp_ms=next(times, offset + step), key=b"key", value=b"v" * 40)
                for step in range(count)
            ]
            batches.append(bytes(build_batch(records, leader_epoch=epoch)))
            offset += count
        return batches

    return make


class MemoryLedgers:
    """The ledgers of a test: entries in memory, behind tiering's port; reads give a few entries at a time."""

    def __init__(self) -> None:
        self.entries: dict[int, list[bytes]] = {}
        self.deleted: list[int] = []
        self.failures: list[BaseException] = []

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> list[LedgerEntry]:
        if self.failures:
            raise self.failures.pop(0)
        stored = self.entries[ledger.ledger_id]
        return [LedgerEntry(number, memoryview(stored[number])) for number in range(first, min(last, first + 2) + 1)]

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> list[EntryHead]:
        stored = self.entries[ledger.ledger_id][first : last + 1]
        return [EntryHead(number, len(entry), entry[:61]) for number, entry in enumerate(stored, first)]

    async def read_lac(self, ledger: Ledger) -> int:
        return len(self.entries[ledger.ledger_id]) - 1

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        self.deleted.extend(ledger_ids)


class EntryHead(NamedTuple):
    entry_id: int
    payload_bytes: int
    head: bytes


class LedgerEntry(NamedTuple):
    entry_id: int
    payload: memoryview


async def trust_store() -> None:
    """Check nothing."""


class TestCluster:
    """A real metadata node, ledgers in memory, a local store, and tiering workers as a test wants them."""

    __test__ = False

    def __init__(self, metadata: QuorumClient, store: FaultyStore, topic: Topic, background: ThreadBackground) -> None:
        self.metadata = metadata
        self.store = store
        self.topic = topic
        self.background = background
        self.ledgers = MemoryLedgers()
        self._next_ledger = 1
        self._workers: list[TieringWorker] = []

    async def create_topic(self) -> None:
        logs = (Log(topic_id=self.topic.topic_id, index=index) for index in range(self.topic.partition_count))
        await self.metadata.propose(Command(updates=(Put(record=self.topic), *(Put(record=log) for log in logs))))

    def log(self, partition: int = 0) -> Log:
        found = self.metadata.view.find(Log, log_key(self.topic.topic_id, partition))
        assert found is not None
        return found

    def pointer(self, partition: int = 0) -> ManifestPointer | None:
        return self.metadata.view.find(ManifestPointer, manifest_pointer_key(self.topic.topic_id, partition))

    def status(self, partition: int = 0) -> TierStatus | None:
        return self.metadata.view.find(TierStatus, tier_status_key(self.topic.topic_id, partition))

    def last_error(self, partition: int = 0) -> str:
        status = self.status(partition)
        return status.last_error if status is not None else ""

    async def add_ledger(
        self,
        batches: Sequence[bytes],
        base_offset: int,
        *,
        partition: int = 0,
        closed: bool = True,
        checkpoint: Checkpoint | None = None,
        leader_epoch: int = 0,
    ) -> Ledger:
        """Append a ledger of a checkpoint and ``batches`` to the partition's log."""
        parts = encode_checkpoint(checkpoint or Checkpoint(offset=base_offset))
        entries = [*parts, *batches]
        end_offset = read_header(batches[-1]).next_offset if batches else base_offset
        ledger = Ledger(
            ledger_id=self._next_ledger,
            topic_id=self.topic.topic_id,
            partition=partition,
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            write_quorum=1,
            ack_quorum=1,
            fragments=(Fragment(first_entry=0, bookies=("bookie",)),),
            state=LedgerState.CLOSED if closed else LedgerState.OPEN,
            last_entry=len(entries) - 1 if closed else -1,
            payload_bytes=sum(map(len, entries)) if closed else 0,
            end_offset=end_offset if closed else -1,
            closed_at_ms=SystemClock().wall_ms() if closed else 0,
        )
        self._next_ledger += 1
        self.ledgers.entries[ledger.ledger_id] = entries
        ref = LedgerRef(ledger_id=ledger.ledger_id, base_offset=base_offset, leader_epoch=leader_epoch)
        while not await self._append(ledger, ref):
            pass
        return ledger

    async def _append(self, ledger: Ledger, ref: LedgerRef) -> bool:
        """Append as an owner does: only if tiering has not changed the log concurrently."""
        found = self.metadata.view.get(log_key(ledger.topic_id, ledger.partition))
        assert found is not None
        log = msgspec.structs.replace(self.log(ledger.partition), ledgers=(*self.log(ledger.partition).ledgers, ref))
        unchanged = VersionIs(key=log.key(), version=found.version)
        try:
            await self.metadata.propose(Command(updates=(Put(record=ledger), Put(record=log)), requirements=(unchanged,)))
        except Conflict:
            return False
        return True

    async def start_worker(
        self,
        worker_id: str = "worker-1",
        *,
        clock: Clock | None = None,
        check_store: Callable[[], Awaitable[None]] = trust_store,
        second: ObjectStore | None = None,
        **settings: Any,
    ) -> TieringWorker:
        """A worker with short intervals; ``settings`` override."""
        defaults: dict[str, Any] = {
            "deletion_lag_ms": 0, "retention_interval_ms": 20, "sweep_interval_ms": 20, "retry_ms_max": 50, "block_bytes": 4096,
        }  # fmt: skip
        worker = TieringWorker(
            TieringSettings(worker_id=worker_id, **{**defaults, **settings}), self.metadata, self.store, self.ledgers,
            clock or SystemClock(), random.Random(worker_id), self.background, check_store=check_store,
            second=second,
        )  # fmt: skip
        self._workers.append(worker)
        await worker.start()
        return worker

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until the condition holds, mostly one of metadata's view."""
        await until(self.metadata, condition, timeout_s)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, store: FaultyStore, topic: Topic, background: ThreadBackground) -> AsyncIterator[TestCluster]:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as quorum:
        made = TestCluster(quorum.client, store, topic, background)
        await made.create_topic()
        yield made
        await made.close()
    await transport.close()
