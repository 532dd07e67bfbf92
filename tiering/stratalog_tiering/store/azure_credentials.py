"""Credentials of one Azure account: one source for obstore's reads and for our own requests.

Tokens are fetched by the caller's thread, kept, and renewed five minutes before they expire.
"""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import HTTPError

from stratalog_core.errors import Invalid, Refused, Unavailable
from stratalog_core.ports import Background, Clock
from stratalog_tiering.store.azure_settings import AzureSettings

if TYPE_CHECKING:
    from obstore.store import AzureCredential

_RESOURCE: Final = "https://storage.azure.com/"
_MACHINE_ENDPOINT: Final = "http://169.254.169.254/metadata/identity/oauth2/token"
"""The instance metadata service, the same on every virtual machine."""
_RENEWED_BEFORE_S: Final = 300
_PAUSE_S: Final = 10.0
"""After a token was refused, requests are sent with the next one for so long, whatever is answered."""
_TIMEOUT: Final = urllib3.Timeout(connect=2.0, read=10.0)
_ASSERTION_TYPE: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_OTHER_SOURCES: Final = (
    "no credentials in the environment: set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_KEY, or"
    " AZURE_STORAGE_SAS_TOKEN, or AZURE_TENANT_ID and AZURE_CLIENT_ID with AZURE_CLIENT_SECRET or"
    " AZURE_FEDERATED_TOKEN_FILE, or run on a machine that has an identity"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    text: str = field(repr=False)
    expires_ms: int
    """By our wall clock; 0: never."""


class AzureCredentials:
    """``place`` is the store's address for error messages. May be used from many threads."""

    def __init__(
        self,
        settings: AzureSettings,
        place: str,
        background: Background,
        clock: Clock,
        machine_endpoint: str = _MACHINE_ENDPOINT,
    ) -> None:
        self.settings = settings
        self._place = place
        self._background = background
        self._clock = clock
        self._machine_endpoint = machine_endpoint
        self._pool = urllib3.PoolManager(retries=False, timeout=_TIMEOUT)
        self._renewing = threading.Lock()
        self._replace_from_s = float("-inf")
        self._token = Token(text=settings.token, expires_ms=0) if settings.token else None

    async def __call__(self) -> AzureCredential:
        """The credentials with which obstore signs its requests."""
        if self.settings.key:
            return {"access_key": b64encode(self.settings.key).decode(), "expires_at": None}
        if self.settings.sas:
            return {"sas_token": self.settings.sas, "expires_at": None}
        token = await self._background.run(self.token)
        renewed_s = token.expires_ms // 1000 - _RENEWED_BEFORE_S
        return {"token": token.text, "expires_at": datetime.fromtimestamp(renewed_s, UTC) if token.expires_ms else None}

    def token(self, refused: Token | None = None) -> Token:
        """A token that is valid for some minutes. Blocks. Raises ``Unavailable``, or ``Refused``.

        ``refused`` is one that the service did not accept. It is returned again if another one was refused a moment ago.
        """
        with self._renewing:
            found, now_ms = self._token, self._clock.wall_ms()
            is_old = found is None or (found.expires_ms and found.expires_ms - _RENEWED_BEFORE_S * 1000 <= now_ms)
            if is_old or self._replaces(refused):
                found = self._token = self._fetch(now_ms)
            assert found is not None
            return found

    def _replaces(self, refused: Token | None) -> bool:
        """Whether ``refused`` is to be replaced before it expires; then it is not again for a while. Ours never expires."""
        now = self._clock.monotonic()
        if refused is None or self._token != refused or not refused.expires_ms or now < self._replace_from_s:
            return False
        self._replace_from_s = now + _PAUSE_S
        return True

    def close(self) -> None:
        self._pool.clear()

    def _fetch(self, now_ms: int) -> Token:
        given = self.settings
        if given.tenant_id and given.client_id and given.client_secret:
            return self._of_application({"client_secret": given.client_secret}, now_ms)
        if given.tenant_id and given.client_id and given.federated_token_file:
            assertion = self._federated_token()
            return self._of_application({"client_assertion_type": _ASSERTION_TYPE, "client_assertion": assertion}, now_ms)
        return self._of_machine(now_ms)

    def _federated_token(self) -> str:
        path = self.settings.federated_token_file
        try:
            return Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else "it is not text"
            raise Invalid(f"{self._place}: AZURE_FEDERATED_TOKEN_FILE {path} cannot be read: {reason}") from None

    def _of_application(self, proof: Mapping[str, str], now_ms: int) -> Token:
        given = self.settings
        form = {"grant_type": "client_credentials", "client_id": given.client_id, "scope": f"{_RESOURCE}.default", **proof}
        url = f"{given.authority}/{given.tenant_id}/oauth2/v2.0/token"
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._ask("POST", url, headers, urlencode(form), now_ms, f"{given.authority} did not answer")

    def _of_machine(self, now_ms: int) -> Token:
        given = self.settings
        query = {"resource": _RESOURCE, **({"client_id": given.client_id} if given.client_id else {})}
        if given.identity_endpoint:
            url = f"{given.identity_endpoint}?{urlencode({'api-version': '2019-08-01', **query})}"
            headers, silent = {"X-IDENTITY-HEADER": given.identity_header}, "IDENTITY_ENDPOINT did not answer"
        else:
            url = f"{self._machine_endpoint}?{urlencode({'api-version': '2018-02-01', **query})}"
            headers, silent = {"Metadata": "true"}, f"{_OTHER_SOURCES} (its metadata service did not answer)"
        return self._ask("GET", url, headers, None, now_ms, silent)

    def _ask(self, method: str, url: str, headers: Mapping[str, str], body: str | None, now_ms: int, silent: str) -> Token:
        """Ask for a token. Not chained: the failure's text may repeat the request."""
        try:
            answer = self._pool.request(method, url, headers=headers, body=body, redirect=False)
        except HTTPError:
            raise Unavailable(f"{self._place}: {silent}") from None
        if answer.status in (408, 429) or answer.status >= 500:
            raise Unavailable(f"{self._place}: no token, the identity service answered {answer.status}")
        found = _object(answer.data)
        if answer.status != 200 or not isinstance(found.get("access_token"), str):
            code = found.get("error") if isinstance(found.get("error"), str) else "no token in its answer"
            raise Refused(f"{self._place}: the identity service refused a token ({answer.status}, {code}); check the identity")
        return Token(text=found["access_token"], expires_ms=_expires_ms(found, now_ms))


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _expires_ms(found: Mapping[str, Any], now_ms: int) -> int:
    """``expires_in`` is seconds from now, ``expires_on`` seconds since 1970; a token without either is asked for again."""
    try:
        if "expires_in" in found:
            return now_ms + int(found["expires_in"]) * 1000
        return int(found.get("expires_on", 0)) * 1000 or now_ms
    except (TypeError, ValueError):
        return now_ms
