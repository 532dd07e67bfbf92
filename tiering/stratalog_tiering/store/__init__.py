"""The one border to object storage: a local directory, or S3 and all that speaks its protocol.

``open_store`` takes ``/dir``, ``file:///dir`` or ``s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1``.
Credentials come from the environment (``AWS_ACCESS_KEY_ID`` …, or whatever boto3's chain finds), never from the URL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from stratalog_core.errors import Invalid
from stratalog_core.ports import Background, Clock, Random
from stratalog_tiering.store.base import (
    PART_BYTES_MIN,
    ObjectInfo,
    ObjectStore,
    Upload,
    UploadedPart,
)
from stratalog_tiering.store.filesystem import FilesystemStore

STORE_THREADS: Final = 8
"""Calls at once that the ``background`` of a store should run."""

_S3_OPTIONS: Final = frozenset({"endpoint", "region"})


def open_store(url: str, *, background: Background, clock: Clock, random: Random, threads: int = STORE_THREADS) -> ObjectStore:
    """The store at ``url``. Does no request yet. Raises ``Invalid`` that says what is wrong with the URL."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return FilesystemStore(_directory(url), background, clock, random)
    if parts.scheme == "s3":
        return _open_s3(url, background, threads)
    raise Invalid(f"store {url!r} is of no known kind; use /dir, file:///dir or s3://bucket/prefix?endpoint=…&region=…")


def _directory(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(parts.path)
    if parts.netloc or not path.is_absolute() or parts.query:
        raise Invalid(f"store {url!r}: a local store is an absolute directory, as /dir or file:///dir")
    return path


def _open_s3(url: str, background: Background, threads: int) -> ObjectStore:
    # Imported here, because loading boto3 takes a third of a second that local stores need not wait for.
    from stratalog_tiering.store.s3 import S3Store

    parts = urlsplit(url)
    options = parse_qs(parts.query, strict_parsing=bool(parts.query))
    unknown = sorted(set(options) - _S3_OPTIONS)
    if not parts.netloc or parts.username or unknown:
        raise Invalid(f"store {url!r}: use s3://bucket/prefix with the options endpoint and region, and no credentials")
    return S3Store(
        parts.netloc,
        parts.path,
        endpoint=options.get("endpoint", [None])[0],
        region=options.get("region", ["us-east-1"])[0],
        background=background,
        threads=threads,
    )


__all__ = ["PART_BYTES_MIN", "STORE_THREADS", "ObjectInfo", "ObjectStore", "Upload", "UploadedPart", "open_store"]
