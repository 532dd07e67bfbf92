"""A simulated object store: slow at times, returning errors, truncating answers, and losing answers to writes.

An unanswered write has taken effect, or takes effect later, when its caller no longer waits for it. For a while the store may
carry out no write and no deletion, although it answers reads (``WriteFault``). A listing may lag: it does
not show new objects yet, and still shows deleted ones.

A bucket may keep versions and lock them, as S3 does: a lock belongs to a version, and a deletion, which names all versions of
its keys, leaves those that are locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from simulation.world.clock import EPOCH_MS
from simulation.world.loop import SimulatedLoop
from stratalog_core.errors import (
    Conflict,
    Corrupt,
    Invalid,
    NoSuchObject,
    OutcomeUnknown,
    Refused,
    StorageFailed,
    StratalogError,
    Unavailable,
)
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Buffer
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.format.object_keys import parse_segment_key
from stratalog_tiering.store.base import (
    DATA_KEY_BYTES,
    Locked,
    ObjectInfo,
    StoreFeatures,
    Upload,
    UploadedPart,
    check_key,
    check_range,
)
from stratalog_tiering.store.checksums import crc_text

LATER_S: Final = 4.0
SLOW_S: Final = 5.0
STALL_S: Final = 10.0
WRITE_STALL_S: Final = 2.5
"""Much shorter than the retention of a topic that expires, as it is in reality."""
HELD_LOOK_S: Final = 0.01


class WriteFault(Enum):
    """Why writes have no effect while reads and listings are answered. The value says what a client sees."""

    HANG = "does not answer writes"
    BUSY = "answers writes with 503"
    FAIL = "answers writes with 507"
    REFUSE = "refuses writes with 403"
    FULL = "is a full disk"


@dataclass(slots=True)
class StoreFaults:
    """Chances per request."""

    unavailable: float = 0.0
    answer_lost: float = 0.0
    happens_later: float = 0.0
    """A write without an answer takes effect after up to ``LATER_S`` seconds."""
    is_late: Callable[[str], bool] = lambda key: False
    """All writes of the keys that it names get no answer, and take effect after about ``LATER_S``."""
    truncated: float = 0.0
    """An answer is truncated; the store's client distinguishes that from the end of the object."""
    damaged: float = 0.0
    """A segment is stored truncated, and the store reports success."""
    stalled: bool = False
    """Requests get no answer while this is set, for at most ``STALL_S``; then they fail."""
    writes: WriteFault | None = None
    """No write or upload has an effect while this is set, and no deletion unless the store is only full."""
    kept: type[Locked] | type[Refused] | None = None
    """Each deletion is refused with it, as under a legal hold, or by a policy that allows none."""
    slow: float = 0.0
    """A request takes up to ``SLOW_S`` seconds."""
    listing_lag_s: float = 0.0
    """Maximum delay in seconds until listings show a write or deletion."""
    holds_blocks: bool = False
    """Answers to brokers' reads of a part of an object stay on their way while this is set."""
    delay_mean_s: float = 0.01


