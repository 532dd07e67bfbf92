"""Google Cloud Storage without a server: what a refusal means, what a URL may hold, where tokens come from."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.ports import Background
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import check_store_url, location_url, shown_url
from stratalog_tiering.store.base import Locked, Throttled, UnexplainedAbsence
from stratalog_tiering.store.gcs_credentials import VARIABLE, GcsCredentials
from stratalog_tiering.store.gcs_requests import DamagedInTransit, GcsRequests, refusal
from stratalog_tiering.store.store_url import GcsLocation, parse_gcs_url


@pytest.mark.parametrize(
    ("status", "reason", "message", "error"),
    [
        (404, "notFound", "No such object: bucket/key", NoSuchObject),
        (404, "notFound", "The specified bucket does not exist.", Refused),
        (404, "", "<html>not found</html>", UnexplainedAbsence),
        (410, "gone", "", NoSuchObject),
        (412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.", Conflict),
        (403, "forbidden", "denied", Refused),
        (403, "retentionPolicyNotMet", "Object is subject to a retention policy", Locked),
        (403, "rateLimitExceeded", "", Throttled),
        (401, "authError", "", Refused),
        (400, "invalid", 'Provided CRC32C "AAAAAA==" doesn\'t match calculated CRC32C "BBBBBB==".', DamagedInTransit),
        (400, "invalid", "Invalid argument", Refused),
        (408, "", "", Unavailable),
        (429, "rateLimitExceeded", "", Throttled),
        (500, "backendError", "", OutcomeUnknown),
        (503, "backendError", "", OutcomeUnknown),
    ],
)
def test_a_refusal_says_whether_something_happened(status: int, reason: str, message: str, error: type[StratalogError]) -> None:
    """Only the service's own word for it is absence: what stands between may answer 404 for reasons of its own."""
    assert type(refusal(status, reason, message, "key", "gs://bucket/")) is error


@pytest.mark.parametrize(
    ("url", "prefix", "endpoint"),
    [
        ("gs://history", "", "https://storage.googleapis.com"),
        ("gs://history/a/b/", "a/b/", "https://storage.googleapis.com"),
        ("gs://history?endpoint=http://127.0.0.1:4443", "", "http://127.0.0.1:4443"),
        ("gs://history/a?endpoint=https://storage.example.com/&keys=/etc/keys", "a/", "https://storage.example.com"),
    ],
)
def test_a_url_names_bucket_prefix_and_endpoint(url: str, prefix: str, endpoint: str) -> None:
    check_store_url(url)
    found = parse_gcs_url(url)
    assert (found.bucket, found.prefix, found.endpoint) == ("history", prefix, endpoint)
    assert found.has_credentials is endpoint.startswith("https://")
    assert parse_gcs_url(location_url(url)) == found
    assert "keys" not in location_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "gs://History", "gs://hi", "gs:///prefix", "gs://history?region=here", "gs://history#hidden", "gs://u:hidden@history",
        "gs://history/hidden@prefix", "gs://history?token=hidden", "gs://history?endpoint=https://x:hidden@storage.example.com",
        "gs://history?endpoint=https://storage.example.com?key=hidden", "gs://history?keys=relative", "gs://history/a//b",
    ],
)  # fmt: skip
def test_another_url_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_store_url(url)
    assert "hidden" not in refused.value.message + shown_url(url)


class TokenServer(BaseHTTPRequestHandler):
    """Issues tokens that are valid for ``lifetime_s``, or answers ``status``."""

    issued = 0
    lifetime_s = 3600
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        kind.issued += 1
        token = {"access_token": f"token-{kind.issued}", "expires_in": kind.lifetime_s, "token_type": "Bearer"}
        body = json.dumps(token if kind.status == 200 else {"error": "invalid_grant"}).encode()
        self.send_response(kind.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TokenServer]]:
    """A service that issues tokens, and the key of a service account in the environment."""
    handler = type("Issuer", (TokenServer,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    secret = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = {
        "type": "service_account", "client_email": "worker@project.iam.gserviceaccount.com", "private_key_id": "1",
        "private_key": secret.decode(), "token_uri": f"http://127.0.0.1:{server.server_address[1]}/token",
    }  # fmt: skip
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "account.json"))
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


