"""Listings, HEADs and open uploads of a bucket, through the asynchronous client. Deletions: ``s3_versions.py``.

A verification or collection sends thousands of these small requests; in threads they would wait for each other and for
uploads. All of them are idempotent and are repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from stratalog_core.errors import Unavailable
from stratalog_tiering.store.base import ObjectInfo, UnexplainedAbsence, Upload
from stratalog_tiering.store.s3_async import REQUEST_TIMEOUT_S, AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, time_limit
from stratalog_tiering.store.store_url import S3Location


class S3Catalogue:
    """Implements these methods of :class:`stratalog_tiering.store.base.ObjectStore`."""

    def __init__(self, location: S3Location, client: AsyncClient) -> None:
        self._location = location
        self._client = client

    async def headers(self, key: str, **version: str) -> Any:
        """The answer to a HEAD of an object, or of one ``VersionId`` of it. Raises ``NoSuchObject`` only at S3's own word."""
        name = self._location.name(key)

        async def attempt() -> Any:
            try:
                answer = await self._client.request("head_object", key, Key=name, ChecksumMode="ENABLED", **version)
            except UnexplainedAbsence as unexplained:
                await self._explain_absence(key, name, version)
                raise Unavailable(f"{self._location.url} told two things about {key}: {unexplained.message}") from unexplained
            if not (answer.get("ETag") and "LastModified" in answer):
                raise Unavailable(f"{self._location.url} described no object at {key}: is a proxy in between?")
            return answer

        return await repeated(attempt)

    async def _explain_absence(self, key: str, name: str, version: dict[str, str]) -> None:
        """Ask for a byte of an object: unlike a HEAD, the refusal says what does not exist. Returns if it was not refused."""
        async with self._client.answering(key) as client, time_limit(REQUEST_TIMEOUT_S):
            answer = await client.get_object(Bucket=self._location.bucket, Key=name, Range="bytes=0-0", **version)
            answer["Body"].close()

    async def head(self, key: str) -> ObjectInfo:
        answer = await self.headers(key)
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
            answer = await self._listed("list_objects_v2", prefix, "Name", Prefix=self._location.prefix + prefix, **more)
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
            answer = await self._listed("list_multipart_uploads", self._location.prefix, "Bucket", **more)
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

    async def list_versions(self, prefix: str, **more: Any) -> Any:
        """A page of the versions and delete markers of the objects whose names begin with ``prefix``."""
        return await self._listed("list_object_versions", prefix, "Name", Prefix=prefix, **more)

    async def _listed(self, operation: str, prefix: str, bucket: str, **arguments: Any) -> Any:
        """A page of a listing. ``bucket`` is the field that names its bucket: a page of a gateway would be an empty listing."""

        async def attempt() -> Any:
            answer = await self._client.request(operation, prefix, **arguments)
            if answer.get(bucket) != self._location.bucket:
                raise Unavailable(f"{self._location.url} sent no listing of the bucket: is a proxy in between?")
            return answer

        return await repeated(attempt)


def _object_info(key: str, size: int, etag: str, modified_s: float) -> ObjectInfo:
    """``modified_s`` is seconds since 1970."""
    return ObjectInfo(key=key, size_bytes=size, etag=etag.strip('"'), last_modified_ms=int(modified_s * 1000))
