"""A MinIO server as a process of a local cluster.

It listens on loopback only and keeps its data below the cluster's directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stratalog_core.errors import NotFound
from stratalog_tiering.store import s3_location

BUCKET = "stratalog"
NAME = "minio"
_REMEDY = "run `make tools`, or set STRATALOG_MINIO to the program"


def minio_program() -> str:
    """Return the path of the server program: ``$STRATALOG_MINIO``, else on ``PATH``, else in the cache of ``make tools``."""
    named = os.environ.get("STRATALOG_MINIO")
    if named:
        if not Path(named).is_file():
            raise NotFound(f"STRATALOG_MINIO is {named}, which is not a file: {_REMEDY}")
        return named
    # Not Path.home(), which fails for a user without an account and without $HOME.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "stratalog", "tools", "minio")
    cached = sorted(cache.glob("*/minio"))
    found = shutil.which("minio") or (str(cached[-1]) if cached else None)
    if found is None:
        raise NotFound(f"MinIO is not installed: {_REMEDY}")
    return found


def minio_command(data: Path, address: str) -> list[str]:
    """Return the server's command line. ``minio_environment`` turns the web console off."""
    return [minio_program(), "server", str(data / "minio"), "--address", address, "--quiet"]


def minio_environment(credentials: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment: the store's credentials under MinIO's names, and no web console."""
    return {
        "MINIO_ROOT_USER": credentials["AWS_ACCESS_KEY_ID"],
        "MINIO_ROOT_PASSWORD": credentials["AWS_SECRET_ACCESS_KEY"],
        "MINIO_BROWSER": "off",
    }


def store_url(address: str) -> str:
    return f"s3://{BUCKET}?endpoint=http://{address}&region=us-east-1"


def make_bucket(address: str, credentials: Mapping[str, str], *, timeout_s: float, object_lock: bool = False) -> None:
    """Create the bucket unless it exists, as soon as the server answers. Raises ``Unavailable`` after ``timeout_s``."""
    # Loads boto3, which takes longer than everything else that a command on a local cluster loads.
    from stratalog.buckets import Credentials, create_bucket, s3_client

    location = s3_location(store_url(address))
    administrator = Credentials(
        access_key=credentials["AWS_ACCESS_KEY_ID"], secret_key=credentials["AWS_SECRET_ACCESS_KEY"]
    )  # fmt: skip
    create_bucket(s3_client(location, administrator), location, timeout_s=timeout_s, object_lock=object_lock)
