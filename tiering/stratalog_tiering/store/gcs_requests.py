"""Requests to Google Cloud Storage that obstore does not offer: its JSON interface, by urllib3, in the store's threads.

Each method makes one attempt and raises this project's errors: the request had no effect, its outcome is unknown, or it was
refused. No error repeats a URL: the one of a resumable upload is a secret.

Source: Google's reference of the JSON API for Cloud Storage, version 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from stratalog_core.errors import Conflict, NoSuchObject, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.ports import Background, Buffer
from stratalog_tiering.store.base import Locked, Throttled, UnexplainedAbsence, UploadGone
from stratalog_tiering.store.gcs_credentials import GcsCredentials
from stratalog_tiering.store.http_requests import Answer, HttpRequests
from stratalog_tiering.store.store_url import GcsLocation

INCOMPLETE: Final = 308
"""The status with which a resumable upload says that it waits for more bytes."""
_UPLOAD_GONE: Final = frozenset({404, 410, 499})
"""The statuses of a resumable upload that has expired, was ended by the service, or was given up."""
_NO_HEADERS: Final[Mapping[str, str]] = {}
_NO_BUCKET: Final = re.compile(r"bucket does not exist", re.IGNORECASE)
_WRONG_CHECKSUM: Final = re.compile(r"doesn't match calculated", re.IGNORECASE)
_LOCKED: Final = frozenset({"retentionPolicyNotMet", "objectUnderActiveHold"})
_LIMITED: Final = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
"""An object is written at most once per second, whether it exists or not."""


class DamagedInTransit(Unavailable):
    """The bytes do not match the checksum that was sent with them; nothing was written."""


class GcsRequests(HttpRequests):
    """Requests to one bucket. An endpoint without TLS, which an emulator has, gets no credentials."""

    def __init__(self, location: GcsLocation, credentials: GcsCredentials, background: Background, threads: int) -> None:
        super().__init__(location.url, background, threads)
        self._location = location
        self._credentials = credentials
        self._has_bucket = False

    def bucket(self, fields: str) -> Any:
        """The bucket's own metadata. Blocks."""
        return decoded(self._send("GET", f"/storage/v1/b/{self._location.bucket}", {"fields": fields}))

    def objects(self, query: Mapping[str, str]) -> Any:
        """A page of the listing, whose fields must include ``kind``. Blocks."""
        page = decoded(self._send("GET", f"/storage/v1/b/{self._location.bucket}/o", query))
        if page.get("kind") != "storage#objects":
            raise Unavailable(f"{self._location.url} sent no listing of the bucket: is a proxy in between?")
        return page

    def object(self, method: str, key: str, query: Mapping[str, str]) -> Answer:
        """The answer to a request about an object's metadata. Blocks."""
        path = f"/storage/v1/b/{self._location.bucket}/o/{quote(self._location.name(key), safe='')}"
        return self._send(method, path, query, key=key)

    def upload(self, key: str, query: Mapping[str, str], content_type: str, body: bytes) -> Answer:
        """The answer to a request that begins to write an object, or writes it whole. Blocks."""
        path = f"/upload/storage/v1/b/{self._location.bucket}/o"
        return self._send(
            "POST", path, {"name": self._location.name(key), **query}, {"Content-Type": content_type}, body, key=key
        )

    def session(self, method: str, session: str, headers: Mapping[str, str], body: Buffer, key: str) -> Answer:
        """The answer to a request to a resumable upload, whose path and query are ``session``. Blocks.

        Raises ``UploadGone``, whatever answers so: the upload is begun again, and nothing is taken for absent.
        """
        return self._send(method, session, {}, headers, body, key=key, is_session=True)

    def check_bucket(self) -> None:
        """Raise ``Refused`` if the bucket does not exist. Blocks. Sends at most one request until one has succeeded."""
        if not self._has_bucket:
            self.objects({"maxResults": "1", "fields": "kind"})

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] = _NO_HEADERS,
        body: Buffer = b"",
        *,
        key: str | None = None,
        is_session: bool = False,
    ) -> Answer:
        """Send a request about the object of ``key``, or about the bucket if it is None."""
        about = key or "the bucket"
        url = self._location.endpoint + path + (f"?{urlencode(query, quote_via=quote)}" if query else "")
        answer = self._authorized(method, url, headers, body, about)
        if 200 <= answer.status < 300 or (is_session and answer.status == INCOMPLETE):
            if answer.body.lstrip().startswith(b"<"):
                raise OutcomeUnknown(f"{self._location.url} sent a page about {about}: is a proxy in between?")
            self._has_bucket = True
            return answer
        reason, message = _reason(answer.body)
        if is_session and answer.status in _UPLOAD_GONE and not _NO_BUCKET.search(message):
            raise UploadGone(f"the upload of {about} does not exist in {self._location.url}", key=about)
        failure = refusal(answer.status, reason, message, about, self._location.url)
        if isinstance(failure, NoSuchObject):
            if key is None:
                raise _no_bucket(self._location.url)
            self.check_bucket()
        raise failure

    def _authorized(self, method: str, url: str, headers: Mapping[str, str], body: Buffer, about: str) -> Answer:
        """The answer to a request with a token; to a second one with another token if the first one is refused."""
        if not self._location.has_credentials:
            return self.attempt(method, url, headers, body, about)

        def ask(token: str) -> Answer:
            return self.attempt(method, url, {**headers, "Authorization": f"Bearer {token}"}, body, about)

        return self.with_token(self._credentials.token, ask)


