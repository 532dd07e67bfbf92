"""Objects in Azure Blob Storage, as block blobs.

obstore reads. It offers neither single blocks nor a conditional commit of them, so writes, listings and deletions are requests
of our own (``azure_requests.py``), sent in the store's threads.

A multipart upload is a set of uncommitted blocks of the blob: their names contain the upload's id, which contains the time when
it was begun. The blob appears when Put Block List commits them, if there is none of that name (``If-None-Match: *``), and it
keeps the upload's id as metadata: after a lost response that tells whether the blob is ours. The service discards all other
uncommitted blocks of a blob that is written, and blocks of which none is committed for a week. So an upload is known to the
service only once it has a part, and of several uploads to one name, one can be completed.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from obstore.store import AzureStore as ObstoreAzure

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, Refused, Unavailable
from stratalog_core.object_lock import ObjectLock
from stratalog_core.ports import Background, Buffer, Clock, Random
from stratalog_tiering.store.azure_catalogue import UPLOAD_ID, AzureCatalogue
from stratalog_tiering.store.azure_credentials import AzureCredentials
from stratalog_tiering.store.azure_requests import AzureRequests
from stratalog_tiering.store.azure_settings import AzureSettings
from stratalog_tiering.store.base import (
    KeyRing,
    ObjectInfo,
    StoreFeatures,
    Upload,
    UploadedPart,
    UploadGone,
    check_length,
    check_range,
    refuse_lock,
)
from stratalog_tiering.store.http_requests import Answer, delete_each
from stratalog_tiering.store.key_ring import NoKeys
from stratalog_tiering.store.obstore_reads import ObstoreReads, ReadLimits, client_options, retry_config
from stratalog_tiering.store.s3_attempts import written_once
from stratalog_tiering.store.store_url import AzureLocation

TIERS: Final = ("Hot", "Cool", "Cold")
"""Access tiers that can be read at once."""
PAGE_BLOBS: Final = 5000
"""The service's maximum."""
_LIMITS: Final = ReadLimits()
_IF_ABSENT: Final = {"If-None-Match": "*"}
_NO_BLOBS_ETAG: Final = '"0x0000000000000000"'
_UPLOAD_META: Final = "x-ms-meta-stratalogupload"
_ABORT_META: Final = "x-ms-meta-stratalogabort"
_PARTS_MAX: Final = 50_000


