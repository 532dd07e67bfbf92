"""Azure without a server: what is signed, what a refusal means, where account and credentials come from; no secret is shown."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Conflict, Invalid, NoSuchObject, OutcomeUnknown, Refused, StratalogError, Unavailable
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_tiering.store import check_store_url, location_url, open_store, shown_url
from stratalog_tiering.store.azure_credentials import AzureCredentials
from stratalog_tiering.store.azure_requests import refusal, signed_headers, string_to_sign
from stratalog_tiering.store.azure_settings import azure_settings
from stratalog_tiering.store.base import Locked, UnexplainedAbsence, UploadGone
from stratalog_tiering.store.store_url import parse_azure_url
from stratalog_tiering.worker.store_probe import StoreReport

KEY = base64.b64encode(b"secret-of-the-account").decode()
SECRETS = (KEY, "secret-of-the-account", "hidden-signature", "hidden-token", "hidden-client-secret", "hidden-assertion")


@pytest.fixture(autouse=True)
def _no_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(("AZURE_", "IDENTITY_"))]:
        monkeypatch.delenv(name)


def test_the_text_that_is_signed_is_the_documented_one() -> None:
    """The example of "Authorize with Shared Key" in Azure's reference."""
    headers = {"x-ms-date": "Fri, 26 Jun 2015 23:39:12 GMT", "x-ms-version": "2015-02-21"}
    url = "https://myaccount.blob.core.windows.net/mycontainer?restype=container&comp=metadata&timeout=20"
    assert string_to_sign("GET", url, headers, "myaccount") == (
        "GET\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:Fri, 26 Jun 2015 23:39:12 GMT\nx-ms-version:2015-02-21\n"
        "/myaccount/mycontainer\ncomp:metadata\nrestype:container\ntimeout:20"
    )
    empty = string_to_sign("PUT", "https://a.blob.core.windows.net/c/b", {"Content-Length": "0", "If-None-Match": "*"}, "a")
    assert empty == "PUT\n\n\n\n\n\n\n\n\n*\n\n\n/a/c/b"
    assert signed_headers("GET", url, {}, "myaccount", b"key")["Authorization"].startswith("SharedKey myaccount:")


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (404, "BlobNotFound", NoSuchObject),
        (404, "ContainerNotFound", Refused),
        (404, "", UnexplainedAbsence),
        (409, "BlobAlreadyExists", Conflict),
        (412, "ConditionNotMet", Conflict),
        (412, "LeaseIdMissing", Refused),
        (409, "BlobImmutableDueToPolicy", Locked),
        (400, "InvalidBlockList", UploadGone),
        (400, "Md5Mismatch", Unavailable),
        (403, "AuthorizationFailure", Refused),
        (401, "", Refused),
        (429, "", Unavailable),
        (503, "ServerBusy", Unavailable),
        (503, "", OutcomeUnknown),
        (500, "OperationTimedOut", OutcomeUnknown),
        (502, "", OutcomeUnknown),
    ],
)
def test_a_refusal_says_whether_something_happened(status: int, code: str, error: type[StratalogError]) -> None:
    """Only the service's own word for it is absence: what stands between may answer 404 for reasons of its own."""
    assert type(refusal(status, code, "key", "az://c/")) is error