def decoded(answer: Answer) -> Any:
    """The object in the body of a successful answer. Raises ``OutcomeUnknown`` if there is none."""
    try:
        found = json.loads(answer.body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OutcomeUnknown("Google Cloud Storage sent an answer that is not JSON")
    return found


def refusal(status: int, reason: str, message: str, about: str, place: str) -> StratalogError:
    """The error for a refused request; ``OutcomeUnknown`` if it may have had an effect."""
    shown = f"{status} {reason}".strip()
    if status == 404 and _NO_BUCKET.search(message):
        return _no_bucket(place)
    if status in (404, 410) and reason:
        return NoSuchObject(f"object {about} does not exist in {place}", key=about)
    if status == 404:
        return UnexplainedAbsence(f"{place}: the answer about {about} is 404 without a reason: is a proxy in between?")
    if status == 412:
        return Conflict(f"object {about} already exists in {place}", key=about)
    if status == 403 and reason in _LOCKED:
        return Locked(f"{place}: {about} is protected by a retention policy or a hold ({reason})", until_ms=0)
    if (temporary := _temporary(status, reason, message, about, place)) is not None:
        return temporary
    if status in (401, 403):
        return Refused(f"{place}: access to {about} was refused ({shown}); check the credentials and the role")
    if 400 <= status < 500:
        return Refused(f"{place}: the request about {about} was refused ({shown})")
    return OutcomeUnknown(f"{place} failed at {about} ({shown})")


def _temporary(status: int, reason: str, message: str, about: str, place: str) -> Unavailable | None:
    """The error for a refusal that had no effect and says nothing about the next attempt; None if it is another one."""
    if _WRONG_CHECKSUM.search(message):
        return DamagedInTransit(f"{place} got other bytes of {about} than were sent ({status} {reason})")
    if status == 429 or reason in _LIMITED:
        return Throttled(f"{place} limits the rate of requests about {about} ({status} {reason})")
    return Unavailable(f"{place} temporarily refused the request ({status} {reason})") if status == 408 else None


def _no_bucket(place: str) -> Refused:
    return Refused(f"{place}: the bucket does not exist; create it first")


def _reason(body: bytes) -> tuple[str, str]:
    """Reason and message of a refusal; empty if it gives none."""
    try:
        error = json.loads(body)["error"]
        return str(error["errors"][0].get("reason", "")), str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "", body[:200].decode(errors="replace")
