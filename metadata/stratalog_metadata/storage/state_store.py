"""Stores of the applied records, so that the log can be short.

The Raft log makes a command durable. A store may be behind it, is never torn, and is never ahead of what a quorum has.
``checkpoint`` makes durable what was saved; only then may the log be compacted. All methods block; calls must not overlap.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, Protocol

import msgspec
from crc32c import crc32c

from stratalog_core.errors import Corrupt, StorageFailed
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Files
from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.digest import digest_of, digest_records, hash_record
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage.identity import REPLACE

FORMAT_VERSION: Final = 2
STATE_FILE: Final = "state.snapshot"
SQLITE_FILE: Final = "state.sqlite"
BUSY_S_MAX: Final = 5.0
"""Longest wait for another process that reads the database."""
EMPTY: Final = StateImage(index=0, term=0, records=())

_encode = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(Record)

_SQLITE_FAILURES: Final = (sqlite3.Error, UnicodeDecodeError)
"""UnicodeDecodeError: from a damaged file Python cannot even decode SQLite's message, or a text in a column of another
type.
"""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY, version INTEGER NOT NULL, record BLOB NOT NULL, checksum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS applied (
    one INTEGER PRIMARY KEY CHECK (one = 1), format_version INTEGER NOT NULL, log_index INTEGER NOT NULL, term INTEGER NOT NULL,
    digest BLOB NOT NULL
);
"""


class StateStore(Protocol):
    def load(self) -> StateImage:
        """The last saved image; ``EMPTY`` at first. Raises ``Corrupt`` or ``StorageFailed``."""
        ...

    def save(self, index: int, term: int, changed: Mapping[str, Versioned | None], digest: bytes) -> None:
        """Save the changes up to the entry at (``index``, ``term``), all or none. ``digest`` covers all records after them."""
        ...

    def replace(self, image: StateImage) -> None:
        """Replace everything, durably."""
        ...

    def checkpoint(self) -> bool:
        """Make everything that was saved durable. Returns False if a reader of the database prevents it now."""
        ...

    def close(self) -> None: ...


