"""``stratalog store …``: prepares the bucket of a cluster's history, and probes what its server guarantees."""

from __future__ import annotations

import asyncio
import os
import random

import click

from stratalog.buckets import Credentials, create_bucket, keep_versions, make_minio_account, require_object_lock, s3_client
from stratalog.command_group import CommandGroup
from stratalog.exit_codes import ExitCode
from stratalog.output import json_option, print_json, print_rows
from stratalog.parameters import Integer
from stratalog.target import existing_store
from stratalog.tier.session import store_session
from stratalog.waiting import timeout_option
from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock
from stratalog_tiering.store import s3_location
from stratalog_tiering.worker.store_probe import StoreReport, probe_store

_HOLDS = {True: "yes", False: "no", None: "unknown"}


@click.group(cls=CommandGroup)
def store() -> None:
    """Prepare a bucket for a cluster's history, and probe what its server guarantees."""


@store.command()
@click.option("--store", "url", envvar="STRATALOG_STORE", required=True, help="s3://BUCKET?endpoint=URL&region=NAME")
@click.option(
    "--keep-versions-days",
    default=7,
    show_default=True,
    type=Integer(min=1),
    help="Days until a replaced or deleted version expires.",
)
@click.option(
    "--object-lock", is_flag=True, help="Create the bucket with Object Lock, which stratalog.tier.lock.mode of a topic needs."
)
@click.option(
    "--minio-account",
    is_flag=True,
    help="On MinIO: as administrator MINIO_ROOT_USER with MINIO_ROOT_PASSWORD, create the account AWS_ACCESS_KEY_ID with"
    " AWS_SECRET_ACCESS_KEY and restrict it to this bucket.",
)
@timeout_option(60.0, "Seconds to wait for the server.")
@json_option
def init(url: str, keep_versions_days: int, object_lock: bool, minio_account: bool, timeout_s: float, as_json: bool) -> None:
    """Create the bucket, enable versioning and expire old versions. Can be repeated; changes no object.

    Without --minio-account it uses the credentials that boto3 finds, which must be an administrator's.
    """
    location = s3_location(url)
    administrator = _credentials("MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD") if minio_account else None
    account = _credentials("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if minio_account else None
    client = s3_client(location, administrator)
    created = create_bucket(client, location, object_lock=object_lock, timeout_s=timeout_s)
    if object_lock and not created:
        require_object_lock(client, location.bucket)
    keep_versions(client, location.bucket, keep_versions_days)
    if administrator and account:
        make_minio_account(location, administrator, account)
    if as_json:
        print_json({"bucket": location.bucket, "created": created, "account": account.access_key if account else None})
    else:
        click.echo(f"bucket {location.bucket} {'created' if created else 'exists'} and is ready")


@store.command()
@click.option(
    "--store",
    "url",
    envvar="STRATALOG_STORE",
    required=True,
    help="A directory, s3://BUCKET/PREFIX?endpoint=URL, az://CONTAINER/PREFIX?account=NAME or gs://BUCKET/PREFIX",
)
@json_option
@click.pass_context
def info(context: click.Context, url: str, as_json: bool) -> None:
    """Probe what the store guarantees. Exits with 1 if tiering workers would refuse to write to it.

    Writes two small objects below probe/ and deletes them.
    """
    report = asyncio.run(_probe(existing_store(url)))
    rows = [
        {"guarantee": each.name, "holds": _HOLDS[each.holds], "need": each.need.value, "without": each.without}
        for each in report.guarantees
    ]
    try:
        report.check_writable()
        refusal = ""
    except Invalid as unsafe:
        refusal = unsafe.message
    if as_json:
        print_json(
            {
                "store": report.url,
                "writable": not refusal,
                "refusal": refusal,
                "warnings": report.warnings,
                "clock_ahead_ms": report.clock_ahead_ms,
                "guarantees": [row | {"holds": each.holds} for row, each in zip(rows, report.guarantees, strict=True)],
            }
        )
    else:
        print_rows(rows, ("guarantee", "holds", "need", "without"), title=report.url)
        for line in [*report.warnings, *([refusal] if refusal else [])]:
            click.echo(line, err=True)
    if refusal:
        context.exit(ExitCode.FAILED)


async def _probe(url: str) -> StoreReport:
    async with store_session(url) as opened:
        return await probe_store(opened, SystemClock(), random.Random())


def _credentials(key_name: str, secret_name: str) -> Credentials:
    access_key, secret_key = os.environ.get(key_name), os.environ.get(secret_name)
    if not access_key or not secret_key:
        raise Invalid(f"--minio-account needs {key_name} and {secret_name} in the environment")
    return Credentials(access_key=access_key, secret_key=secret_key)