@pytest.mark.parametrize(
    ("environment", "url", "account", "endpoint"),
    [
        ({}, "az://history/a/b?account=mine", "mine", "https://mine.blob.core.windows.net"),
        ({"AZURE_STORAGE_ACCOUNT_NAME": "mine"}, "az://history", "mine", "https://mine.blob.core.windows.net"),
        ({"AZURE_STORAGE_ACCOUNT": "other"}, "az://history?account=mine", "mine", "https://mine.blob.core.windows.net"),
        (
            {"AZURE_STORAGE_ENDPOINT": "https://other.blob.core.windows.net", "AZURE_STORAGE_ACCOUNT": "other"},
            "az://history?account=mine", "mine", "https://mine.blob.core.windows.net",
        ),
        (
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=mine;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"},
            "az://history", "mine", "https://mine.blob.core.chinacloudapi.cn",
        ),
        ({}, "az://history?endpoint=http://127.0.0.1:10000/devstoreaccount1", "devstoreaccount1",
         "http://127.0.0.1:10000/devstoreaccount1"),
        ({}, "az://history?endpoint=https://mine.blob.core.usgovcloudapi.net/", "mine",
         "https://mine.blob.core.usgovcloudapi.net"),
        ({}, "az://history?account=mine&endpoint=https://blobs.example.com", "mine", "https://blobs.example.com"),
    ],
)  # fmt: skip
def test_account_and_endpoint_come_from_the_url_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, account: str, endpoint: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_store_url(url)
    found = parse_azure_url(url)
    assert (found.container, found.account, found.endpoint) == ("history", account, endpoint)
    for name in environment:
        monkeypatch.delenv(name)
    assert (
        parse_azure_url(location_url(url if not environment else f"{found.url}?account={account}&endpoint={endpoint}")) == found
    )


@pytest.mark.parametrize(
    "url",
    [
        "az://history", "az://History?account=mine", "az://hi--story?account=mine", "az:///prefix?account=mine",
        "az://history?account=M", "az://history?account=mine&region=here", "az://history?account=mine#hidden-signature",
        "az://mine:hidden-token@history", "az://history@mine?account=mine", "az://history?sig=hidden-signature&account=mine",
        "az://history?account=mine&endpoint=https://mine.blob.core.windows.net?sig=hidden-signature",
        "az://history?account=mine&endpoint=https://x:hidden-token@mine.blob.core.windows.net",
        "az://history/p?account=mine&keys=relative", "az://history/a%20b?account=mine", "az://history/a//b?account=mine",
    ],
)  # fmt: skip
def test_another_url_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_store_url(url)
    assert not [secret for secret in SECRETS if secret in refused.value.message + shown_url(url)]


def test_settings_never_show_secrets() -> None:
    settings = azure_settings(
        {
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=mine;AccountKey={KEY}",
            "AZURE_STORAGE_SAS_TOKEN": "?sig=hidden-signature",
            "AZURE_STORAGE_TOKEN": "hidden-token",
            "AZURE_CLIENT_SECRET": "hidden-client-secret",
            "IDENTITY_HEADER": "hidden-assertion",
        }
    )
    assert (settings.key, settings.sas) == (b"secret-of-the-account", "sig=hidden-signature")
    assert not [secret for secret in SECRETS if secret in repr(settings)]


@given(text=st.text(alphabet="AccountNameKy=;SharedignturBlobEp+/?%", max_size=60))
def test_a_wrong_connection_string_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        azure_settings({"AZURE_STORAGE_CONNECTION_STRING": f"{text};AccountKey=%hidden-token%"})
    assert "hidden-token" not in refused.value.message


