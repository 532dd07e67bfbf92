"""Checks the files of stopped metadata nodes below a directory. Never changes them.

Skips a running node, because a reader of its database would block its checkpoints. The files may be older than the node's log
by what was not checkpointed yet; that is normal. A database that was closed cleanly is opened as immutable, because even a
read-only connection would create a write-ahead log beside it. After a crash SQLite reads the existing one.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from sqlite_utils import Database

from stratalog.health.finding import Finding, fail, ok, warn
from stratalog.local import processes
from stratalog.local.state import EMBEDDED_ROLE, ClusterState
from stratalog_core.malformed import MALFORMED
from stratalog_metadata.records import Record
from stratalog_metadata.state.digest import digest_of, hash_record
from stratalog_metadata.storage.state_store import FORMAT_VERSION, SQLITE_FILE, row_checksum

_KEEP: Final = (
    "do not start this node and delete nothing: the other nodes serve without it; copy its directory and check its disk"
)
_KINDS: Final = {str(kind.__struct_config__.tag) for kind in get_args(Record)}
_ROLES: Final = frozenset({"metadata", EMBEDDED_ROLE})


class _Kind(msgspec.Struct, frozen=True):
    """Decodes only the kind of a stored record, so that records of newer versions are counted, too."""

    kind: str


_decode_kind = msgspec.msgpack.Decoder(_Kind)
_decode = msgspec.msgpack.Decoder(Record)


def check_metadata_files(data: Path, state: ClusterState | None) -> Iterator[Finding]:
    """Yield one finding per metadata node directory below ``data``."""
    for path in sorted(data.glob(f"*/{SQLITE_FILE}")):
        name = path.parent.name
        if state and _runs(name, state):
            yield ok(f"files of {name}", "in use; checked only while the node is stopped")
        else:
            yield _check_file(f"files of {name}", path)


def _runs(name: str, state: ClusterState) -> bool:
    """Return whether the node of directory ``name`` runs: under its own name in a cluster, else inside ``stratalog up``."""
    named = [process for process in state.processes if process.role in _ROLES and process.name in (name, "up")]
    return any(processes.running(process) is not None for process in named)


def _check_file(check: str, path: Path) -> Finding:
    try:
        with closing(_open(path)) as connection:
            return _check_database(check, path, Database(connection, recursive_triggers=False, execute_plugins=False))
    except sqlite3.Error as failure:
        return fail(check, f"{path} cannot be read: {failure}", _KEEP)
    except MALFORMED as malformed:
        return fail(check, f"{path} holds a malformed record: {malformed}", _KEEP)


def _open(path: Path) -> sqlite3.Connection:
    closed_in_order = not path.with_name(path.name + "-wal").exists()
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if closed_in_order else ''}", uri=True)


def _check_database(check: str, path: Path, database: Database) -> Finding:
    damage = [row[0] for row in database.execute("PRAGMA integrity_check(3)").fetchall()]
    if damage != ["ok"]:
        return fail(check, f"{path} is damaged: {'; '.join(damage)}", _KEEP)
    missing = {"applied", "records"} - set(database.table_names())
    if missing:
        return fail(check, f"{path} has no table {' and '.join(sorted(missing))}", _KEEP)
    applied = next(iter(database["applied"].rows), None)
    return ok(check, "empty: no checkpoint yet") if applied is None else _check_applied(check, applied, database)


def _check_applied(check: str, applied: dict[str, Any], database: Database) -> Finding:
    version = applied["format_version"]
    if version != FORMAT_VERSION:
        remedy = "use the version of Stratalog that wrote it"
        return fail(check, f"format version is {version}; this Stratalog reads version {FORMAT_VERSION}", remedy)
    rows = list(database.execute("SELECT key, version, record, checksum FROM records").fetchall())
    for key, row_version, record, checksum in rows:
        if row_checksum(key, row_version, record) != checksum:
            return fail(check, f"the row of {key} does not match its checksum", _KEEP)
    if digest_of(hash_record(*row[:3]) for row in rows) != applied["digest"]:
        return fail(check, f"rows are missing or older than entry {applied['log_index']}", _KEEP)
    kinds = Counter(_kind_of(row[2]) for row in rows)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    position = f"applied up to {applied['log_index']} (term {applied['term']})"
    detail = f"intact, format version {version}, {position}; {counted or 'no records'}"
    unknown = sorted(set(kinds) - _KINDS)
    if unknown:
        return warn(check, f"{detail}; unknown: {', '.join(unknown)}", "use the version of Stratalog that wrote them")
    return ok(check, detail)


def _kind_of(record: bytes) -> str:
    """Return the record's kind. Raises one of ``MALFORMED`` if the record is malformed."""
    kind = _decode_kind.decode(record).kind
    if kind in _KINDS:
        _decode.decode(record)
    return kind
