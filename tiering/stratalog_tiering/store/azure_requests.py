"""Requests to Azure Blob Storage that obstore does not offer, sent by urllib3 in the store's threads.

``send`` makes one attempt and raises this project's errors: the request had no effect, its outcome is unknown, or it was
refused. Refusals are mapped by the code that the service gives; a missing container is a configuration error and never counts
as a missing blob. No error repeats a URL, which may hold a shared access signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from email.utils import formatdate
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from stratalog_core.errors import Conflict, NoSuchObject, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.ports import Background
from stratalog_tiering.store.azure_credentials import AzureCredentials, Token
from stratalog_tiering.store.base import Locked, UnexplainedAbsence, UploadGone
from stratalog_tiering.store.http_requests import Answer, HttpRequests
from stratalog_tiering.store.store_url import AzureLocation

VERSION: Final = "2023-11-03"
"""The version of the service's interface."""
_SIGNED_HEADERS: Final = (
    "content-encoding", "content-language", "content-length", "content-md5", "content-type", "date", "if-modified-since",
    "if-match", "if-none-match", "if-unmodified-since", "range",
)  # fmt: skip
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,80})</Code>")
_ABSENT: Final = frozenset({"BlobNotFound", "ResourceNotFound"})
_NO_CONTAINER: Final = frozenset({"ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"})
_EXISTS: Final = frozenset({"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"})
_UPLOAD_GONE: Final = frozenset({"InvalidBlockList"})
_LOCKED: Final = frozenset({"BlobImmutableDueToPolicy", "BlobImmutableDueToLegalHold"})
_NOT_DONE: Final = frozenset({"ServerBusy", "Md5Mismatch", "TooManyRequests", "AccountBeingCreated"})
"""The request had no effect and may be repeated: the service is busy, or the body was damaged in transit."""
_DONE: Final = {"PUT": 201, "DELETE": 202}
"""The service's confirmation of a write. A proxy in between may answer 200 for reasons of its own."""


class AzureRequests(HttpRequests):
    """Requests to one container."""

    def __init__(self, location: AzureLocation, credentials: AzureCredentials, background: Background, threads: int) -> None:
        super().__init__(location.url, background, threads)
        self._location = location
        self._credentials = credentials

    def send(
        self,
        method: str,
        key: str | None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """Send one request about the blob of ``key``, or about the container if it is None. Blocks."""
        url = self._url(key, query or {})
        given = {"x-ms-version": VERSION, **(headers or {})}
        if method == "PUT":
            given |= {"Content-Length": str(len(body)), "Content-MD5": _digest(body)}
        about = key or "the container"
        answer = self._authorized(method, url, given, body, about)
        if 200 <= answer.status < 300 and answer.status == _DONE.get(method, answer.status):
            return answer
        code = answer.headers.get("x-ms-error-code") or _code_of(answer.body)
        raise refusal(answer.status, code, about, self._location.url)

    def _url(self, key: str | None, query: Mapping[str, str]) -> str:
        path = self._location.container if key is None else f"{self._location.container}/{self._location.name(key)}"
        return f"{self._location.endpoint}/{quote(path)}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")

    def _authorized(self, method: str, url: str, headers: Mapping[str, str], body: bytes, about: str) -> Answer:
        """The answer to a request with the credentials; to a second one with another token if the first one is refused."""
        settings = self._credentials.settings
        if settings.key:
            headers = signed_headers(method, url, headers, self._location.account, settings.key)
            return self.attempt(method, url, headers, body, about)
        if settings.sas:
            return self.attempt(method, f"{url}{'&' if '?' in url else '?'}{settings.sas}", headers, body, about)

        def ask(token: Token) -> Answer:
            return self.attempt(method, url, {**headers, "Authorization": f"Bearer {token.text}"}, body, about)

        return self.with_token(self._credentials.token, ask)


def signed_headers(method: str, url: str, headers: Mapping[str, str], account: str, key: bytes) -> dict[str, str]:
    """``headers`` with the date and the signature of the account's key."""
    dated = {**headers, "x-ms-date": formatdate(usegmt=True)}
    signature = hmac.digest(key, string_to_sign(method, url, dated, account).encode(), "sha256")
    return {**dated, "Authorization": f"SharedKey {account}:{base64.b64encode(signature).decode()}"}


def string_to_sign(method: str, url: str, headers: Mapping[str, str], account: str) -> str:
    """The text that the account's key signs: "Authorize with Shared Key", version 2009-09-19 and later."""
    lower = {name.lower(): value for name, value in headers.items()}
    if lower.get("content-length") == "0":
        lower["content-length"] = ""
    standard = [lower.get(name, "") for name in _SIGNED_HEADERS]
    own = [f"{name}:{lower[name]}" for name in sorted(lower) if name.startswith("x-ms-")]
    parts = urlsplit(url)
    query = [f"{name.lower()}:{value}" for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True))]
    return "\n".join([method, *standard, *own, f"/{account}{parts.path}", *query])


def refusal(status: int, code: str, about: str, place: str) -> StratalogError:
    """The error for a refused request; ``OutcomeUnknown`` if it may have had an effect."""
    shown = code or str(status)
    if code in _NO_CONTAINER:
        return Refused(f"{place}: the container does not exist ({shown}); create it first")
    if code in _ABSENT:
        return NoSuchObject(f"object {about} does not exist in {place}", key=about)
    if status == 404 and not code:
        return UnexplainedAbsence(f"{place}: the answer about {about} is 404 without a code: is a proxy in between?")
    if code in _UPLOAD_GONE:
        return UploadGone(f"the upload of {about} does not exist in {place}", key=about)
    if code in _EXISTS:
        return Conflict(f"object {about} already exists in {place}", key=about)
    if code in _LOCKED:
        return Locked(f"{place}: {about} is protected by an immutability policy or a legal hold ({code})", until_ms=0)
    if status in (401, 403):
        return Refused(f"{place}: access to {about} was refused ({shown}); check the credentials and the role")
    if code in _NOT_DONE or status == 429:
        return Unavailable(f"{place} temporarily refused the request ({shown})")
    if 400 <= status < 500:
        return Refused(f"{place}: request about {about} was refused ({status} {code})")
    return OutcomeUnknown(f"{place} failed at {about} ({status} {code})")


def _digest(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _code_of(body: bytes) -> str:
    found = _CODE.search(body)
    return found[1].decode() if found else ""