class IdentityServer(ThreadingHTTPServer):
    """Answers each request with the next of ``answers`` (status, body) and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[tuple[str, dict[str, str], dict[str, list[str]]]] = []


class _Handler(BaseHTTPRequestHandler):
    server: IdentityServer

    def do_GET(self) -> None:
        self._answer(parse_qs(urlsplit(self.path).query))

    def do_POST(self) -> None:
        self._answer(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))

    def _answer(self, given: dict[str, list[str]]) -> None:
        self.server.asked.append((urlsplit(self.path).path, dict(self.headers.items()), given))
        status, body = self.server.answers.pop(0)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def identity() -> Iterator[IdentityServer]:
    with IdentityServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def background() -> Iterator[ThreadBackground]:
    made = ThreadBackground(1, "azure")
    yield made
    made.close()


class ManualClock(SystemClock):
    """A clock that tests set."""

    now_ms = 1_700_000_000_000

    def wall_ms(self) -> int:
        return self.now_ms


@pytest.mark.parametrize("source", ["client secret", "workload identity", "machine", "service"])
async def test_tokens_come_from_each_identity_and_are_renewed_in_time(
    source: str, identity: IdentityServer, background: ThreadBackground, tmp_path: Path
) -> None:
    address = f"http://127.0.0.1:{identity.server_address[1]}"
    file = tmp_path / "token"
    file.write_text("hidden-assertion\n")
    application = {"AZURE_TENANT_ID": "tenant", "AZURE_CLIENT_ID": "client", "AZURE_AUTHORITY_HOST": address}
    environment = {
        "client secret": {**application, "AZURE_CLIENT_SECRET": "hidden-client-secret"},
        "workload identity": {**application, "AZURE_FEDERATED_TOKEN_FILE": str(file)},
        "machine": {"AZURE_CLIENT_ID": "client"},
        "service": {"IDENTITY_ENDPOINT": f"{address}/service", "IDENTITY_HEADER": "hidden-assertion"},
    }[source]
    clock = ManualClock()
    credentials = AzureCredentials(azure_settings(environment), "az://c/", background, clock, f"{address}/machine")
    identity.answers = [(200, {"access_token": f"hidden-token-{number}", "expires_in": "3600"}) for number in range(2)]
    first = await credentials()
    assert first["token"] == "hidden-token-0"  # type: ignore[typeddict-item]
    clock.now_ms += 3_299_000
    assert credentials.token().text == "hidden-token-0"
    clock.now_ms += 1_000
    assert credentials.token().text == "hidden-token-1"
    assert "hidden" not in repr(credentials.token())
    path, headers, asked = identity.asked[0]
    if source in ("machine", "service"):
        assert (path, asked["resource"]) == (f"/{source}", ["https://storage.azure.com/"])
        assert headers.get("Metadata" if source == "machine" else "X-Identity-Header") or headers.get("X-IDENTITY-HEADER")
    else:
        proof = {"client secret": "client_secret", "workload identity": "client_assertion"}[source]
        assert (path, asked["client_id"]) == ("/tenant/oauth2/v2.0/token", ["client"])
        assert asked[proof] == ["hidden-client-secret" if source == "client secret" else "hidden-assertion"]
    credentials.close()


async def test_a_token_that_is_refused_says_why_and_an_identity_that_is_away_is_asked_again(
    identity: IdentityServer, background: ThreadBackground
) -> None:
    address = f"http://127.0.0.1:{identity.server_address[1]}"
    environment = {
        "AZURE_TENANT_ID": "tenant", "AZURE_CLIENT_ID": "client", "AZURE_CLIENT_SECRET": "hidden-client-secret",
        "AZURE_AUTHORITY_HOST": address,
    }  # fmt: skip
    credentials = AzureCredentials(azure_settings(environment), "az://c/", background, SystemClock())
    identity.answers = [(401, {"error": "invalid_client"}), (503, {}), (200, {"token": "?"})]
    with pytest.raises(Refused, match="401, invalid_client"):
        credentials.token()
    with pytest.raises(Unavailable, match="503"):
        credentials.token()
    with pytest.raises(Refused, match="no token in its answer"):
        credentials.token()
    credentials.close()
    nobody = AzureCredentials(azure_settings({}), "az://c/", background, SystemClock(), "http://127.0.0.1:1/")
    with pytest.raises(Unavailable, match="set AZURE_STORAGE_CONNECTION_STRING, or"):
        nobody.token()
    nobody.close()


class AccountServer(ThreadingHTTPServer):
    """An account with one blob: ``extra`` are headers of its HEAD and its container's, ``keeps`` is soft delete."""

    daemon_threads = True

    def __init__(self, extra: dict[str, str], keeps: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Account)
        self.extra, self.keeps = extra, keeps


