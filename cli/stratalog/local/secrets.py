"""Credentials of a local cluster's own store, created with the cluster in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path


def _path(data: Path) -> Path:
    return data / "config" / "store.env"


def make_store_credentials(data: Path) -> None:
    """Write ``config/store.env`` (NAME=value lines, mode 0600), unless it exists. It appears as a whole."""
    if _path(data).exists():
        return
    _path(data).parent.mkdir(parents=True, exist_ok=True)
    lines = (f"AWS_ACCESS_KEY_ID=stratalog-{secrets.token_hex(4)}", f"AWS_SECRET_ACCESS_KEY={secrets.token_urlsafe(24)}")
    descriptor, aside = tempfile.mkstemp(dir=_path(data).parent, prefix=".store-")
    try:
        with open(descriptor, "w") as stream:
            stream.write("\n".join(lines) + "\n")
        os.replace(aside, _path(data))
    except BaseException:
        os.unlink(aside)
        raise


def store_environment(data: Path) -> Mapping[str, str]:
    """Return the environment of processes that read or write the store; empty if the store is not the cluster's own."""
    if not _path(data).exists():
        return {}
    return dict(line.split("=", 1) for line in _path(data).read_text().splitlines() if "=" in line)
