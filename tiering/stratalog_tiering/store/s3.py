"""Objects in S3 and whatever speaks its protocol.

Reads go through obstore: ranged GETs off the event loop, cancelled when the caller is. Writes, listings and administration go
through boto3's low-level calls in a small pool of threads, because only these offer conditional completion and CRC32C of
parts. Neither client retries on its own terms: obstore has a small budget, boto3 none, and ``_attempted`` below retries what
may be repeated.

An answer that got lost is settled by looking before anything is concluded: a conditional write that fails on its second
attempt may have been won by its own first one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3
import obstore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from crc32c import crc32c
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store as ObstoreS3

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.store.base import ObjectInfo, Upload, UploadedPart, check_key, check_range
from stratalog_tiering.store.s3_errors import UploadGone, from_botocore, from_obstore

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_TIMEOUT_S: Final = 2.0
READ_TIMEOUT_S: Final = 10.0
WRITE_TIMEOUT_S: Final = 30.0
ATTEMPTS_MAX: Final = 4
_FIRST_PAUSE_S: Final = 0.1
_DELETE_BATCH: Final = 1000
_Result = TypeVar("_Result")


class S3Store:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. ``threads`` is how many calls ``background`` runs at once."""

    def __init__(
        self, bucket: str, prefix: str, *, endpoint: str | None, region: str, background: Background, threads: int
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._background = background
        session = boto3.Session(region_name=region)
        if session.get_credentials() is None:
            raise Invalid(f"{self.url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self._client = _boto3_client(session, endpoint, threads)
        self._reads = _obstore_client(session, bucket, endpoint or self._client.meta.endpoint_url, region)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}"

    async def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = True) -> ObjectInfo:
        name = self._name(key)
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}

        def write() -> None:
            body = b"".join(parts)
            self._client.put_object(
                Bucket=self._bucket, Key=name, Body=body, ChecksumCRC32C=_crc_text((body,)), **condition
            )  # fmt: skip

        doubtful = False
        for attempt in range(ATTEMPTS_MAX):
            try:
                await self._call(write, key)
                return await self.head(key)
            except Conflict:
                if doubtful and await self.get(key) == b"".join(parts):
                    return await self.head(key)
                raise
            except (OutcomeUnknown, Unavailable) as failure:
                doubtful = doubtful or isinstance(failure, OutcomeUnknown)
                await self._pause_or_raise(attempt, failure, doubtful)
        raise AssertionError("unreachable")

    async def get(self, key: str) -> bytes:
        name = self._name(key)

        async def read() -> bytes:
            result = await obstore.get_async(self._reads, name)
            return bytes(await result.bytes_async())

        return await self._read(read, key)

    async def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(start, length)
        name = self._name(key)

        async def read() -> memoryview:
            return memoryview(await obstore.get_range_async(self._reads, name, start=start, length=length))

        content = await self._read(read, key)
        if len(content) != length:
            raise Corrupt(f"object {key} ends at byte {start + len(content)}, not {start + length}", key=key)
        return content

    async def head(self, key: str) -> ObjectInfo:
        name = self._name(key)
        answer = await self._repeated(lambda: self._client.head_object(Bucket=self._bucket, Key=name), key)
        return _info(key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        more: dict[str, Any] = {}
        while True:
            answer = await self._repeated(lambda more=more: self._list_page(prefix, more), prefix)  # type: ignore[misc]
            for found in answer.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                yield _info(key, found["Size"], found["ETag"], found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _list_page(self, prefix: str, more: dict[str, Any]) -> Any:
        return self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **more)

    async def delete(self, keys: Sequence[str]) -> None:
        names = [self._name(key) for key in keys]
        for first in range(0, len(names), _DELETE_BATCH):
            batch = names[first : first + _DELETE_BATCH]
            answer = await self._repeated(lambda batch=batch: self._delete_batch(batch), batch[0])  # type: ignore[misc]
            failed = [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]
            if failed:
                raise Unavailable(f"{self.url}: {len(failed)} objects were not deleted, the first {failed[0]}")

    def _delete_batch(self, names: Sequence[str]) -> Any:
        objects: Any = [{"Key": name} for name in names]
        return self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})

    async def create_upload(self, key: str) -> Upload:
        name = self._name(key)

        def create() -> str:
            answer = self._client.create_multipart_upload(Bucket=self._bucket, Key=name, ChecksumAlgorithm="CRC32C")
            return answer["UploadId"]

        return Upload(key=key, upload_id=await self._repeated(create, key))

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        name = self._name(upload.key)

        def write() -> UploadedPart:
            body = b"".join(parts)
            checksum = _crc_text((body,))
            answer = self._client.upload_part(
                Bucket=self._bucket, Key=name, UploadId=upload.upload_id, PartNumber=number, Body=body,
                ChecksumCRC32C=checksum,
            )  # fmt: skip
            return UploadedPart(number=number, etag=answer["ETag"], size_bytes=len(body), crc32c=checksum)

        return await self._repeated(write, upload.key)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart], *, if_absent: bool = True) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        doubtful = False
        for attempt in range(ATTEMPTS_MAX):
            try:
                await self._call(lambda: self._complete(upload, ordered, if_absent), upload.key)
                return await self.head(upload.key)
            except (Conflict, UploadGone) as failure:
                if doubtful and (made := await self._made_of(upload.key, ordered)) is not None:
                    return made
                if isinstance(failure, UploadGone):
                    raise Unavailable(f"the upload of {upload.key} is gone: begin again") from failure
                raise
            except (OutcomeUnknown, Unavailable) as failure:
                doubtful = doubtful or isinstance(failure, OutcomeUnknown)
                await self._pause_or_raise(attempt, failure, doubtful)
        raise AssertionError("unreachable")

    def _complete(self, upload: Upload, parts: Sequence[UploadedPart], if_absent: bool) -> None:
        listed: Any = [{"PartNumber": part.number, "ETag": part.etag, "ChecksumCRC32C": part.crc32c} for part in parts]
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        self._client.complete_multipart_upload(
            Bucket=self._bucket, Key=self._name(upload.key), UploadId=upload.upload_id, MultipartUpload={"Parts": listed},
            **condition,
        )  # fmt: skip

    async def _made_of(self, key: str, parts: Sequence[UploadedPart]) -> ObjectInfo | None:
        """The object, if it is what these parts make: by size and by the tag that S3 computes over part tags."""
        try:
            info = await self.head(key)
        except NoSuchObject:
            return None
        digest = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts), usedforsecurity=False)
        same = info.etag == f"{digest.hexdigest()}-{len(parts)}" and info.size_bytes == sum(p.size_bytes for p in parts)
        return info if same else None

    async def abort_upload(self, upload: Upload) -> None:
        def abort() -> None:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._name(upload.key), UploadId=upload.upload_id)

        try:
            await self._repeated(abort, upload.key)
        except NoSuchObject:
            return

    async def list_uploads(self) -> AsyncIterator[Upload]:
        # Without a prefix: MinIO finds nothing by a partial one.
        more: dict[str, Any] = {}
        while True:
            answer = await self._repeated(lambda more=more: self._uploads_page(more), self._prefix)  # type: ignore[misc]
            for upload in self._ours(answer.get("Uploads", ())):
                yield upload
            if not answer.get("IsTruncated"):
                return
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _uploads_page(self, more: dict[str, Any]) -> Any:
        return self._client.list_multipart_uploads(Bucket=self._bucket, **more)

    def _ours(self, uploads: Iterable[Any]) -> Iterable[Upload]:
        for upload in uploads:
            if upload["Key"].startswith(self._prefix):
                key = upload["Key"].removeprefix(self._prefix)
                yield Upload(key=key, upload_id=upload["UploadId"], initiated_ms=int(upload["Initiated"].timestamp() * 1000))

    async def close(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    async def _call(self, call: Callable[[], _Result], key: str) -> _Result:
        try:
            return await self._background.run(call)
        except (BotoCoreError, ClientError) as failure:
            raise from_botocore(failure, key, self.url) from failure

    async def _repeated(self, call: Callable[[], _Result], key: str) -> _Result:
        """A call that does no harm when it is done twice."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                return await self._call(call, key)
            except (OutcomeUnknown, Unavailable) as failure:
                await self._pause_or_raise(attempt, failure, doubtful=False)
        raise AssertionError("unreachable")

    async def _pause_or_raise(self, attempt: int, failure: OutcomeUnknown | Unavailable, doubtful: bool) -> None:
        if attempt + 1 < ATTEMPTS_MAX:
            await asyncio.sleep(_FIRST_PAUSE_S * 3**attempt)
        elif doubtful:
            raise OutcomeUnknown(failure.message) from failure
        else:
            raise Unavailable(failure.message) from failure

    async def _read(self, read: Callable[[], Awaitable[_Result]], key: str) -> _Result:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await read()
        except TimeoutError as late:
            raise Unavailable(f"{self.url} did not answer about {key} in {READ_TIMEOUT_S} s") from late
        except (BaseError, FileNotFoundError, PermissionError) as failure:
            raise from_obstore(failure, key, self.url) from failure


def _boto3_client(session: boto3.Session, endpoint: str | None, threads: int) -> S3Client:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=WRITE_TIMEOUT_S,
        retries={"total_max_attempts": 1},
        max_pool_connections=threads,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # botocore signs payloads over plain HTTP all the same; under TLS signing them is a second checksum for nothing.
        s3={"addressing_style": "path" if endpoint else "auto", "payload_signing_enabled": False},
    )
    return session.client("s3", endpoint_url=endpoint, config=config)


def _obstore_client(session: boto3.Session, bucket: str, endpoint: str, region: str) -> ObstoreS3:
    return ObstoreS3(
        bucket,
        endpoint=endpoint,
        region=region,
        virtual_hosted_style_request=False,
        credential_provider=Boto3CredentialProvider(session),
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=READ_TIMEOUT_S),
        },
        retry_config={
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=READ_TIMEOUT_S),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 3},
        },
    )


def _info(key: str, size: int, etag: str, modified_s: float) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=size, etag=etag.strip('"'), last_modified_ms=int(modified_s * 1000))


def _crc_text(parts: Iterable[Buffer]) -> str:
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
