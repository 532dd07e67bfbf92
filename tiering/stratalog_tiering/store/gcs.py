"""Objects in Google Cloud Storage.

obstore reads. It offers neither uploads of several parts that must not replace an object, nor the checksums that the service
verifies, so writes, listings and deletions are requests of our own (``gcs_requests.py``), sent in the store's threads. Uploads
of several parts are resumable uploads (``gcs_uploads.py``).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from obstore.store import GCSStore as ObstoreGcs

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_tiering.store.base import (
    KeyRing,
    ObjectInfo,
    StoreFeatures,
    Upload,
    UploadedPart,
    check_length,
    check_range,
    refuse_lock,
)
from stratalog_tiering.store.checksums import crc_text
from stratalog_tiering.store.gcs_credentials import GcsCredentials
from stratalog_tiering.store.gcs_requests import DamagedInTransit, GcsRequests, decoded
from stratalog_tiering.store.gcs_uploads import UPLOAD_META, GcsUploads
from stratalog_tiering.store.http_requests import delete_each
from stratalog_tiering.store.key_ring import NoKeys
from stratalog_tiering.store.obstore_reads import ObstoreReads, ReadLimits, client_options, retry_config
from stratalog_tiering.store.s3_attempts import written_once
from stratalog_tiering.store.store_url import GcsLocation

CLASSES: Final = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
"""Storage classes, all of which can be read at once."""
PAGE_OBJECTS: Final = 1000
"""The service's maximum."""
_LIMITS: Final = ReadLimits()
_IF_ABSENT: Final = {"ifGenerationMatch": "0"}
_NO_GENERATION: Final = {"ifGenerationMatch": "1"}
_FIELDS: Final = "name,size,etag,updated,generation,crc32c"
_BUCKET_FIELDS: Final = "versioning,softDeletePolicy,hierarchicalNamespace,retentionPolicy,defaultEventBasedHold"