class AzureStore:
    """See :class:`stratalog_tiering.store.base.ObjectStore`. ``background`` runs ``threads`` calls at once."""

    def __init__(
        self,
        location: AzureLocation,
        settings: AzureSettings,
        *,
        background: Background,
        clock: Clock,
        random: Random,
        threads: int,
        read_limits: ReadLimits = _LIMITS,
        keys: KeyRing | None = None,
        page_blobs: int = PAGE_BLOBS,
    ) -> None:
        self._location = location
        self._keys = keys or NoKeys()
        self._clock = clock
        self._random = random
        self._credentials = AzureCredentials(settings, location.url, background, clock)
        self._requests = AzureRequests(location, self._credentials, background, threads)
        self._catalogue = AzureCatalogue(location, self._requests, page_blobs)
        self._reads = ObstoreReads(_obstore(location, self._credentials, read_limits), location.url, location.name, read_limits)

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
        headers = {"x-ms-blob-type": "BlockBlob", **self._tier(storage_class, lock), **(_IF_ABSENT if if_absent else {})}
        self._location.name(key)

        def write() -> None:
            self._requests.send("PUT", key, headers=headers, body=b"".join(parts))

        async def is_ours() -> bool:
            return await self.get(key) == b"".join(parts)

        await written_once(lambda: self._requests.run(write), is_ours, lost_to=(Conflict,))

    def _tier(self, storage_class: str, lock: ObjectLock | None) -> dict[str, str]:
        """Headers of the request that creates a blob. Raises ``Invalid`` for what this store does not offer."""
        refuse_lock(self.url, lock)
        if storage_class and storage_class not in TIERS:
            raise Invalid(f"{self.url} has no access tier {storage_class!r} that can be read at once; use {', '.join(TIERS)}")
        return {"x-ms-access-tier": storage_class} if storage_class else {}

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

    async def head(self, key: str) -> ObjectInfo:
        return await self._catalogue.head(key)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._catalogue.list(prefix)

    async def list_keys(self, prefix: str) -> AsyncIterator[str]:
        async for info in self._catalogue.list(prefix):
            yield info.key

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._location.name(key)
        await delete_each(keys, self._delete_repeatedly)

    async def _delete_repeatedly(self, key: str) -> None:
        await self._requests.repeated(lambda: self._delete(key, {}))

    def _delete(self, key: str, condition: Mapping[str, str]) -> None:
        try:
            self._requests.send("DELETE", key, headers={"x-ms-delete-snapshots": "include", **condition})
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
        self._location.name(key)
        self._tier(storage_class, lock)
        now_ms = self._clock.wall_ms()
        upload_id = f"{now_ms:012x}-{self._random.getrandbits(80):020x}"
        # The tier is set when the blocks are committed, maybe by another object than this: the id carries it.
        shown = f"{upload_id}:{storage_class}" if storage_class else upload_id
        return Upload(key=key, upload_id=shown, initiated_ms=now_ms, part_bytes=part_bytes, if_absent=if_absent)

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        block = _block_id(upload, number)

        def write() -> UploadedPart:
            body = b"".join(parts)
            self._requests.send("PUT", upload.key, {"comp": "block", "blockid": block}, body=body)
            return UploadedPart(number=number, etag=block, size_bytes=len(body))

        return await self._requests.repeated(write)

    async def complete_upload(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        blocks = [_block_id(upload, part.number) for part in sorted(parts, key=lambda part: part.number)]
        upload_id, _, storage_class = upload.upload_id.partition(":")
        headers = {_UPLOAD_META: upload_id, **self._tier(storage_class, None), **(_IF_ABSENT if upload.if_absent else {})}

        async def write() -> None:
            try:
                await self._requests.run(lambda: self._commit(upload.key, blocks, headers))
            except UploadGone:
                if upload.if_absent and await self._exists(upload.key):
                    raise Conflict(f"object {upload.key} already exists in {self.url}", key=upload.key) from None
                raise

        async def is_ours() -> bool:
            return (await self._catalogue.headers(upload.key)).get(_UPLOAD_META) == upload_id

        try:
            await written_once(write, is_ours, lost_to=(Conflict, UploadGone))
        except UploadGone as gone:
            raise Unavailable(f"the upload of {upload.key} no longer exists; start again") from gone
        return ""

    def _commit(self, key: str, blocks: Sequence[str], headers: Mapping[str, str]) -> Answer:
        listed = "".join(f"<Uncommitted>{block}</Uncommitted>" for block in blocks)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode()
        return self._requests.send("PUT", key, {"comp": "blocklist"}, headers, body)

    async def _exists(self, key: str) -> bool:
        try:
            await self._catalogue.headers(key)
        except NoSuchObject:
            return False
        return True

    async def abort_upload(self, upload: Upload) -> None:
        """Discard the upload's blocks, which the service does only when it writes the blob: as an empty one, deleted at once.

        If a blob of the name exists, nothing is done: the service discards the blocks within a week.
        """
        upload_id = upload.upload_id.partition(":")[0]

        def abort() -> None:
            if upload_id not in self._catalogue.open_uploads(upload.key):
                return
            with contextlib.suppress(Conflict):  # perhaps made by an attempt whose response was lost
                self._commit(upload.key, [], {_ABORT_META: upload_id, **_IF_ABSENT})

        def remove() -> None:
            try:
                found = self._requests.send("HEAD", upload.key).headers
                if found.get(_ABORT_META) == upload_id:
                    self._delete(upload.key, {"If-Match": found["etag"]})
            except (NoSuchObject, Conflict):
                return

        await self._requests.repeated(abort)
        await self._requests.repeated(remove)

    def list_uploads(self) -> AsyncIterator[Upload]:
        return self._catalogue.list_uploads()

    async def features(self, key: str) -> StoreFeatures:
        found = await self._catalogue.headers(key)
        return StoreFeatures(
            conditional_replace=await self._refuses_replacement(key),
            checksums_at_rest=False,
            versioning=False,
            object_lock=False,
            final_deletion=await self._deletes_finally(key),
            unsafe=_unsafe({**found, **await self._container()}),
        )

    async def _container(self) -> Mapping[str, str]:
        """The headers of the container's own properties; none if the credentials do not allow to ask."""
        try:
            return (await self._requests.repeated(lambda: self._requests.send("HEAD", None, {"restype": "container"}))).headers
        except Refused:
            return {}

    async def _deletes_finally(self, key: str) -> bool | None:
        """Delete the blob, and see whether the service keeps it (soft delete)."""
        await self.delete([key])
        try:
            return not await self._catalogue.is_kept(key)
        except Refused:  # listings of deleted blobs may be refused
            return None

    async def _refuses_replacement(self, key: str) -> bool:
        headers = {"x-ms-blob-type": "BlockBlob", "If-Match": _NO_BLOBS_ETAG}
        try:
            await self._requests.repeated(lambda: self._requests.send("PUT", key, headers=headers))
        except Conflict:
            return True
        return False

    async def close(self) -> None:
        self._requests.close()
        self._credentials.close()


def _unsafe(headers: Mapping[str, str]) -> str:
    """Why an account must not be written to whose blobs and container have these headers."""
    if "x-ms-version-id" in headers:
        return "the account keeps versions, which deletions would leave: switch off blob versioning"
    if "x-ms-resource-type" in headers:
        return "the account has a hierarchical namespace, whose listings contain directories: use an account without"
    if "true" in (headers.get("x-ms-has-immutability-policy"), headers.get("x-ms-has-legal-hold")):
        return "the container has an immutability policy or a legal hold, which refuses to delete or replace blobs: remove it"
    return ""


def _obstore(location: AzureLocation, credentials: AzureCredentials, limits: ReadLimits) -> ObstoreAzure:
    # Everything that obstore would read from the environment itself is given.
    return ObstoreAzure(
        location.container,
        account_name=location.account,
        endpoint=location.endpoint,
        use_emulator=False,
        use_fabric_endpoint=False,
        skip_signature=False,
        credential_provider=credentials,
        client_options=client_options(location.endpoint, limits),
        retry_config=retry_config(limits),
    )


def _block_id(upload: Upload, number: int) -> str:
    """The name of part ``number``; all blocks of a blob have names of equal length. Raises ``Invalid``."""
    upload_id = upload.upload_id.partition(":")[0]
    if not UPLOAD_ID.fullmatch(upload_id) or not 1 <= number <= _PARTS_MAX:
        raise Invalid(f"part {number} of upload {upload.upload_id!r}: numbers are 1 to {_PARTS_MAX}")
    return base64.b64encode(f"{upload_id}-{number:06d}".encode()).decode()
