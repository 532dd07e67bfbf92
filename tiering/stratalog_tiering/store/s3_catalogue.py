"""Listings, HEADs and open uploads of a bucket, through the asynchronous client. Deletions: ``s3_versions.py``.

A verification or collection sends thousands of these small requests; in threads they would wait for each other and for
uploads. All of them are idempotent and are repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from stratalog_tiering.store.base import ObjectInfo, Upload
from stratalog_tiering.store.s3_async import AsyncClient
from stratalog_tiering.store.s3_attempts import repeated
from stratalog_tiering.store.store_url import S3Location


class S3Catalogue:
    """Implements these methods of :class:`stratalog_tiering.store.base.ObjectStore`."""

    def __init__(self, location: S3Location, client: AsyncClient) -> None:
        self._location = location
        self._client = client

    async def head(self, key: str) -> ObjectInfo:
        answer = await self._repeated("head_object", key, Key=self._location.name(key), ChecksumMode="ENABLED")
        info = _object_info(key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())
        until: datetime | None = answer.get("ObjectLockRetainUntilDate")
        locked_until_ms = int(until.timestamp() * 1000) if until is not None else 0
        return replace(
            info,
            version_id=answer.get("VersionId", ""),
            locked_until_ms=locked_until_ms,
            crc32c=answer.get("ChecksumCRC32C", ""),
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        more: dict[str, Any] = {}
        while True:
            answer = await self._repeated("list_objects_v2", prefix, Prefix=self._location.prefix + prefix, **more)
            for found in answer.get("Contents", ()):
                key = self._location.key(found["Key"])
                yield _object_info(key, found["Size"], found["ETag"], found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    async def list_uploads(self) -> AsyncIterator[Upload]:
        # No prefix in the request: MinIO finds nothing by a partial prefix.
        more: dict[str, Any] = {}
        while True:
            answer = await self._repeated("list_multipart_uploads", self._location.prefix, **more)
            for upload in self._ours(answer.get("Uploads", ())):
                yield upload
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _ours(self, uploads: Iterable[Any]) -> Iterable[Upload]:
        for upload in uploads:
            if upload["Key"].startswith(self._location.prefix):
                initiated_ms = int(upload["Initiated"].timestamp() * 1000)
                yield Upload(key=self._location.key(upload["Key"]), upload_id=upload["UploadId"], initiated_ms=initiated_ms)

    async def _repeated(self, operation: str, key: str, **arguments: Any) -> Any:
        return await repeated(lambda: self._client.request(operation, key, **arguments))


def _object_info(key: str, size: int, etag: str, modified_s: float) -> ObjectInfo:
    """``modified_s`` is seconds since 1970."""
    return ObjectInfo(key=key, size_bytes=size, etag=etag.strip('"'), last_modified_ms=int(modified_s * 1000))
