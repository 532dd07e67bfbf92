"""A simulated object store: slow at times, answering errors, and losing answers of writes that did happen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from simulation.clock import EPOCH_MS
from simulation.loop import SimulatedLoop
from stratalog_core.errors import Conflict, Corrupt, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_core.ports import Buffer
from stratalog_tiering.object_keys import parse_segment_key
from stratalog_tiering.store.base import ObjectInfo, Upload, UploadedPart, check_key, check_range


@dataclass(slots=True)
class StoreFaults:
    """Chances per request."""

    unavailable: float = 0.0
    answer_lost: float = 0.0
    truncated: float = 0.0
    damaged: float = 0.0
    """A segment is stored cut short, and the store says that all is well."""
    delay_mean_s: float = 0.01


@dataclass(slots=True)
class Bucket:
    """What is stored; shared by all clients and untouched by crashes."""

    objects: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    uploads: dict[str, tuple[Upload, dict[int, bytes]]] = field(default_factory=dict)
    faults: StoreFaults = field(default_factory=StoreFaults)
    written: int = 0
    on_deleted: Callable[[Sequence[str]], None] = lambda keys: None


class SimulatedStore:
    """One process's way to a bucket; see :class:`stratalog_tiering.store.base.ObjectStore`."""

    url = "simulated:"

    def __init__(self, bucket: Bucket, loop: SimulatedLoop, randomness: random.Random) -> None:
        self._bucket = bucket
        self._loop = loop
        self._random = randomness

    async def _reach(self) -> None:
        faults = self._bucket.faults
        await asyncio.sleep(self._random.expovariate(1 / faults.delay_mean_s))
        if self._random.random() < faults.unavailable:
            raise Unavailable("the simulated store answers 503")

    async def _answer_write(self) -> None:
        if self._random.random() < self._bucket.faults.answer_lost:
            raise OutcomeUnknown("the simulated store's answer was lost")
        await asyncio.sleep(self._random.expovariate(1 / self._bucket.faults.delay_mean_s))

    def _info(self, key: str) -> ObjectInfo:
        content, written, when = self._bucket.objects[key]
        return ObjectInfo(key=key, size_bytes=len(content), etag=str(written), last_modified_ms=when)

    def _store(self, key: str, content: bytes, *, if_absent: bool) -> ObjectInfo:
        if if_absent and key in self._bucket.objects:
            raise Conflict(f"object {key} exists", key=key)
        self._bucket.written += 1
        if parse_segment_key(key) is not None and self._random.random() < self._bucket.faults.damaged:
            content = content[: self._random.randrange(len(content))]
        self._bucket.objects[key] = (content, self._bucket.written, EPOCH_MS + int(self._loop.time() * 1000))
        return self._info(key)

    async def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = True) -> ObjectInfo:
        await self._reach()
        info = self._store(check_key(key), b"".join(parts), if_absent=if_absent)
        await self._answer_write()
        return info

    def _existing(self, key: str) -> bytes:
        if key not in self._bucket.objects:
            raise NoSuchObject(f"object {key} does not exist", key=key)
        return self._bucket.objects[key][0]

    async def get(self, key: str) -> bytes:
        await self._reach()
        return self._existing(key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        await self._reach()
        content = self._existing(key)[start : start + length]
        if len(content) < length or self._random.random() < self._bucket.faults.truncated:
            raise Corrupt(f"object {key} ends before {start + length}")
        return memoryview(content)

    async def head(self, key: str) -> ObjectInfo:
        await self._reach()
        self._existing(key)
        return self._info(key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._reach()
        for key in sorted(key for key in self._bucket.objects if key.startswith(prefix)):
            yield self._info(key)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._reach()
        self._bucket.on_deleted(keys)
        for key in keys:
            self._bucket.objects.pop(key, None)
        await self._answer_write()

    async def create_upload(self, key: str) -> Upload:
        await self._reach()
        self._bucket.written += 1
        upload = Upload(
            key=check_key(key), upload_id=str(self._bucket.written), initiated_ms=EPOCH_MS + int(self._loop.time() * 1000)
        )
        self._bucket.uploads[upload.upload_id] = (upload, {})
        await self._answer_write()
        return upload

    def _parts(self, upload: Upload) -> dict[int, bytes]:
        if upload.upload_id not in self._bucket.uploads:
            raise NoSuchObject(f"upload {upload.upload_id} of {upload.key} does not exist")
        return self._bucket.uploads[upload.upload_id][1]

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        await self._reach()
        content = b"".join(parts)
        self._parts(upload)[number] = content
        await self._answer_write()
        return UploadedPart(number=number, etag=str(number), size_bytes=len(content))

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart], *, if_absent: bool = True) -> ObjectInfo:
        await self._reach()
        stored = self._parts(upload)
        info = self._store(upload.key, b"".join(stored[part.number] for part in parts), if_absent=if_absent)
        del self._bucket.uploads[upload.upload_id]
        await self._answer_write()
        return info

    async def abort_upload(self, upload: Upload) -> None:
        await self._reach()
        self._bucket.uploads.pop(upload.upload_id, None)
        await self._answer_write()

    async def list_uploads(self) -> AsyncIterator[Upload]:
        await self._reach()
        for upload, _ in list(self._bucket.uploads.values()):
            yield upload

    async def close(self) -> None:
        pass
