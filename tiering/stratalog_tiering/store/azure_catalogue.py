"""The content of a container: blobs by listing and by HEAD, and uploads by their uncommitted blocks."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final
from xml.etree import ElementTree

from stratalog_core.errors import Invalid, NoSuchObject, Unavailable
from stratalog_tiering.store.azure_requests import AzureRequests
from stratalog_tiering.store.base import ObjectInfo, Upload
from stratalog_tiering.store.store_url import AzureLocation

UPLOAD_ID: Final = re.compile(r"[0-9a-f]{12}-[0-9a-f]{20}")
"""Milliseconds since 1970, and randomness."""
_BLOCK: Final = re.compile(rf"({UPLOAD_ID.pattern})-[0-9]{{6}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blob:
    """A blob in a listing, or a name of which there are only uncommitted blocks: then the tag and the date may be empty."""

    key: str
    size_bytes: int
    etag: str
    modified: str


class AzureCatalogue:
    """Listings and HEADs of one container. ``page_blobs`` is the maximum number of names in a page."""

    def __init__(self, location: AzureLocation, requests: AzureRequests, page_blobs: int) -> None:
        self._location = location
        self._requests = requests
        self._page_blobs = page_blobs

    async def headers(self, key: str) -> Mapping[str, str]:
        """The headers of a HEAD, names in lower case."""
        self._location.name(key)

        def ask() -> Mapping[str, str]:
            found = self._requests.send("HEAD", key).headers
            if not (found.get("etag") and "last-modified" in found):
                raise Unavailable(f"{self._location.url} described no blob at {key}: is a proxy in between?")
            return found

        return await self._requests.repeated(ask)

    async def head(self, key: str) -> ObjectInfo:
        found = await self.headers(key)
        return ObjectInfo(
            key=key,
            size_bytes=int(found["content-length"]),
            etag=found["etag"].strip('"'),
            last_modified_ms=_ms(found["last-modified"]),
            version_id=found.get("x-ms-version-id", ""),
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        last = ""
        async for blob in self._blobs(prefix, ""):
            if blob.key <= last:
                raise Invalid(
                    f"{self._location.url} lists {blob.key} after {last}, which is out of order: use an account without"
                    " hierarchical namespace"
                )
            last = blob.key
            yield ObjectInfo(key=blob.key, size_bytes=blob.size_bytes, etag=blob.etag, last_modified_ms=_ms(blob.modified))

    async def is_kept(self, key: str) -> bool:
        """Whether a listing of deleted blobs shows the blob of ``key``."""
        async for blob in self._blobs(key, "deleted"):
            if blob.key == key:
                return True
        return False

    async def list_uploads(self) -> AsyncIterator[Upload]:
        async for blob in self._blobs("", "uncommittedblobs"):
            if blob.size_bytes:
                continue
            for upload_id in await self._open_uploads(blob.key):
                yield Upload(key=blob.key, upload_id=upload_id, initiated_ms=int(upload_id.partition("-")[0], 16))

    async def _open_uploads(self, key: str) -> tuple[str, ...]:
        return await self._requests.repeated(lambda: self.open_uploads(key))

    def open_uploads(self, key: str) -> tuple[str, ...]:
        """Ids of the uploads that have uncommitted blocks of the blob of ``key``. Blocks."""
        try:
            answer = self._requests.send("GET", key, {"comp": "blocklist", "blocklisttype": "uncommitted"})
        except NoSuchObject:
            return ()
        names = (name.text or "" for name in self._xml(answer.body, "BlockList").iterfind("UncommittedBlocks/Block/Name"))
        return tuple(sorted({upload_id for upload_id in map(_upload_of, names) if upload_id}))

    async def _blobs(self, prefix: str, include: str) -> AsyncIterator[_Blob]:
        query = {"restype": "container", "comp": "list", "prefix": self._location.prefix + prefix}
        query |= {"maxresults": str(self._page_blobs)}
        query |= {"include": include} if include else {}
        marker = ""
        while True:
            blobs, marker = await self._page(query | ({"marker": marker} if marker else {}))
            for blob in blobs:
                yield blob
            if not marker:
                return

    async def _page(self, query: Mapping[str, str]) -> tuple[tuple[_Blob, ...], str]:
        """Blobs of one page, and the marker of the next; empty: there is none."""

        def read() -> tuple[tuple[_Blob, ...], str]:
            root = self._xml(self._requests.send("GET", None, query).body, "EnumerationResults")
            blobs = tuple(self._blob(found) for found in root.iterfind("Blobs/Blob"))
            return blobs, root.findtext("NextMarker") or ""

        return await self._requests.repeated(read)

    def _xml(self, body: bytes, kind: str) -> ElementTree.Element:
        """A list of this ``kind``. Raises ``Unavailable`` for anything else: a gateway's page would be an empty list."""
        try:
            root = ElementTree.fromstring(body)
        except ElementTree.ParseError:
            root = None
        if root is None or root.tag != kind:
            raise Unavailable(f"{self._location.url} sent no {kind}: is a proxy in between?")
        return root

    def _blob(self, found: ElementTree.Element) -> _Blob:
        return _Blob(
            key=self._location.key(found.findtext("Name") or ""),
            size_bytes=int(found.findtext("Properties/Content-Length") or 0),
            etag=(found.findtext("Properties/Etag") or "").strip('"'),
            modified=found.findtext("Properties/Last-Modified") or "",
        )


def _upload_of(block: str) -> str:
    """The id of the upload that a block belongs to; empty if it is not ours."""
    try:
        found = _BLOCK.fullmatch(base64.b64decode(block, validate=True).decode("ascii"))
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return found[1] if found else ""


def _ms(date: str) -> int:
    """Milliseconds since 1970 of an HTTP date."""
    return int(parsedate_to_datetime(date).timestamp() * 1000)
