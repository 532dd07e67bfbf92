"""What the tiering tests share: stores in a temporary directory, stores that misbehave, batches with known records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from uuid import UUID

import pytest
import pytest_asyncio

from stratalog_core.ports import Buffer
from stratalog_core.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.archive_writer import ArchiveWriter
from stratalog_tiering.manifest_edit import ManifestLimits
from stratalog_tiering.store import ObjectInfo, ObjectStore, Upload, UploadedPart, open_store

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

    @property
    def url(self) -> str:
        return self._inner.url

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

    async def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = True) -> ObjectInfo:
        await self._enter("put", key)
        info = await self._inner.put(key, parts, if_absent=if_absent)
        self._leave("put", key)
        return info

    async def get(self, key: str) -> bytes:
        await self._enter("get", key)
        return await self._inner.get(key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        await self._enter("get_range", key)
        return await self._inner.get_range(key, start, length)

    async def head(self, key: str) -> ObjectInfo:
        await self._enter("head", key)
        return await self._inner.head(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._enter("list", prefix)
        async for info in self._inner.list(prefix):
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._enter("delete", key)
        await self._inner.delete(keys)

    async def create_upload(self, key: str) -> Upload:
        await self._enter("create_upload", key)
        return await self._inner.create_upload(key)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        await self._enter("put_part", upload.key)
        return await self._inner.put_part(upload, number, parts)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart], *, if_absent: bool = True) -> ObjectInfo:
        await self._enter("complete_upload", upload.key)
        info = await self._inner.complete_upload(upload, parts, if_absent=if_absent)
        self._leave("complete_upload", upload.key)
        return info

    async def abort_upload(self, upload: Upload) -> None:
        await self._enter("abort_upload", upload.key)
        await self._inner.abort_upload(upload)

    async def list_uploads(self) -> AsyncIterator[Upload]:
        async for upload in self._inner.list_uploads():
            yield upload

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
    return Topic(name="flights", topic_id=UUID(int=0xAA), partition_count=2, replication_factor=1)


@pytest.fixture
def writer(store: FaultyStore, topic: Topic) -> ArchiveWriter:
    limits = ManifestLimits(inline_segments_max=4, page_segments=2, page_fan_in=3)
    return ArchiveWriter(store, topic, SystemClock(), random.Random(5), block_bytes_target=400, limits=limits)


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
