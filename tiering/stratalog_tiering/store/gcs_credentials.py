"""Credentials for Google Cloud Storage: one source for obstore's reads and for our own requests.

google-auth finds them as all of Google's clients do (Application Default Credentials): the file that
``GOOGLE_APPLICATION_CREDENTIALS`` names, which may be a service account's key or describe a workload identity; the user's own
after ``gcloud auth application-default login``; the service account of the machine. Tokens are renewed before they expire.
"""

from __future__ import annotations

import os
import threading
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

import google.auth
import urllib3
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
from google.auth.transport.urllib3 import Request

from stratalog_core.errors import Invalid, Refused, Unavailable
from stratalog_core.ports import Background, Clock

if TYPE_CHECKING:
    from obstore.store import GCSCredential

VARIABLE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"
_PAUSE_S: Final = 10.0
"""After a token could not be renewed, or was refused, requests are sent with it for so long without another attempt."""
_TIMEOUT: Final = urllib3.Timeout(connect=2.0, read=10.0)


class GcsCredentials:
    """``place`` is the store's address for error messages. May be used from many threads. Sends no request before ``token``."""

    def __init__(self, place: str, background: Background, clock: Clock) -> None:
        self._place = place
        self._background = background
        self._clock = clock
        self._pool = urllib3.PoolManager(retries=False, timeout=_TIMEOUT)
        self._request = Request(self._pool)  # type: ignore[no-untyped-call]
        self._renewing = threading.Lock()
        self._found: Any = None
        self._renew_from_s = float("-inf")
        self._replace_from_s = float("-inf")

    async def __call__(self) -> GCSCredential:
        """The token with which obstore sends its requests."""
        await self._background.run(self.token)
        expiry = self._found.expiry
        return {"token": self._found.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    def token(self, refused: str | None = None) -> str:
        """A token, valid for some minutes if it can be renewed. Blocks. Raises ``Unavailable``, or ``Invalid`` without any.

        ``refused`` is one that the service did not accept. It is returned again if another one was refused a moment ago.
        """
        with self._renewing:
            try:
                if self._found is None:
                    self._found = google.auth.default(scopes=[_SCOPE], request=self._request)[0]
                if self._is_to_be_renewed() or self._replaces(refused):
                    self._found.refresh(self._request)
            except DefaultCredentialsError:
                raise Invalid(f"{self._place}: {_no_credentials()}") from None
            except TransportError:
                self._require_token("the service that issues tokens did not answer")
            except GoogleAuthError as failure:
                if not failure.retryable:
                    raise Refused(f"{self._place}: no token was issued; check the credentials and the role") from None
                self._require_token("no token was issued; the service asks to repeat the request")
            return str(self._found.token)

    def _is_to_be_renewed(self) -> bool:
        state = self._found.token_state.name
        return state == "INVALID" or (state == "STALE" and self._clock.monotonic() >= self._renew_from_s)

    def _replaces(self, refused: str | None) -> bool:
        """Whether ``refused`` is to be replaced before it expires; then it is not again for a while."""
        now = self._clock.monotonic()
        if refused is None or self._found.token != refused or now < self._replace_from_s:
            return False
        self._replace_from_s = now + _PAUSE_S
        return True

    def _require_token(self, problem: str) -> None:
        """Raise ``Unavailable`` unless there is a token that has not expired: it is renewed some minutes before."""
        if self._found is None or self._found.token_state.name == "INVALID":
            raise Unavailable(f"{self._place}: {problem}") from None
        self._renew_from_s = self._clock.monotonic() + _PAUSE_S

    def close(self) -> None:
        self._pool.clear()


def _no_credentials() -> str:
    """Why no credentials were found, without the file's content."""
    if path := os.environ.get(VARIABLE):
        return f"{VARIABLE} names {path}, which cannot be read or is not a credentials file"
    return (
        f"no credentials: set {VARIABLE} to the path of a credentials file, or log in with"
        " 'gcloud auth application-default login', or run on a machine of Google Cloud that has a service account"
    )
