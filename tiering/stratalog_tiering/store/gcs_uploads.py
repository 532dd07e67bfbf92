"""Multipart uploads to Google Cloud Storage, as resumable ones: the service takes an object's bytes in order, in one session.

A part is sent when all earlier ones were. Until then it waits in memory, as the last part does, whose bytes finish the object.
The service takes multiples of 256 KiB before the end, so up to that much of each part is kept for the next request. Whether the
object may replace one is decided when the session begins, and checked when it ends. A session that is not finished costs
nothing, cannot be listed, and ends after a week.

Requests of a session may be repeated: the service ignores bytes that it has, and answers about a finished one as before. It
returns the checksum of the whole object, which must be that of what was sent; else the object is deleted.

Source: "Resumable uploads" in Google's documentation of Cloud Storage.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from crc32c import crc32c

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, OutcomeUnknown, Unavailable
from stratalog_core.ports import Buffer
from stratalog_tiering.store.base import Upload, UploadedPart, UploadGone
from stratalog_tiering.store.checksums import crc_as_text, crc_text
from stratalog_tiering.store.gcs_requests import INCOMPLETE, GcsRequests, decoded
from stratalog_tiering.store.s3_attempts import written_once

UNIT: Final = 256 * 1024
"""All requests of a session but the last send a multiple of this."""
UPLOAD_META: Final = "stratalog-upload"
"""The object's own metadata that holds the id of the upload that made it."""
_TAKEN: Final = re.compile(r"bytes ?= ?0-([0-9]{1,18})")
WAITING_MAX: Final = 16
"""Maximum number of parts of an upload that wait for an earlier one."""


