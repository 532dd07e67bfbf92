"""The keys that protect data keys. They are never in the store, so that whoever can read it cannot read the records.

A key ring is a part of how a store is reached: the option ``keys`` of its URL names a directory with one file for each key, and
everything that opens the store, Spark's executors included, finds the keys there. Another kind of ring, such as a key
management service, is another implementation of the port ``KeyRing``.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stratalog_core.errors import Conflict, Corrupt, Invalid, StorageFailed
from stratalog_core.system import sync_directory
from stratalog_tiering.store.base import DATA_KEY_BYTES

KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_SUFFIX: Final = ".key"
_log = logging.getLogger(__name__)


class NoKeys:
    """The ring of a store whose URL names none."""

    async def make(self, name: str, context: bytes) -> tuple[bytes, bytes]:
        raise _without_ring(name)

    async def wrap(self, name: str, data_key: bytes, context: bytes) -> bytes:
        raise _without_ring(name)

    async def unwrap(self, name: str, wrapped: bytes, context: bytes) -> bytes:
        raise _without_ring(name)


def _without_ring(name: str) -> StorageFailed:
    return StorageFailed(f"key {name!r} is needed, but the store's URL names no keys: add keys=DIRECTORY to its options")


class FileKeyRing:
    """Keys in files ``NAME.key`` of one directory: 32 random bytes in base64. Each is read once, when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, AESGCM] = {}
        self._missing: set[str] = set()

    async def make(self, name: str, context: bytes) -> tuple[bytes, bytes]:
        data_key = secrets.token_bytes(DATA_KEY_BYTES)
        return data_key, await self.wrap(name, data_key, context)

    async def wrap(self, name: str, data_key: bytes, context: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._key(name).encrypt(nonce, data_key, context)

    async def unwrap(self, name: str, wrapped: bytes, context: bytes) -> bytes:
        if KEY_NAME.fullmatch(name) is None:
            raise Corrupt(f"a data key names the key {name!r}, which cannot be a key's name")
        key = self._key(name)
        try:
            return key.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise Corrupt(
                f"a data key does not unwrap with key {name!r} of {self._directory}: it was wrapped by another"
            ) from None

    def _key(self, name: str) -> AESGCM:
        found = self._read.get(name)
        if found is not None:
            return found
        try:
            found = self._read[name] = AESGCM(_read_key(self._directory, name))
        except StorageFailed as failure:
            if name not in self._missing:
                self._missing.add(name)
                _log.warning("%s", failure.message)  # once: consumers ask again and again
            raise
        self._missing.discard(name)
        return found


def _read_key(directory: Path, name: str) -> bytes:
    path = _path(directory, name)
    try:
        key = base64.b64decode(path.read_bytes().strip(), validate=True)
    except FileNotFoundError:
        raise StorageFailed(f"key {name!r} is not in {directory}: what it protects cannot be read without it") from None
    except OSError as failure:
        raise StorageFailed(f"key {name!r} cannot be read from {path}: {failure.strerror}") from failure
    except binascii.Error:
        raise Invalid(f"{path} does not hold a key: it must be 32 bytes in base64") from None
    if len(key) != _KEY_BYTES:
        raise Invalid(f"{path} holds a key of {len(key)} bytes; it must be {_KEY_BYTES}")
    return key


def create_key(directory: Path, name: str) -> Path:
    """Make a new key, readable by its owner only; returns its file. Raises ``Conflict`` if there is one of this name."""
    path = _path(directory, name)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise Conflict(f"{path} exists: choose another name; a key that is replaced is lost") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)  # A key whose name is lost takes with it all that it protects.
    sync_directory(directory.parent)
    return path


def key_names(directory: Path) -> list[str]:
    """The names of all keys in the directory, sorted."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))


def _path(directory: Path, name: str) -> Path:
    if KEY_NAME.fullmatch(name) is None:
        raise Invalid(f"key name {name!r} is invalid; use 1 to 64 letters, digits and ._-")
    return directory / f"{name}{_SUFFIX}"