class SqliteStore:
    """Records in one SQLite file in WAL mode.

    With ``synchronous=NORMAL`` a machine crash may lose the last transactions, which are in the log, and never tears one. Each
    row has a checksum, and the digest of all records shows missing or old rows: SQLite checks neither. The digest is of the
    records as this version encodes them.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        try:
            self._connection = sqlite3.connect(self._path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False)
            with ExitStack() as unless_open:
                unless_open.callback(self._connection.close)
                self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=NORMAL")
                self._connection.execute("PRAGMA journal_size_limit=16777216")
                self._connection.executescript(_SCHEMA)
                unless_open.pop_all()
        except _SQLITE_FAILURES as failure:
            raise self._failed(failure) from failure

    def load(self) -> StateImage:
        try:
            with closing(self._connection.execute("SELECT format_version, log_index, term FROM applied")) as cursor:
                applied = cursor.fetchone()
            if applied is None:
                return EMPTY
            if applied[0] != FORMAT_VERSION:
                raise Corrupt(f"{self._path} has format version {applied[0]}; this node reads version {FORMAT_VERSION}")
            with closing(self._connection.execute("SELECT digest FROM applied")) as cursor:
                (digest,) = cursor.fetchone()
            with closing(self._connection.execute("SELECT key, version, record, checksum FROM records ORDER BY key")) as cursor:
                rows = cursor.fetchall()
        except _SQLITE_FAILURES as failure:
            raise self._failed(failure) from failure
        if not all(type(number) is int and number >= 0 for number in applied):
            raise Corrupt(f"{self._path} says that it stands at {applied[1:]!r}, which are no index and term")
        records = [self._record(*row) for row in rows]
        if digest_of(hash_record(*row[:3]) for row in rows) != digest:
            raise Corrupt(
                f"{self._path} does not hold what it held at entry {applied[1]}: rows are missing or old. Restore the directory"
                f" as it was last, or replace the node: {REPLACE}"
            )
        self._adopt(applied[1:], rows, records)
        return StateImage(index=applied[1], term=applied[2], records=records)

    def _adopt(self, applied: tuple[int, int], rows: list[tuple[str, int, bytes, int]], records: list[Versioned]) -> None:
        """Store the rows that another version has written as this one writes them, so that the digests of later saves fit."""
        pairs = zip(rows, records, strict=True)
        foreign = {row[0]: stored for row, stored in pairs if _encode.encode(stored.record) != row[2]}
        if foreign:
            self._write((*applied, digest_records(records)), [], foreign, replace=False)

    def _record(self, key: object, version: object, record: object, checksum: object) -> Versioned:
        """Decode a row. SQLite allows any type in any column."""
        if not isinstance(key, str) or not isinstance(version, int) or not isinstance(record, bytes) or version < 0:
            raise Corrupt(f"{self._path} holds a record that is {type(record).__name__}, of version {version!r:.50}")
        if row_checksum(key, version, record) != checksum:
            raise Corrupt(
                f"{self._path}: the row of {key:.200} does not match its checksum. Restore the directory as it was last, or"
                f" replace the node: {REPLACE}"
            )
        try:
            return Versioned(version, _decode.decode(record))
        except MALFORMED as malformed:
            raise Corrupt(f"{self._path} holds a malformed record: {malformed}") from malformed

    def save(self, index: int, term: int, changed: Mapping[str, Versioned | None], digest: bytes) -> None:
        gone = [(key,) for key, versioned in changed.items() if versioned is None]
        kept = {key: versioned for key, versioned in changed.items() if versioned is not None}
        self._write((index, term, digest), gone, kept, replace=False)

    def replace(self, image: StateImage) -> None:
        applied = (image.index, image.term, digest_records(image.records))
        self._write(applied, [], {v.record.key(): v for v in image.records}, replace=True)
        if not self.checkpoint():
            raise StorageFailed(f"{self._path}: another process reads the database, so that a snapshot cannot be made durable")

    def _write(
        self, applied: tuple[int, int, bytes], gone: list[tuple[str]], kept: Mapping[str, Versioned], *, replace: bool
    ) -> None:
        rows = [_row(key, versioned) for key, versioned in kept.items()]
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if replace:
                    connection.execute("DELETE FROM records")
                connection.executemany("DELETE FROM records WHERE key = ?", gone)
                connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", rows)
                connection.execute("INSERT OR REPLACE INTO applied VALUES (1, ?, ?, ?, ?)", (FORMAT_VERSION, *applied))
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as failure:
            raise self._failed(failure) from failure

    def checkpoint(self) -> bool:
        try:
            # This yields one row without columns per page; only executescript runs it to the end.
            self._connection.executescript("PRAGMA incremental_vacuum(1000)")
            with closing(self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")) as cursor:
                busy = cursor.fetchone()[0]
        except sqlite3.DatabaseError as failure:
            raise self._failed(failure) from failure
        return not busy

    def close(self) -> None:
        self._connection.close()

    def _failed(self, failure: Exception) -> StorageFailed:
        return StorageFailed(f"{self._path}: {failure}", read_only=False)


def row_checksum(key: str, version: int, record: bytes) -> int:
    """CRC32C of a row."""
    return int(crc32c(record, crc32c(f"{key}\0{version}\0".encode())))


def _row(key: str, stored: Versioned) -> tuple[str, int, bytes, int]:
    record = _encode.encode(stored.record)
    return key, stored.version, record, row_checksum(key, stored.version, record)


class SnapshotFileStore:
    """Records in one file over the ``Files`` port, rewritten at each checkpoint. For simulation and tests.

    A crash loses what was saved after the last checkpoint; the log has it.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._index = 0
        self._term = 0
        self._records: dict[str, Versioned] = {}

    def load(self) -> StateImage:
        if not self._files.exists(STATE_FILE):
            return EMPTY
        image = snapshot.decode(self._files.read(STATE_FILE))
        self._hold(image)
        return image

    def save(self, index: int, term: int, changed: Mapping[str, Versioned | None], digest: bytes) -> None:
        self._index, self._term = index, term
        for key, versioned in changed.items():
            if versioned is None:
                self._records.pop(key, None)
            else:
                self._records[key] = versioned

    def replace(self, image: StateImage) -> None:
        self._hold(image)
        self.checkpoint()

    def checkpoint(self) -> bool:
        image = StateImage(index=self._index, term=self._term, records=list(self._records.values()))
        self._files.write_atomic(STATE_FILE, snapshot.encode(image))
        return True

    def close(self) -> None:
        pass

    def _hold(self, image: StateImage) -> None:
        self._index, self._term = image.index, image.term
        self._records = {versioned.record.key(): versioned for versioned in image.records}