class ShiftedClock(SystemClock):
    """The system's clock, ``later_s`` later."""

    later_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.later_s


@pytest.fixture
def background() -> Iterator[Background]:
    threads = ThreadBackground(1, "store")
    yield threads
    threads.close()


async def test_a_service_account_gets_tokens(issuer: type[TokenServer], background: Background) -> None:
    credentials = GcsCredentials("gs://history/", background, SystemClock())
    given = await credentials()
    assert (given["token"], credentials.token()) == ("token-1", "token-1")
    assert given["expires_at"] is not None
    assert timedelta(minutes=50) < given["expires_at"] - datetime.now(UTC) < timedelta(minutes=70)


def test_a_token_that_is_about_to_expire_is_renewed(issuer: type[TokenServer], background: Background) -> None:
    issuer.lifetime_s = 60
    credentials = GcsCredentials("gs://history/", background, SystemClock())
    assert [credentials.token() for _ in range(3)] == ["token-1", "token-2", "token-3"]


def test_a_token_that_cannot_be_renewed_is_used_until_it_expires(issuer: type[TokenServer], background: Background) -> None:
    issuer.lifetime_s = 200  # to be renewed at once
    clock = ShiftedClock()
    credentials = GcsCredentials("gs://history/", background, clock)
    assert credentials.token() == "token-1"
    issuer.status = 503
    assert credentials.token() == "token-1"
    asked = issuer.issued
    assert (credentials.token(), issuer.issued) == ("token-1", asked), "not asked again for each request"
    issuer.status, clock.later_s = 200, 60.0
    assert credentials.token() == f"token-{asked + 1}"


def test_without_a_token_that_service_is_waited_for(issuer: type[TokenServer], background: Background) -> None:
    issuer.status = 503
    with pytest.raises(Unavailable, match="no token was issued"):
        GcsCredentials("gs://history/", background, SystemClock()).token()


def test_a_refused_token_is_a_configuration_error(issuer: type[TokenServer], background: Background) -> None:
    issuer.status = 400
    with pytest.raises(Refused, match="no token was issued; check the credentials") as refused:
        GcsCredentials("gs://history/", background, SystemClock()).token()
    assert "PRIVATE KEY" not in f"{refused.value!r} {refused.value.__cause__!r}"


@pytest.mark.parametrize("content", [None, "no JSON", '{"type": "unknown"}'])
def test_a_file_without_credentials_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background, content: str | None
) -> None:
    path = tmp_path / "account.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(Invalid, match=f"{VARIABLE} names {path}"):
        GcsCredentials("gs://history/", background, SystemClock()).token()


def test_without_credentials_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(Invalid, match=f"no credentials: set {VARIABLE}"):
        GcsCredentials("gs://history/", background, SystemClock()).token()


class Bucket(BaseHTTPRequestHandler):
    """Serves whoever has the token ``known``."""

    known = "token-2"
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        body = b'{"kind": "storage#objects"}'
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {self.known}" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def bucket() -> Iterator[tuple[type[Bucket], str]]:
    handler = type("Handler", (Bucket,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"gs://history?endpoint=http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_token_that_the_service_refuses_is_renewed_once(
    issuer: type[TokenServer],
    bucket: tuple[type[Bucket], str],
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was revoked, or our clock is wrong. A role that is missing is not asked for again and again."""
    monkeypatch.setattr(GcsLocation, "has_credentials", True)
    (handler, url), clock = bucket, ShiftedClock()
    location = parse_gcs_url(url)
    requests = GcsRequests(location, GcsCredentials(location.url, background, clock), background, 1)
    requests.check_bucket()
    assert (issuer.issued, handler.asked) == (2, 2)
    handler.known = "no token"
    for _ in range(3):
        with pytest.raises(Refused, match="refused"):
            requests.objects({})
    assert (issuer.issued, handler.asked) == (2, 5)
    clock.later_s = 60.0
    with pytest.raises(Refused, match="refused"):
        requests.objects({})
    assert (issuer.issued, handler.asked) == (3, 7)
    requests.close()
