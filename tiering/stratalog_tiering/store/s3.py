"""Objects in S3 and compatible servers.

Writes use boto3's low-level calls in a small thread pool, because only these offer conditional completion and CRC32C of parts
without blocking the event loop. Listings, HEADs and deletions use aioboto3 (``s3_catalogue.py``, ``s3_versions.py``); reads use
the engine that the store's URL names (``s3_reads.py``). ``s3_attempts.py`` repeats requests: no client but obstore retries by
itself, and obstore only within a small budget.

A write whose response was lost is sent again. If it is then refused because the object exists, its own first attempt may have
succeeded, so the stored object is compared before anything is concluded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.store.base import (
    KeyRing,
    ObjectInfo,
    StoreFeatures,
    Upload,
    UploadedPart,
    UploadGone,
    check_length,
    check_range,
)
from stratalog_tiering.store.checksums import crc_text, crc_text_of_parts
from stratalog_tiering.store.direct_reads import DirectReads, is_direct
from stratalog_tiering.store.key_ring import NoKeys
from stratalog_tiering.store.obstore_reads import CONNECT_TIMEOUT_S, ReadLimits
from stratalog_tiering.store.pieces import get_pieces
from stratalog_tiering.store.s3_async import AsyncClient
from stratalog_tiering.store.s3_attempts import repeated, written_once
from stratalog_tiering.store.s3_catalogue import S3Catalogue
from stratalog_tiering.store.s3_errors import from_botocore, no_credentials
from stratalog_tiering.store.s3_features import read_features
from stratalog_tiering.store.s3_locks import S3Locks
from stratalog_tiering.store.s3_reads import Aioboto3Reads, ReadEngine, obstore_reads
from stratalog_tiering.store.s3_versions import S3Versions
from stratalog_tiering.store.store_url import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

WRITE_TIMEOUT_S: Final = 30.0
_LIMITS: Final = ReadLimits()
_Result = TypeVar("_Result")


class S3Store:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. ``background`` runs ``threads`` calls at once."""

    def __init__(
        self,
        location: S3Location,
        *,
        read_engine: str,
        background: Background,
        threads: int,
        read_limits: ReadLimits = _LIMITS,
        keys: KeyRing | None = None,
    ) -> None:
        self._location = location
        self._keys = keys or NoKeys()
        self._background = background
        core = botocore.session.get_session()
        try:
            session = boto3.Session(botocore_session=core, region_name=location.region)
            credentials = session.get_credentials()
        except BotoCoreError as malformed:
            raise Invalid(f"{self.url}: {malformed}; correct AWS_PROFILE, or the file that has it") from malformed
        if credentials is None:
            raise Invalid(no_credentials(self.url))
        self._client = _boto3_client(session, location, threads)
        self._async_client = AsyncClient(location, core)
        self._catalogue = S3Catalogue(location, self._async_client)
        self._versions = S3Versions(location, self._async_client, self._catalogue)
        self._locks = S3Locks(location, self._async_client)
        self._reads = self._engine(read_engine, session, read_limits)

    def _engine(self, name: str, session: boto3.Session, limits: ReadLimits) -> ReadEngine:
        if name == "aioboto3":
            return Aioboto3Reads(self._location, self._async_client, limits)
        endpoint = self._location.endpoint or self._client.meta.endpoint_url
        obstore = obstore_reads(self._location, session, endpoint, limits)
        if name == "direct" and is_direct(endpoint):
            return DirectReads(self._location, session, endpoint, limits, self._background, obstore)
        return obstore

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
        name = self._location.name(key)
        options = await self._new_object(storage_class, lock) | ({"IfNoneMatch": "*"} if if_absent else {})

        def write() -> None:
            body = b"".join(parts)
            answer = self._client.put_object(
                Bucket=self._location.bucket, Key=name, Body=body, ChecksumCRC32C=crc_text((body,)), **options
            )  # fmt: skip
            self._tag(answer, key)

        async def is_ours() -> bool:
            return await self.get(key) == b"".join(parts)

        await written_once(lambda: self._call(write, key), is_ours, lost_to=(Conflict,))

    async def _new_object(self, storage_class: str, lock: ObjectLock | None) -> dict[str, Any]:
        """Arguments of the request that creates an object."""
        options: dict[str, Any] = {**self._location.encryption, **({"StorageClass": storage_class} if storage_class else {})}
        return options | (await self._locks.arguments(lock) if lock is not None else {})

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

    async def get_pieces(self, key: str, start: int, lengths: Sequence[int]) -> list[memoryview]:
        """See ``pieces.py``."""
        check_range(start, min(lengths))
        pieces = await get_pieces(self._reads, key, start, lengths)
        check_length(sum(map(len, pieces)), key, start, sum(lengths))
        return pieces

    async def head(self, key: str) -> ObjectInfo:
        return await self._catalogue.head(key)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._catalogue.list(prefix)

    def list_keys(self, prefix: str) -> AsyncIterator[str]:
        return self._versions.list_keys(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._versions.delete(keys)

    async def create_upload(
        self,
        key: str,
        part_bytes: int,
        storage_class: str = "",
        lock: ObjectLock | None = None,
        *,
        if_absent: bool = True,
    ) -> Upload:
        name = self._location.name(key)
        options = await self._new_object(storage_class, lock)

        def create() -> str:
            answer = self._client.create_multipart_upload(
                Bucket=self._location.bucket, Key=name, ChecksumAlgorithm="CRC32C", **options
            )  # fmt: skip
            if not answer.get("UploadId"):
                raise OutcomeUnknown(f"{self.url} began no upload of {key}: is a proxy in between?")
            return answer["UploadId"]

        return Upload(key=key, upload_id=await self._repeated(create, key), part_bytes=part_bytes, if_absent=if_absent)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        name = self._location.name(upload.key)

        def write() -> UploadedPart:
            body = b"".join(parts)
            checksum = crc_text((body,))
            answer = self._client.upload_part(
                Bucket=self._location.bucket, Key=name, UploadId=upload.upload_id, PartNumber=number, Body=body,
                ChecksumCRC32C=checksum,
            )  # fmt: skip
            return UploadedPart(number=number, etag=self._tag(answer, upload.key), size_bytes=len(body), crc32c=checksum)

        return await self._repeated(write, upload.key)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        ordered = sorted(parts, key=lambda part: part.number)
        try:
            await written_once(
                lambda: self._call(lambda: self._complete(upload, ordered), upload.key),
                lambda: self._is_made_of(upload.key, ordered),
                lost_to=(Conflict, UploadGone),
            )
        except UploadGone as gone:
            raise Unavailable(f"the upload of {upload.key} no longer exists; start again") from gone
        return crc_text_of_parts(ordered)

    def _complete(self, upload: Upload, parts: Sequence[UploadedPart]) -> None:
        listed: Any = [{"PartNumber": part.number, "ETag": part.etag, "ChecksumCRC32C": part.crc32c} for part in parts]
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if upload.if_absent else {}
        answer = self._client.complete_multipart_upload(
            Bucket=self._location.bucket, Key=self._location.name(upload.key), UploadId=upload.upload_id,
            MultipartUpload={"Parts": listed}, **condition,
        )  # fmt: skip
        self._tag(answer, upload.key)

    def _tag(self, answer: Mapping[str, Any], key: str) -> str:
        """The tag of what was written. Raises ``OutcomeUnknown`` without one: what stands between may answer 200, too."""
        if not answer.get("ETag"):
            raise OutcomeUnknown(f"{self.url} confirmed a write of {key} without a tag: is a proxy in between?")
        return str(answer["ETag"])

    async def _is_made_of(self, key: str, parts: Sequence[UploadedPart]) -> bool:
        """Whether the object consists of these parts, by its size and by the checksum that S3 computes from theirs.

        If the server reports none, the tag decides, which S3 computes from the parts' tags. Raises ``OutcomeUnknown`` for an
        object of the right size with another tag: with encryption tags are not digests.
        """
        answer = await self._catalogue.headers(key)
        if answer["ContentLength"] != sum(part.size_bytes for part in parts):
            return False
        checksum = str(answer.get("ChecksumCRC32C", ""))
        if "-" in checksum:  # computed from the parts' checksums, not from the whole object
            return checksum == crc_text_of_parts(parts)
        tag = answer["ETag"].strip('"')
        if tag != _tag_of(parts):
            raise OutcomeUnknown(f"{self.url}: the tag {tag} of {key} does not show whether this upload made it")
        return True

    async def abort_upload(self, upload: Upload) -> None:
        def abort() -> None:
            self._client.abort_multipart_upload(
                Bucket=self._location.bucket, Key=self._location.name(upload.key), UploadId=upload.upload_id
            )

        try:
            await self._repeated(abort, upload.key)
        except NoSuchObject:
            return

    def list_uploads(self) -> AsyncIterator[Upload]:
        return self._catalogue.list_uploads()

    async def features(self, key: str) -> StoreFeatures:
        return await read_features(self._async_client, self._location, key)

    async def close(self) -> None:
        self._reads.close()
        await self._async_client.close()
        self._client.close()

    async def _call(self, call: Callable[[], _Result], key: str) -> _Result:
        try:
            return await self._background.run(call)
        except (BotoCoreError, ClientError) as failure:
            raise from_botocore(failure, key, self.url) from failure

    async def _repeated(self, call: Callable[[], _Result], key: str) -> _Result:
        return await repeated(lambda: self._call(call, key))


def _boto3_client(session: boto3.Session, location: S3Location, threads: int) -> S3Client:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=WRITE_TIMEOUT_S,
        retries={"total_max_attempts": 1},
        max_pool_connections=threads,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # botocore signs payloads over plain HTTP anyway; under TLS the signature would be a redundant second checksum.
        s3={"addressing_style": location.addressing, "payload_signing_enabled": False},
    )
    return session.client("s3", endpoint_url=location.endpoint, config=config)


def _tag_of(parts: Sequence[UploadedPart]) -> str:
    """The tag of an object made from ``parts``; empty if a part's tag is not an MD5."""
    tags = [part.etag.strip('"') for part in parts]
    if not all(re.fullmatch(r"[0-9a-f]{32}", tag) for tag in tags):
        return ""
    digest = hashlib.md5(bytes.fromhex("".join(tags)), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(parts)}"