class GcsStore:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. ``background`` runs ``threads`` calls at once."""

    def __init__(
        self,
        location: GcsLocation,
        *,
        background: Background,
        clock: Clock,
        random: Random,
        threads: int,
        read_limits: ReadLimits = _LIMITS,
        keys: KeyRing | None = None,
        page_objects: int = PAGE_OBJECTS,
    ) -> None:
        self._location = location
        self._keys = keys or NoKeys()
        self._clock = clock
        self._random = random
        self._page_objects = page_objects
        self._credentials = GcsCredentials(location.url, background, clock)
        self._requests = GcsRequests(location, self._credentials, background, threads)
        self._uploads = GcsUploads(self._requests, location.url)
        reads = _obstore(location, self._credentials, read_limits)
        self._reads = ObstoreReads(reads, location.url, location.name, read_limits, self._explain_absence)

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def keys(self) -> KeyRing:
        return self._keys

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        storage_class: str = "",
        lock: ObjectLock | None = None,
    ) -> None:
        metadata = self._metadata(storage_class, lock)
        boundary = f"part-{self._random.getrandbits(128):032x}"

        def write() -> None:
            self._put(key, b"".join(parts), metadata, boundary, _IF_ABSENT if if_absent else {})

        async def is_ours() -> bool:
            return await self.get(key) == b"".join(parts)

        await written_once(lambda: self._requests.run(write), is_ours, lost_to=(Conflict,))

    def _put(self, key: str, content: bytes, metadata: dict[str, Any], boundary: str, condition: dict[str, str]) -> None:
        """Write a whole object with its metadata, by default with the checksum that the service verifies. Blocks."""
        described = json.dumps({"crc32c": crc_text([content]), **metadata})
        head = f"--{boundary}\r\nContent-Type: application/json\r\n\r\n{described}\r\n"
        body = f"{head}--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        answer = self._requests.upload(
            key, {"uploadType": "multipart", **condition}, f"multipart/related; boundary={boundary}",
            b"".join((body, content, f"\r\n--{boundary}--\r\n".encode())),
        )  # fmt: skip
        decoded(answer)  # what was written: an answer without it confirms nothing

    def _metadata(self, storage_class: str, lock: ObjectLock | None) -> dict[str, Any]:
        """The metadata of a new object. Raises ``Invalid`` for what this store does not offer."""
        refuse_lock(self.url, lock)
        if storage_class and storage_class not in CLASSES:
            raise Invalid(f"{self.url} has no storage class {storage_class!r}; use {', '.join(CLASSES)}")
        return {"storageClass": storage_class} if storage_class else {}

    async def get(self, key: str) -> bytes:
        return await self._reads.get(key)

    async def get_range(
        self, key: str, start: int, length: int, *, uncached: bool = False, or_less: bool = False
    ) -> memoryview:
        check_range(start, length)
        content = await self._reads.get_range(key, start, length)
        if not or_less:
            check_length(len(content), key, start, length)
        return content

    async def _explain_absence(self, key: str) -> None:
        """Ask for the object's metadata, whose refusal says what does not exist: the emulator's answer to a read does not."""
        await self._requests.run(lambda: self._requests.object("GET", key, {"fields": "generation"}))

    async def head(self, key: str) -> ObjectInfo:
        self._location.name(key)
        found = await self._requests.repeated(lambda: decoded(self._requests.object("GET", key, {"fields": _FIELDS})))
        return self._info(found)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        query = {"prefix": self._location.prefix + prefix, "maxResults": str(self._page_objects)}
        query |= {"fields": f"kind,nextPageToken,items({_FIELDS})"}
        token = ""
        while True:
            asked = query | ({"pageToken": token} if token else {})
            page = await self._requests.repeated(partial(self._requests.objects, asked))
            for found in page.get("items", ()):
                yield self._info(found)
            token = page.get("nextPageToken", "")
            if not token:
                return

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list(prefix):
            yield info.key

    def _info(self, found: dict[str, Any]) -> ObjectInfo:
        return ObjectInfo(
            key=self._location.key(found["name"]),
            size_bytes=int(found["size"]),
            etag=found["etag"],
            last_modified_ms=int(datetime.fromisoformat(found["updated"]).timestamp() * 1000),
            crc32c=found.get("crc32c", ""),
        )

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._location.name(key)
        await delete_each(keys, self._delete)

    async def _delete(self, key: str) -> None:
        try:
            await self._requests.repeated(lambda: self._requests.object("DELETE", key, {}))
        except NoSuchObject:
            return

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        upload = Upload(
            key=key, upload_id=f"{self._random.getrandbits(128):032x}", initiated_ms=self._clock.wall_ms(),
            part_bytes=part_bytes, if_absent=if_absent,
        )  # fmt: skip
        metadata = self._metadata(storage_class, lock) | {"metadata": {UPLOAD_META: upload.upload_id}}
        query = {"uploadType": "resumable", **(_IF_ABSENT if if_absent else {})}

        def begin() -> str:
            answer = self._requests.upload(key, query, "application/json", json.dumps(metadata).encode())
            if not answer.headers.get("location"):
                raise Unavailable(f"{self.url} did not begin the upload of {key}")
            return answer.headers["location"]

        self._uploads.begin(upload, await self._requests.repeated(begin))
        return upload

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        return await self._uploads.put_part(upload, number, parts)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        return await self._uploads.complete(upload, parts)

    async def abort_upload(self, upload: Upload) -> None:
        await self._uploads.abort(upload)

    async def list_uploads(self) -> AsyncIterator[Upload]:
        """Those of this process: the service does not list resumable uploads, and ends them after a week."""
        for upload in self._uploads.begun():
            yield upload

    async def features(self, key: str) -> StoreFeatures:
        bucket = await self._bucket()
        damage = {"crc32c": crc_text([b"other bytes"])}
        return StoreFeatures(
            conditional_replace=await self._refuses(key, {}, _NO_GENERATION, Conflict),
            checksums_at_rest=bool((await self.head(key)).crc32c) and await self._refuses(key, damage, {}, DamagedInTransit),
            versioning=None if bucket is None else _is_enabled(bucket, "versioning"),
            object_lock=False,
            final_deletion=None if bucket is None else not _kept_s(bucket),
            unsafe="" if bucket is None else _unsafe(bucket),
        )

    async def _bucket(self) -> Any:
        """The bucket's own metadata, or None if the credentials do not allow to ask."""
        try:
            return await self._requests.repeated(lambda: self._requests.bucket(_BUCKET_FIELDS))
        except Refused:
            await self._requests.repeated(self._requests.check_bucket)
            return None

    async def _refuses(self, key: str, metadata: dict[str, Any], condition: dict[str, str], error: type[Exception]) -> bool:
        boundary = f"part-{self._random.getrandbits(128):032x}"

        def write() -> bool:
            try:
                self._put(key, b"these bytes", metadata, boundary, condition)
            except error:
                return True
            return False

        return await self._requests.repeated(write)

    async def close(self) -> None:
        self._requests.close()
        self._credentials.close()


def _is_enabled(bucket: dict[str, Any], feature: str) -> bool:
    return bool(bucket.get(feature, {}).get("enabled"))


def _kept_s(bucket: dict[str, Any]) -> int:
    """How long the bucket keeps deleted objects, in seconds."""
    return int(bucket.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))


def _unsafe(bucket: dict[str, Any]) -> str:
    """Why a bucket must not be written to."""
    if _is_enabled(bucket, "versioning"):
        return "the bucket keeps versions, which deletions would leave: switch off object versioning"
    if _is_enabled(bucket, "hierarchicalNamespace"):
        return "the bucket has a hierarchical namespace, whose listings contain folders: use a bucket without"
    if bucket.get("retentionPolicy"):
        return "the bucket has a retention policy, which refuses to delete or replace objects: remove it"
    if bucket.get("defaultEventBasedHold"):
        return (
            "the bucket holds new objects, so that they cannot be deleted or replaced: switch off the default event-based hold"
        )
    return ""


def _obstore(location: GcsLocation, credentials: GcsCredentials, limits: ReadLimits) -> ObstoreGcs:
    # Everything that obstore would read from the environment itself is given.
    return ObstoreGcs(
        location.bucket,
        base_url=location.endpoint,
        skip_signature=not location.has_credentials,
        client_options=client_options(location.endpoint, limits),
        retry_config=retry_config(limits),
        credential_provider=credentials if location.has_credentials else None,
    )