@dataclass(slots=True, kw_only=True)
class _Session:
    """``sent_bytes`` were sent, ``rest`` follows them; ``waiting`` are later parts, by number.

    ``is_within_part``: a part is being sent, or could not be sent to its end.
    """

    address: str
    upload: Upload
    sent_bytes: int = 0
    rest: bytes = b""
    is_within_part: bool = False
    crc: int = 0
    next_part: int = 1
    waiting: dict[int, bytes] = field(default_factory=dict)
    receipts: dict[int, UploadedPart] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class GcsUploads:
    """The uploads that this process has begun. ``place`` is the store's address for display."""

    def __init__(self, requests: GcsRequests, place: str) -> None:
        self._requests = requests
        self._place = place
        self._sessions: dict[str, _Session] = {}

    def begin(self, upload: Upload, location: str) -> None:
        """Remember a session by the address that the service gave it."""
        parts = urlsplit(location)
        self._sessions[upload.upload_id] = _Session(address=f"{parts.path}?{parts.query}", upload=upload)

    def begun(self) -> tuple[Upload, ...]:
        return tuple(session.upload for session in self._sessions.values())

    async def put_part(self, upload: Upload, number: int, parts: Sequence[Buffer]) -> UploadedPart:
        """See :meth:`stratalog_tiering.store.base.ObjectStore.put_part`. Raises ``Invalid`` if too many parts wait."""
        session = self._session(upload)
        body, receipt = await self._requests.run(lambda: _joined(number, parts))
        async with session.turn:
            _require_whole(session)
            if number < session.next_part:
                if session.receipts[number] != receipt:
                    raise Unavailable(f"part {number} of {upload.key} was sent before with other bytes; start again")
                return receipt
            if number not in session.waiting and len(session.waiting) == WAITING_MAX:
                raise Invalid(f"part {number} of {upload.key} is more than {WAITING_MAX} parts ahead; send them in order")
            session.waiting[number], session.receipts[number] = body, receipt
            while len(session.waiting.get(session.next_part, b"")) == upload.part_bytes:
                await self._send(session, session.waiting[session.next_part])
                del session.waiting[session.next_part]
                session.next_part += 1
        return receipt

    async def complete(self, upload: Upload, parts: Sequence[UploadedPart]) -> str:
        """See :meth:`stratalog_tiering.store.base.ObjectStore.complete_upload`."""
        session = self._session(upload)
        async with session.turn:
            _require_whole(session)
            if {part.number: part for part in parts} != session.receipts:
                raise Invalid(f"the parts of {upload.key} are not those that were sent")
            if set(session.waiting) - {session.next_part}:
                raise Invalid(f"part {session.next_part} of {upload.key} is missing or too short")
            checksum = await self._finish(session, session.waiting.get(session.next_part, b""))
            self._sessions.pop(upload.upload_id, None)
            return checksum

    async def abort(self, upload: Upload) -> None:
        session = self._sessions.pop(upload.upload_id, None)
        if session is None:
            return
        try:
            await self._requests.repeated(lambda: self._requests.session("DELETE", session.address, {}, b"", upload.key))
        except UploadGone:
            return

    def _session(self, upload: Upload) -> _Session:
        try:
            return self._sessions[upload.upload_id]
        except KeyError:
            raise UploadGone(f"the upload of {upload.key} was not begun by this process", key=upload.key) from None

    async def _send(self, session: _Session, part: bytes) -> None:
        """Send a part that is not the last, after the rest of the one before, and keep what is no multiple of ``UNIT``."""
        body = memoryview(session.rest + part if session.rest else part)
        first, length = session.sent_bytes, len(body) - len(body) % UNIT
        session.is_within_part = True
        while session.sent_bytes < first + length:
            try:
                taken = await self._requests.repeated(partial(self._put, session, body[session.sent_bytes - first : length]))
            except UploadGone:
                raise Unavailable(f"the upload of {session.upload.key} no longer exists; start again") from None
            if taken <= session.sent_bytes:
                raise Unavailable(f"{self._place} takes no more of {session.upload.key}; start again")
            session.sent_bytes = taken
        session.rest = bytes(body[length:])
        session.crc = crc32c(part, session.crc)
        session.is_within_part = False

    def _put(self, session: _Session, piece: memoryview) -> int:
        """Send bytes in the middle of the object; return how many the service has. Blocks."""
        end = session.sent_bytes + len(piece)
        headers = {"Content-Range": f"bytes {session.sent_bytes}-{end - 1}/*"}
        answer = self._requests.session("PUT", session.address, headers, piece, session.upload.key)
        found = _TAKEN.fullmatch(answer.headers.get("range", ""))
        return min(int(found[1]) + 1, end) if answer.status == INCOMPLETE and found else 0

    async def _finish(self, session: _Session, last: bytes) -> str:
        """Send the end of the object; return the checksum of the whole."""
        checksum = crc_as_text(crc32c(last, session.crc))
        rest, upload = session.rest + last, session.upload
        total = session.sent_bytes + len(rest)
        sent = f"{session.sent_bytes}-{total - 1}" if rest else "*"
        made: list[Any] = []

        def write() -> None:
            answer = self._requests.session(
                "PUT", session.address, {"Content-Range": f"bytes {sent}/{total}"}, rest, upload.key
            )
            if answer.status == INCOMPLETE:
                raise OutcomeUnknown(f"{self._place} waits for more of {upload.key}")
            made.append(decoded(answer))

        async def is_ours() -> bool:
            found = await self._requests.repeated(lambda: decoded(self._requests.object("GET", upload.key, {})))
            made.append(found)
            return bool(found.get("metadata", {}).get(UPLOAD_META) == upload.upload_id)

        try:
            await written_once(lambda: self._requests.run(write), is_ours, lost_to=(Conflict, UploadGone))
        except UploadGone:
            if made and upload.if_absent:  # an attempt whose answer was lost was refused, and that ended the session
                raise Conflict(f"object {upload.key} already exists in {self._place}", key=upload.key) from None
            raise Unavailable(f"the upload of {upload.key} no longer exists; start again") from None
        if made[-1].get("crc32c") != checksum:
            await self._delete(upload.key, str(made[-1].get("generation", "")))
            raise Unavailable(f"{upload.key} was damaged on the way to {self._place}; start again")
        return checksum

    async def _delete(self, key: str, generation: str) -> None:
        """Delete an object unless it was replaced."""
        try:
            await self._requests.repeated(lambda: self._requests.object("DELETE", key, {"ifGenerationMatch": generation}))
        except (NoSuchObject, Conflict):
            return


def _require_whole(session: _Session) -> None:
    """Raise ``Unavailable`` if a part could not be sent to its end: how much of it the service has is not known."""
    if session.is_within_part:
        raise Unavailable(f"the upload of {session.upload.key} failed within part {session.next_part}; start again")


def _joined(number: int, parts: Sequence[Buffer]) -> tuple[bytes, UploadedPart]:
    """A part's bytes, and its receipt."""
    body = b"".join(parts)
    return body, UploadedPart(number=number, etag=crc_text([body]), size_bytes=len(body))
