"""``stratalog store init`` on a real MinIO: repeatable, and the account it makes can use its bucket and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner
from conftest import ACCESS_KEY, SECRET_KEY, S3Server

from stratalog.app import stratalog
from stratalog.buckets import Credentials, s3_client
from stratalog_core.errors import Invalid, StratalogError, Unavailable
from stratalog_tiering.store import s3_location

pytestmark = pytest.mark.s3


def init(url: str, account: Credentials, *options: str, **environment: str) -> dict[str, Any]:
    """Return what the command prints. Raises the error that makes it fail."""
    variables = {
        "MINIO_ROOT_USER": ACCESS_KEY,
        "MINIO_ROOT_PASSWORD": SECRET_KEY,
        "AWS_ACCESS_KEY_ID": account.access_key,
        "AWS_SECRET_ACCESS_KEY": account.secret_key,
    }
    arguments = ["store", "init", "--store", url, "--minio-account", "--json", "--timeout", "60", *options]
    done = CliRunner().invoke(stratalog, arguments, env=variables | environment)
    if isinstance(done.exception, StratalogError):
        raise done.exception
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_the_bucket_is_made_once_and_the_account_is_confined_to_it(minio_server: S3Server) -> None:
    bucket, other = f"history-{uuid4().hex[:8]}", f"other-{uuid4().hex[:8]}"
    url = f"s3://{bucket}?endpoint={minio_server.endpoint}&region=us-east-1"
    account = Credentials(access_key=f"account-{uuid4().hex[:8]}", secret_key="first-secret")
    assert init(url, account) == {"bucket": bucket, "created": True, "account": account.access_key}
    replaced = Credentials(access_key=account.access_key, secret_key="second-secret")
    assert init(url, replaced) == {"bucket": bucket, "created": False, "account": account.access_key}

    minio_server.make_bucket(other)
    client = s3_client(s3_location(url), replaced)
    client.put_object(Bucket=bucket, Key="segment", Body=b"bytes")
    assert client.get_object(Bucket=bucket, Key="segment")["Body"].read() == b"bytes"
    client.delete_object(Bucket=bucket, Key="segment")
    forbidden: list[Callable[[], object]] = [
        lambda: client.put_object(Bucket=other, Key="segment", Body=b"bytes"),
        lambda: client.list_objects_v2(Bucket=other),
        lambda: client.delete_bucket(Bucket=bucket),
        lambda: s3_client(s3_location(url), account).list_objects_v2(Bucket=bucket),
    ]
    for refused in forbidden:
        with pytest.raises(ClientError, match=r"AccessDenied|SignatureDoesNotMatch"):
            refused()


def test_deleted_objects_can_be_brought_back_for_some_days(minio_server: S3Server) -> None:
    bucket = f"history-{uuid4().hex[:8]}"
    url = f"s3://{bucket}?endpoint={minio_server.endpoint}&region=us-east-1"
    init(url, Credentials(access_key="another-account", secret_key="another-secret"))
    administrator = s3_client(s3_location(url), Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY))
    assert administrator.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    (rule,) = administrator.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["NoncurrentVersionExpiration"]["NoncurrentDays"] == 7


def test_a_bucket_with_object_lock_is_made_or_required(minio_server: S3Server) -> None:
    locking, plain = (f"history-{uuid4().hex[:8]}" for _ in range(2))
    account = Credentials(access_key=f"account-{uuid4().hex[:8]}", secret_key="account-secret")
    url = f"s3://{locking}?endpoint={minio_server.endpoint}&region=us-east-1"
    assert init(url, account, "--object-lock")["created"]
    assert not init(url, account, "--object-lock")["created"]
    client = s3_client(s3_location(url), account)
    until = datetime.now(UTC) + timedelta(days=1)
    client.put_object(Bucket=locking, Key="a", Body=b"x", ObjectLockMode="GOVERNANCE", ObjectLockRetainUntilDate=until)
    assert client.head_object(Bucket=locking, Key="a")["ObjectLockRetainUntilDate"].date() == until.date()
    (version,) = client.list_object_versions(Bucket=locking)["Versions"]
    with pytest.raises(ClientError, match="AccessDenied"):
        client.delete_object(Bucket=locking, Key="a", VersionId=version["VersionId"], BypassGovernanceRetention=True)
    init(url.replace(locking, plain), account)
    with pytest.raises(Invalid, match="has no Object Lock, which it must have from its creation on"):
        init(url.replace(locking, plain), account, "--object-lock")


def test_wrong_credentials_and_absent_servers_are_told_apart(minio_server: S3Server) -> None:
    account = Credentials(access_key="account", secret_key="account-secret")
    with pytest.raises(Invalid, match="administrator's credentials"):
        init(f"s3://b-{uuid4().hex}?endpoint={minio_server.endpoint}", account, MINIO_ROOT_PASSWORD="not-the-secret")
    with pytest.raises(Invalid, match="MINIO_ROOT_USER"):
        init(f"s3://b-{uuid4().hex}?endpoint={minio_server.endpoint}", account, MINIO_ROOT_USER="")
    with pytest.raises(Unavailable, match="did not accept requests within 5 s"):
        init("s3://bucket?endpoint=http://127.0.0.1:9", account, "--timeout", "5")