@dataclass(slots=True)
class Bucket:
    """The stored objects and uploads; shared by all clients and untouched by crashes."""

    objects: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    uploads: dict[str, tuple[Upload, dict[int, bytes]]] = field(default_factory=dict)
    faults: StoreFaults = field(default_factory=StoreFaults)
    written: int = 0
    has_locks: bool = False
    """Whether the bucket was created with Object Lock: it keeps versions and can lock them."""
    locks: dict[int, ObjectLock] = field(default_factory=dict)
    """By the number of a version: the second member of ``objects``."""
    earlier: dict[str, list[int]] = field(default_factory=dict)
    """By key: the numbers of the versions that a later one has replaced."""
    upload_locks: dict[str, ObjectLock] = field(default_factory=dict)
    held_reads: int = 0
    """The number of reads that ``holds_blocks`` holds."""
    late_keys: set[str] = field(default_factory=set)
    """Keys of writes that got no answer and took effect later, or will."""
    on_deleted: Callable[[Sequence[str]], None] = lambda keys: None
    on_written: Callable[[str, bytes], None] = lambda key, content: None
    on_gone: Callable[[Sequence[str]], None] = lambda keys: None
    """Called when objects have been deleted; ``on_deleted`` before."""
    on_unknown: Callable[[], None] = lambda: None
    """Called when a writer does not learn the outcome of its write."""
    listed: dict[str, ObjectInfo] = field(default_factory=dict)
    """The objects that listings show; ``unlisted`` holds later changes, each with the time from which listings show it."""
    unlisted: list[tuple[float, str, ObjectInfo | None]] = field(default_factory=list)

    def lock_of(self, key: str) -> ObjectLock | None:
        """The lock of the current version, whether it has ended or not."""
        return self.locks.get(self.objects[key][1]) if key in self.objects else None

    def locked_until_ms(self, key: str, now_ms: int) -> int:
        """The end of the last lock of any version of ``key``; 0 if no version is locked at the wall time ``now_ms``."""
        versions = [*self.earlier.get(key, ()), *([self.objects[key][1]] if key in self.objects else [])]
        ends = [self.locks[number].until_ms for number in versions if number in self.locks]
        return max([end_ms for end_ms in ends if end_ms > now_ms], default=0)

    def manifest_content(self, pointer: ManifestPointer) -> bytes:
        """Return the manifest of a committed version, which metadata has until it is stored."""
        return pointer.content or self.objects[pointer.object_key][0]

    def changed(self, key: str, info: ObjectInfo | None, now: float, randomness: random.Random) -> None:
        self.unlisted.append((now + self.faults.listing_lag_s * randomness.random(), key, info))

    def listing(self, prefix: str, now: float) -> list[ObjectInfo]:
        """Return the listed objects under ``prefix``. Changes of one key appear in order."""
        late: list[tuple[float, str, ObjectInfo | None]] = []
        held: set[str] = set()
        for at, key, info in self.unlisted:
            if at > now or key in held:
                late.append((at, key, info))
                held.add(key)
            elif info is None:
                self.listed.pop(key, None)
            else:
                self.listed[key] = info
        self.unlisted = late
        return [self.listed[key] for key in sorted(self.listed) if key.startswith(prefix)]


