"""Where credentials and the region come from, and encryption at rest: each has its effect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from conftest import KMS_KEY, S3Server
from obstore.auth.boto3 import Boto3CredentialProvider
from support.opened_store import opened

from stratalog_core.errors import Invalid, Refused, StratalogError
from stratalog_tiering.store import READ_ENGINES, s3_location
from stratalog_tiering.store.s3_reads import CREDENTIALS_LIFETIME

SOURCES = ("environment", "profile", "container", "instance", "web identity")
STATIC = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class ScriptedServer(ThreadingHTTPServer):
    """Gives out ``credentials`` as a container's agent, as an instance's metadata service, and as a token service.

    Also answers requests for an S3 object, and keeps their signatures.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.credentials: dict[str, Any] = {}
        self.signatures: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue", which 1.0 leaves to a time-out

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer("" if self.path.startswith("/bucket") else "a token of the metadata service")

    def do_HEAD(self) -> None:
        self._answer("")

    def do_GET(self) -> None:
        if self.path.startswith("/bucket"):
            self._answer("content")
        elif self.path.endswith("/security-credentials/"):
            self._answer("a-role")
        else:
            self._answer(json.dumps({"Code": "Success", "Type": "AWS-HMAC", **self.server.credentials}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        found = self.server.credentials
        self._answer(
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{found['AccessKeyId']}</AccessKeyId>"
            f"<SecretAccessKey>{found['SecretAccessKey']}</SecretAccessKey><SessionToken>{found['Token']}</SessionToken>"
            f"<Expiration>{found['Expiration']}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>"
        )

    def _answer(self, text: str) -> None:
        body = text.encode()
        if self.path.startswith("/bucket"):
            self.server.signatures.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("ETag", '"etag"')
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "600")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def session_credentials(minio_server: S3Server) -> dict[str, Any]:
    """Credentials of MinIO that expire in an hour and are valid with their token only."""
    client = boto3.client("sts", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    found = client.assume_role(RoleArn="arn:aws:iam::123456789012:role/any", RoleSessionName="any")["Credentials"]
    client.close()
    return {
        "AccessKeyId": found["AccessKeyId"],
        "SecretAccessKey": found["SecretAccessKey"],
        "Token": found["SessionToken"],
        "Expiration": found["Expiration"].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@pytest.fixture
def scripted_server(s3_credentials: None) -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def endpoint(scripted_server: ScriptedServer) -> str:
    return f"http://127.0.0.1:{scripted_server.server_address[1]}"


def environment_of(source: str, server: str, found: dict[str, Any], directory: Path) -> dict[str, str]:
    """Variables by which the credentials are found in one place only."""
    if source == "environment":
        return dict(zip(STATIC, (found["AccessKeyId"], found["SecretAccessKey"], found["Token"]), strict=True))
    if source == "profile":
        profile = directory / "credentials"
        values = zip(("aws_access_key_id", "aws_secret_access_key", "aws_session_token"), list(found.values())[:3], strict=True)
        profile.write_text("[history]\n" + "".join(f"{name} = {value}\n" for name, value in values))
        return {"AWS_PROFILE": "history", "AWS_SHARED_CREDENTIALS_FILE": str(profile)}
    if source == "container":
        return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server}/container"}
    if source == "instance":
        patient = {"AWS_METADATA_SERVICE_TIMEOUT": "60"}  # one second by default, and one attempt
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server, "AWS_EC2_METADATA_DISABLED": "false", **patient}
    token = directory / "token"
    token.write_text("a token of the identity provider")
    role = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/any", "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}
    return {**role, "AWS_ENDPOINT_URL_STS": server, "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.mark.s3
@pytest.mark.parametrize("source", SOURCES)
async def test_credentials_are_found_by_every_client(
    source: str,
    minio_server: S3Server,
    scripted_server: ScriptedServer,
    endpoint: str,
    session_credentials: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    scripted_server.credentials = session_credentials
    for name in STATIC:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment_of(source, endpoint, session_credentials, tmp_path).items():
        monkeypatch.setenv(name, value)
    for engine in READ_ENGINES:
        async with opened(f"{url}&read_engine={engine}") as store:
            await store.put(f"object-{engine}", [b"content"])
            assert await store.get(f"object-{engine}") == b"content"
            assert (await store.head(f"object-{engine}")).size_bytes == 7


def test_obstore_asks_again_before_credentials_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 returns credentials that are valid for ten more minutes at least."""
    expires = datetime.now(UTC) + timedelta(minutes=11)
    document = {"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "secret", "Expiration": expires.isoformat()}
    (tmp_path / "made").write_text(json.dumps(document))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path / 'made'}\n")
    for name in STATIC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    given = Boto3CredentialProvider(boto3.Session(), ttl=CREDENTIALS_LIFETIME)()
    assert given["access_key_id"] == "key"
    assert given["expires_at"] is not None
    assert given["expires_at"] < expires


async def test_the_region_comes_from_the_url_then_from_the_environment(
    scripted_server: ScriptedServer, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def signed_region(url: str) -> set[str]:
        scripted_server.signatures.clear()
        async with opened(url) as store:
            for request in (store.put("object", [b"content"]), store.get("object"), store.head("object")):
                with contextlib.suppress(StratalogError):
                    await request
        assert len(scripted_server.signatures) == 3, "boto3, obstore and aioboto3 have signed one request each"
        return {re.findall(r"Credential=[^,]*/([a-z0-9-]+)/s3/", signature)[0] for signature in scripted_server.signatures}

    url = f"s3://bucket?endpoint={endpoint}"
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert await signed_region(url) == {"us-east-1"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert await signed_region(url) == {"eu-central-1"}
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert await signed_region(url) == {"eu-west-1"}
    assert await signed_region(f"{url}&region=sa-east-1") == {"sa-east-1"}


@pytest.mark.s3
@pytest.mark.parametrize(
    ("options", "sse", "key_id"),
    [
        ("&sse=AES256", "AES256", None),
        ("&sse=aws:kms", "aws:kms", KMS_KEY),
        (f"&sse=aws:kms&sse_kms_key_id={KMS_KEY}", "aws:kms", KMS_KEY),
    ],
)
async def test_objects_and_uploads_are_encrypted_as_the_url_says(
    minio_server: S3Server, options: str, sse: str, key_id: str | None
) -> None:
    bucket = f"test-{uuid4().hex[:12]}"
    url = minio_server.make_bucket(bucket) + options
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    async with opened(url) as store:
        await store.put("object", [b"content"])
        upload = await store.create_upload("upload", 5 * 2**20)
        await store.complete_upload(upload, [await store.put_part(upload, 1, [b"content"])])
        for key in ("object", "upload"):
            assert bytes(await store.get_range(key, 3, 4)) == b"tent"
            head = await asyncio.to_thread(client.head_object, Bucket=bucket, Key=key)
            assert head["ServerSideEncryption"] == sse
            assert re.split(r"[:/]", head.get("SSEKMSKeyId", ""))[-1] == (key_id or "")
    client.close()


@pytest.mark.parametrize("options", ["sse=aes", "sse=AES256&sse_kms_key_id=key", "sse_kms_key_id=key"])
def test_wrong_encryption_is_refused(options: str) -> None:
    with pytest.raises(Invalid, match="sse"):
        s3_location(f"s3://bucket?{options}")


@pytest.mark.s3
async def test_objects_and_uploads_have_the_storage_class_that_is_asked_for(minio_server: S3Server) -> None:
    """MinIO knows two classes, and refuses S3's others."""
    bucket = f"test-{uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    async with opened(minio_server.make_bucket(bucket)) as store:
        for name, storage_class in (("reduced", "REDUCED_REDUNDANCY"), ("default", "")):
            await store.put(name, [b"content"], storage_class=storage_class)
            upload = await store.create_upload(f"{name}-upload", 5 * 2**20, storage_class)
            await store.complete_upload(upload, [await store.put_part(upload, 1, [b"content"])])
            for key in (name, f"{name}-upload"):
                head = await asyncio.to_thread(client.head_object, Bucket=bucket, Key=key)
                assert head.get("StorageClass", "") == storage_class
        for refused in (store.put("ia", [b"content"], storage_class="GLACIER_IR"), store.create_upload("ia", 1, "GLACIER_IR")):
            with pytest.raises(Refused, match="InvalidStorageClass"):
                await refused
    client.close()
