"""A running digest of all records, by which nodes compare their states. Pure.

The digest is the sum, modulo 2¹²⁸, of a hash of each record with its key and version. It does not depend on order, and a
change costs two hashes however many records there are. Each node keeps the digest at every ``MARK_EVERY``-th log entry; nodes
compare these marks (``node/digest_comparison.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, get_args

import msgspec
from crc32c import crc32c

from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state.changes import Change

DIGEST_BYTES: Final = 16
MARK_EVERY: Final = 64
MARKS_KEPT: Final = 16
_MODULUS: Final = 1 << (8 * DIGEST_BYTES)
_encode = msgspec.msgpack.Encoder().encode


def _schema() -> int:
    kinds = sorted(f"{kind.__struct_config__.tag} {' '.join(kind.__struct_fields__)}" for kind in get_args(Record))
    return int(crc32c("\n".join(kinds).encode()))


SCHEMA: Final = _schema()
"""Fingerprint of the record types. Versions may store a record differently, so nodes with different schemas do not compare."""


def hash_record(key: str, version: int, encoded: bytes) -> int:
    """A record's contribution to the digest; ``encoded`` is the record as msgpack."""
    hashed = blake2b(key.encode(), digest_size=DIGEST_BYTES)
    hashed.update(version.to_bytes(9, "big"))
    hashed.update(encoded)
    return int.from_bytes(hashed.digest(), "big")


def digest_of(hashes: Iterable[int]) -> bytes:
    """The digest of records with these hashes."""
    return (sum(hashes) % _MODULUS).to_bytes(DIGEST_BYTES, "big")


def digest_records(records: Iterable[Versioned]) -> bytes:
    """The digest of these records."""
    return digest_of(map(_hash, records))


def _hash(stored: Versioned) -> int:
    return hash_record(stored.record.key(), stored.version, _encode(stored.record))


class StateDigest:
    """The digest of a replica's records. ``marks`` are the digests after the last entries at multiples of ``MARK_EVERY``."""

    def __init__(self, records: Iterable[Versioned]) -> None:
        self.marks: dict[int, bytes] = {}
        self._sum = 0
        self.restart(records)

    @property
    def value(self) -> bytes:
        return digest_of((self._sum,))

    def restart(self, records: Iterable[Versioned]) -> None:
        """Start again with these records."""
        self._sum = sum(map(_hash, records)) % _MODULUS
        self.marks.clear()

    def install(self, changes: Iterable[Change]) -> None:
        """Record changes."""
        for change in changes:
            if change.before is not None:
                self._sum -= _hash(change.before)
            if change.after is not None:
                self._sum += _hash(change.after)
        self._sum %= _MODULUS

    def passed(self, index: int) -> None:
        """Record that the entry at ``index`` was applied."""
        if index % MARK_EVERY == 0:
            self.marks[index] = self.value
            if len(self.marks) > MARKS_KEPT:
                del self.marks[min(self.marks)]
