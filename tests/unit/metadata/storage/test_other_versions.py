"""The database of a node whose version was changed: it has records that this version encodes in another way."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stratalog_metadata.raft import Entry, EntryKind
from stratalog_metadata.records import Broker, DynamicConfig, Endpoint, Record
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.state.digest import digest_of, hash_record
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage.state_store import SqliteStore, row_checksum

BROKER = Broker(broker_id=1, host="h", port=1, session_id=0, endpoints=(Endpoint(listener="a", host="h", port=2),))
INDEX = 40


def as_map(record: Record) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    return decoded


def of_a_later_version() -> dict[str, Any]:
    """With a field that this version does not know."""
    return as_map(BROKER) | {"of_the_future": 1}


def of_another_order() -> dict[str, Any]:
    """As a version writes it that has a field elsewhere in the record."""
    return dict(reversed(as_map(BROKER).items()))


def store_as_another_version_does(path: Path, record: dict[str, Any]) -> None:
    SqliteStore(path).close()
    key, encoded = BROKER.key(), msgspec.msgpack.encode(record)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (key, INDEX, encoded, row_checksum(key, INDEX, encoded)))
        digest = digest_of([hash_record(key, INDEX, encoded)])
        connection.execute("INSERT INTO applied VALUES (1, 2, ?, 3, ?)", (INDEX, digest))


def start(path: Path) -> Replica:
    """Load the state as a node does, apply one command, and save it."""
    with closing(SqliteStore(path)) as store:
        replica = Replica(store.load())
        command = Command(updates=(Put(record=DynamicConfig(resource=f"{replica.index}")),))
        replica.apply(Entry(replica.index + 1, 3, EntryKind.COMMAND, msgspec.msgpack.encode(command)))
        store.save(replica.index, replica.term, replica.take_unsaved(), replica.digest.value)
        return replica


@pytest.mark.parametrize("record", [of_a_later_version(), of_another_order()], ids=["later", "order"])
def test_a_node_starts_again_on_what_another_version_stored(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "s"
    store_as_another_version_does(path, record)
    for started in range(1, 4):
        replica = start(path)
        found = replica.records.get(BROKER.key())
        assert found is not None
        assert found.record == BROKER
        assert len(replica.records) == started + 1
