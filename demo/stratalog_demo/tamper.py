"""Flips one byte of a stored object directly in the store, and restores it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@contextmanager
def flipped_byte(store: str, key: str, position: int) -> Iterator[None]:
    """Invert all bits of the byte at ``position`` of object ``key``; restore it on exit."""
    original = _get(store, key)
    damaged = bytearray(original)
    damaged[position] ^= 0xFF
    _put(store, key, bytes(damaged))
    try:
        yield
    finally:
        _put(store, key, original)


def _get(store: str, key: str) -> bytes:
    if store.startswith("s3:"):
        client, bucket, prefix = _s3(store)
        return bytes(client.get_object(Bucket=bucket, Key=prefix + key)["Body"].read())
    return _path(store, key).read_bytes()


def _put(store: str, key: str, content: bytes) -> None:
    if store.startswith("s3:"):
        client, bucket, prefix = _s3(store)
        client.put_object(Bucket=bucket, Key=prefix + key, Body=content)
        return
    path = _path(store, key)
    os.chmod(path, 0o644)
    path.write_bytes(content)


def _path(store: str, key: str) -> Path:
    return Path(urlsplit(store).path) / key


def _s3(store: str) -> tuple[S3Client, str, str]:
    parts = urlsplit(store)
    query = parse_qs(parts.query)
    prefix = parts.path.strip("/")
    client = boto3.client(
        "s3",
        endpoint_url=query["endpoint"][0],
        region_name=query.get("region", ["us-east-1"])[0],
        config=Config(s3={"addressing_style": "path"}),
    )
    return client, parts.netloc, f"{prefix}/" if prefix else ""