class SimulatedKeys:
    """A key ring with every key. Data keys are drawn from the store's randomness."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness

    async def make(self, name: str, context: bytes) -> tuple[bytes, bytes]:
        data_key = self._random.randbytes(DATA_KEY_BYTES)
        return data_key, await self.wrap(name, data_key, context)

    async def wrap(self, name: str, data_key: bytes, context: bytes) -> bytes:
        return data_key + name.encode() + context

    async def unwrap(self, name: str, wrapped: bytes, context: bytes) -> bytes:
        if wrapped[DATA_KEY_BYTES:] != name.encode() + context:
            raise Corrupt(f"the data key was not wrapped by key {name!r} for {context!r}")
        return wrapped[:DATA_KEY_BYTES]


class SimulatedStore:
    """One process's access to a bucket; see :class:`stratalog_tiering.store.base.ObjectStore`."""

    url = "simulated:"

    def __init__(self, bucket: Bucket, loop: SimulatedLoop, randomness: random.Random, *, is_of_broker: bool = False) -> None:
        self._bucket = bucket
        self._is_of_broker = is_of_broker
        self._loop = loop
        self._random = randomness
        self.keys = SimulatedKeys(randomness)
        self._is_late = False

    async def _reach(self) -> None:
        faults = self._bucket.faults
        slow_s = SLOW_S * self._random.random() if self._random.random() < faults.slow else 0.0
        await asyncio.sleep(slow_s + self._random.expovariate(1 / faults.delay_mean_s))
        if faults.stalled:
            await self._stalled()
        if self._random.random() < faults.unavailable:
            raise Unavailable("the simulated store answers 503")

    async def _stalled(self) -> None:
        for _ in range(int(STALL_S / 0.1)):
            await asyncio.sleep(0.1)
            if not self._bucket.faults.stalled:
                break
        raise Unavailable("the simulated store does not answer")

    async def _reach_to_change(self, *, deleted: Sequence[str] = ()) -> None:
        """Delay a request that changes the bucket, perhaps by a deletion."""
        await self._reach()
        fault, kept = self._bucket.faults.writes, self._bucket.faults.kept
        if deleted and kept is not None:
            raise kept("the simulated store refuses to delete", until_ms=0, keys=[*deleted])
        if deleted and fault in (WriteFault.FAIL, WriteFault.FULL):
            return
        match fault:
            case WriteFault.HANG:
                # One whose client gives up before the store answers again has no effect.
                if not await self._answers_writes():
                    raise OutcomeUnknown("the simulated store does not answer a write")
            case WriteFault.BUSY:
                raise Unavailable("the simulated store answers a write with 503")
            case WriteFault.FAIL:
                raise OutcomeUnknown("the simulated store answers a write with 507")
            case WriteFault.REFUSE:
                raise Refused("the simulated store answers a write with 403")
            case WriteFault.FULL:
                raise StorageFailed("the simulated store's disk is full")

    async def _answers_writes(self) -> bool:
        for _ in range(int(WRITE_STALL_S / 0.1)):
            await asyncio.sleep(0.1)
            if self._bucket.faults.writes is not WriteFault.HANG:
                return True
        return False

    async def _reach_to_write(self, write: Callable[[], object], key: str = "", *, deleted: Sequence[str] = ()) -> None:
        """Delay a request to write. At random, leave it unanswered and apply it later."""
        await self._reach_to_change(deleted=deleted)
        is_late = self._bucket.faults.is_late(key)
        if is_late or self._random.random() < self._bucket.faults.happens_later:
            later_s = LATER_S * (1.0 if is_late else self._random.random())
            self._loop.call_later_as(None, later_s, self._write_late, write)
            self._bucket.late_keys.add(key)
            self._bucket.on_unknown()
            raise OutcomeUnknown("the simulated store does not answer")

    def _write_late(self, write: Callable[[], object]) -> None:
        self._is_late = True
        with contextlib.suppress(StratalogError):
            write()
        self._is_late = False

    def _check_cut(self, key: str) -> None:
        if self._random.random() < self._bucket.faults.truncated:
            raise Unavailable(f"the simulated store's answer for {key} was cut")

    async def _answer_write(self) -> None:
        if self._random.random() < self._bucket.faults.answer_lost:
            self._bucket.on_unknown()
            raise OutcomeUnknown("the simulated store's answer was lost")
        await asyncio.sleep(self._random.expovariate(1 / self._bucket.faults.delay_mean_s))

    def _now_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000)

    def _info(self, key: str) -> ObjectInfo:
        content, written, when = self._bucket.objects[key]
        return ObjectInfo(key=key, size_bytes=len(content), etag=str(written), last_modified_ms=when)

    def _check_lock(self, lock: ObjectLock | None) -> None:
        if lock is None:
            return
        if not self._bucket.has_locks:
            raise Invalid("the simulated bucket cannot lock objects")
        if lock.until_ms <= self._now_ms():
            raise Invalid(f"the lock ends in the past, at {lock.until_ms}")

    def _store(self, key: str, content: bytes, *, if_absent: bool, lock: ObjectLock | None = None) -> None:
        if if_absent and key in self._bucket.objects:
            raise Conflict(f"object {key} exists", key=key)
        self._check_lock(lock)
        if self._bucket.has_locks and key in self._bucket.objects:
            self._bucket.earlier.setdefault(key, []).append(self._bucket.objects[key][1])
        self._bucket.written += 1
        if lock is not None:
            self._bucket.locks[self._bucket.written] = lock
        is_cut = parse_segment_key(key) is not None and self._random.random() < self._bucket.faults.damaged
        # Its writer has read back what a late write replaces, and only a scrub can notice that it is cut now.
        if is_cut and not (self._is_late and key in self._bucket.objects):
            content = content[: self._random.randrange(len(content))]
        self._bucket.objects[key] = (content, self._bucket.written, self._now_ms())
        self._bucket.changed(key, self._info(key), self._loop.time(), self._random)
        self._bucket.on_written(key, content)

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        content = b"".join(parts)
        await self._reach_to_write(lambda: self._store(check_key(key), content, if_absent=if_absent, lock=lock), key)
        self._store(check_key(key), content, if_absent=if_absent, lock=lock)
        await self._answer_write()

    def _existing(self, key: str) -> bytes:
        if key not in self._bucket.objects:
            raise NoSuchObject(f"object {key} does not exist", key=key)
        return self._bucket.objects[key][0]

    async def get(self, key: str) -> bytes:
        await self._reach()
        content = self._existing(key)
        self._check_cut(key)
        return content

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        check_range(start, length)
        await self._reach()
        content = self._existing(key)[start : start + length]
        if self._is_of_broker:
            await self._held()
        self._check_cut(key)
        if len(content) < length and not or_less:
            raise Corrupt(f"object {key} ends before {start + length}")
        return memoryview(content)

    async def _held(self) -> None:
        self._bucket.held_reads += 1
        try:
            while self._bucket.faults.holds_blocks:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(HELD_LOOK_S)
        finally:
            self._bucket.held_reads -= 1

    async def head(self, key: str) -> ObjectInfo:
        await self._reach()
        self._existing(key)
        info, lock = replace(self._info(key), crc32c=crc_text([self._bucket.objects[key][0]])), self._bucket.lock_of(key)
        if not self._bucket.has_locks:
            return info
        return replace(info, version_id=info.etag, locked_until_ms=lock.until_ms if lock is not None else 0)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        await self._reach()
        for info in self._bucket.listing(prefix, self._loop.time()):
            yield info

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list(prefix):
            yield info.key

    async def delete(self, keys: Sequence[str]) -> None:
        await self._reach_to_write(lambda: self._delete(keys), deleted=keys)
        self._delete(keys)
        await self._answer_write()

    def _delete(self, keys: Sequence[str]) -> None:
        self._bucket.on_deleted(keys)
        ends_ms = {key: self._bucket.locked_until_ms(key, self._now_ms()) for key in keys}
        for key in keys:
            if not ends_ms[key] and self._bucket.objects.pop(key, None) is not None:
                self._bucket.earlier.pop(key, None)
                self._bucket.changed(key, None, self._loop.time(), self._random)
        self._bucket.on_gone(keys)
        if until_ms := max(ends_ms.values(), default=0):
            locked = [key for key in keys if ends_ms[key]]
            raise Locked(f"the simulated store keeps locked objects until {until_ms}", until_ms=until_ms, keys=locked)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        await self._reach_to_change()
        self._check_lock(lock)
        self._bucket.written += 1
        upload = Upload(
            key=check_key(key), upload_id=str(self._bucket.written), initiated_ms=self._now_ms(), part_bytes=part_bytes,
            if_absent=if_absent,
        )  # fmt: skip
        if lock is not None:
            self._bucket.upload_locks[upload.upload_id] = lock
        self._bucket.uploads[upload.upload_id] = (upload, {})
        await self._answer_write()
        return upload

    def _parts(self, upload: Upload) -> dict[int, bytes]:
        if upload.upload_id not in self._bucket.uploads:
            raise NoSuchObject(f"upload {upload.upload_id} of {upload.key} does not exist")
        return self._bucket.uploads[upload.upload_id][1]

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        await self._reach_to_change()
        content = b"".join(parts)
        self._parts(upload)[number] = content
        await self._answer_write()
        return UploadedPart(number=number, etag=str(number), size_bytes=len(content))

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        await self._reach_to_write(lambda: self._complete(upload, parts))
        self._complete(upload, parts)
        await self._answer_write()
        return ""

    def _complete(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        stored, lock = self._parts(upload), self._bucket.upload_locks.get(upload.upload_id)
        self._store(upload.key, b"".join(stored[part.number] for part in parts), if_absent=upload.if_absent, lock=lock)
        del self._bucket.uploads[upload.upload_id]

    async def abort_upload(self, upload: Upload) -> None:
        await self._reach_to_change()
        self._bucket.uploads.pop(upload.upload_id, None)
        await self._answer_write()

    async def list_uploads(self) -> AsyncIterator[Upload]:
        await self._reach()
        for upload, _ in list(self._bucket.uploads.values()):
            yield upload

    async def features(self, key: str) -> StoreFeatures:
        await self._reach()
        has_locks = self._bucket.has_locks
        return StoreFeatures(
            conditional_replace=False, checksums_at_rest=False, versioning=has_locks, object_lock=has_locks, final_deletion=True
        )  # fmt: skip

    async def close(self) -> None:
        pass
