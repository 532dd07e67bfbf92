"""The probe reports for each kind of store the guarantees that the reference page lists."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from functools import cache
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
from click.testing import CliRunner
from conftest import AZURITE, FAKE_GCS, S3Server

from stratalog.app import stratalog
from stratalog.buckets import keep_versions
from stratalog.health.cluster import check_store
from stratalog.health.finding import Verdict
from stratalog.tier.session import store_session
from stratalog_core.system import SystemClock
from stratalog_tiering.worker.store_probe import probe_store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stores.md"
CELLS = {"yes": True, "no": False, "per bucket": False}
"""Any other cell depends on chance."""
STORES = {
    "directory": "directory",
    "minio": "MinIO",
    "versitygw": "versitygw",
    "moto": "moto",
    **({"azurite": "Azure Blob"} if AZURITE in os.environ else {}),
    **({"gcs": "Google Cloud"} if FAKE_GCS in os.environ else {}),
}
MARKS = {"moto": pytest.mark.smoke, **dict.fromkeys(("azurite", "gcs", "minio", "versitygw"), pytest.mark.s3)}


@cache
def documented() -> dict[str, dict[str, str]]:
    """The page's table: by store, the cell of each guarantee."""
    rows = [re.split(r" *\| *", line.strip("| \n")) for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head = next(row for row in rows if row[0] == "guarantee")
    table = rows[rows.index(head) + 2 :][:11]
    return {store: {row[0]: row[column] for row in table} for column, store in enumerate(head)}


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server.make_bucket(f"test-{uuid4().hex[:12]}").replace("?", "/some/prefix?")


@pytest.mark.parametrize(
    ("store_url", "name"),
    [pytest.param(kind, name, marks=MARKS.get(kind, ())) for kind, name in STORES.items()],
    indirect=["store_url"],
)
async def test_a_probe_reports_what_is_documented(store_url: str, name: str) -> None:
    async with store_session(store_url) as store:
        report = await probe_store(store, SystemClock(), random.Random())
        assert [info.key async for info in store.list("")] == []
        assert [upload async for upload in store.list_uploads()] == []
    cells = documented()[name]
    assert [each.name for each in report.guarantees] == list(cells)
    told = {each.name: each.holds for each in report.guarantees if cells[each.name] in CELLS}
    assert told == {guarantee: CELLS[cell] for guarantee, cell in cells.items() if cell in CELLS}


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(stratalog, ["store", "info", "--store", str(tmp_path)])
    assert done.exit_code == 0
    holds = {line[:24].strip(): line[24:].split()[0] for line in done.stdout.splitlines() if line[24:].strip()}
    assert (holds["conditional create"], holds["object lock"]) == ("yes", "no")


@pytest.mark.s3
def test_versioning_and_object_lock_are_seen_in_the_bucket(minio_server: S3Server) -> None:
    bucket = f"test-{uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    keep_versions(client, bucket, 7)
    client.close()
    url = f"s3://{bucket}?endpoint={minio_server.endpoint}"
    done = CliRunner().invoke(stratalog, ["store", "info", "--store", url, "--json"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["writable"], report["refusal"]) == (0, True, "")
    holds = {row["guarantee"]: row["holds"] for row in report["guarantees"]}
    assert holds["versioning"] is True
    assert holds["object lock"] is True
    assert asyncio.run(check_store(url)).verdict is Verdict.OK


@pytest.mark.s3
async def test_credentials_that_may_only_read_are_told_by_doctor(
    minio_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    bucket = url.removeprefix("s3://").split("?", maxsplit=1)[0]
    client = boto3.client("s3", endpoint_url=minio_server.endpoint, region_name="us-east-1")
    actions = ["s3:GetObject", "s3:ListBucket"]
    resources = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, "Resource": resources}]}
    session = boto3.client("sts", endpoint_url=minio_server.endpoint, region_name="us-east-1").assume_role(
        RoleArn="arn:aws:iam::123456789012:role/reader", RoleSessionName="reader", Policy=json.dumps(policy)
    )["Credentials"]
    client.close()
    for name, value in (
        ("ACCESS_KEY_ID", "AccessKeyId"),
        ("SECRET_ACCESS_KEY", "SecretAccessKey"),
        ("SESSION_TOKEN", "SessionToken"),
    ):
        monkeypatch.setenv(f"AWS_{name}", session[value])
    finding = await check_store(url)
    assert finding.verdict is Verdict.WARN
    assert "refuses writes" in finding.detail