class _Account(BaseHTTPRequestHandler):
    server: AccountServer

    def do_HEAD(self) -> None:
        self._answer(200, b"", {"ETag": '"0x1"', "Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT", **self.server.extra})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(412, b"", {"x-ms-error-code": "ConditionNotMet"})

    def do_DELETE(self) -> None:
        self._answer(202, b"", {})

    def do_GET(self) -> None:
        blob = "<Blob><Name>probe/1</Name><Deleted>true</Deleted><Properties/></Blob>" if self.server.keeps else ""
        assert parse_qs(urlsplit(self.path).query)["include"] == ["deleted"]
        self._answer(200, f"<EnumerationResults><Blobs>{blob}</Blobs><NextMarker/></EnumerationResults>".encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.mark.parametrize(
    ("headers", "keeps", "unsafe"),
    [
        ({}, False, ""),
        ({}, True, ""),
        ({"x-ms-version-id": "2026-11-02T10:00:00.0000000Z"}, False, "switch off blob versioning"),
        ({"x-ms-resource-type": "file"}, False, "hierarchical namespace"),
        ({"x-ms-has-immutability-policy": "false", "x-ms-has-legal-hold": "false"}, False, ""),
        ({"x-ms-has-immutability-policy": "true"}, False, "immutability policy"),
        ({"x-ms-has-legal-hold": "true"}, False, "legal hold"),
    ],
)
async def test_accounts_that_break_promises_are_told(
    headers: dict[str, str], keeps: bool, unsafe: str, background: ThreadBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    with AccountServer(headers, keeps) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"az://history?account=mine&endpoint=http://127.0.0.1:{server.server_address[1]}/mine"
        store = open_store(url, background=background, clock=SystemClock(), random=Random(1))
        found = await store.features("probe/1")
        await store.close()
        server.shutdown()
        thread.join()
    assert (found.conditional_replace, found.final_deletion) == (True, not keeps)
    assert unsafe in found.unsafe
    assert bool(found.unsafe) == bool(unsafe)
    report = StoreReport(url=store.url, guarantees=(), clock_ahead_ms=0, unsafe=found.unsafe)
    if unsafe:
        with pytest.raises(Invalid, match="is not safe to write to"):
            report.check_writable()


class _Blob(BaseHTTPRequestHandler):
    """A blob that is answered to the bearer of a known token."""

    server: BlobServer

    def do_GET(self) -> None:
        self._answer(b"content")

    def do_HEAD(self) -> None:
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        is_known = self.headers["Authorization"] == "Bearer hidden-token"
        self.server.refused += not is_known
        self.send_response(200 if is_known else 401)
        for name, value in {
            "Content-Length": "7", "ETag": '"0x1"', "Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class BlobServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Blob)
        self.refused = 0


@pytest.fixture
def application(identity: IdentityServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that gets its tokens from ``identity``."""
    for name, value in {
        "AZURE_TENANT_ID": "tenant", "AZURE_CLIENT_ID": "client", "AZURE_CLIENT_SECRET": "hidden-client-secret",
        "AZURE_AUTHORITY_HOST": f"http://127.0.0.1:{identity.server_address[1]}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.fixture
def blob() -> Iterator[tuple[BlobServer, str]]:
    """A server, and the URL of its container."""
    with BlobServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, f"az://history?account=mine&endpoint=http://127.0.0.1:{server.server_address[1]}/mine"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("application")
async def test_one_token_serves_reads_by_obstore_and_requests_of_our_own(
    identity: IdentityServer, blob: tuple[BlobServer, str], background: ThreadBackground
) -> None:
    identity.answers = [(200, {"access_token": "hidden-token", "expires_in": 3600})]
    server, url = blob
    store = open_store(url, background=background, clock=SystemClock(), random=Random(1))
    assert (await store.get("a"), (await store.head("a")).size_bytes, await store.get("a")) == (b"content", 7, b"content")
    await store.close()
    assert (server.refused, len(identity.asked)) == (0, 1)


@pytest.mark.usefixtures("application")
async def test_a_token_that_the_service_refuses_is_renewed_once(
    identity: IdentityServer, blob: tuple[BlobServer, str], background: ThreadBackground
) -> None:
    """It was revoked, or our clock is wrong. A role that is missing is not asked for again and again."""
    identity.answers = [(200, {"access_token": f"hidden-{name}", "expires_in": 3600}) for name in ("old", "token", "unasked")]
    server, url = blob
    store = open_store(url, background=background, clock=SystemClock(), random=Random(1))
    assert (await store.head("a")).size_bytes == 7
    assert (server.refused, len(identity.answers)) == (1, 1)
    await store.close()
