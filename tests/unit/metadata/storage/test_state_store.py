"""The stores of applied records: a common contract, and the properties of SQLite alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stratalog_core.errors import Corrupt, StorageFailed
from stratalog_core.system import SystemFiles
from stratalog_metadata.records import DynamicConfig, Versioned
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.digest import digest_records
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage.state_store import EMPTY, STATE_FILE, SnapshotFileStore, SqliteStore, StateStore, row_checksum

Open = Callable[[], StateStore]


def stored(name: str, version: int) -> Versioned:
    return Versioned(version, DynamicConfig(resource=name))


def save(store: StateStore, index: int, term: int, changed: dict[str, Versioned | None]) -> None:
    """Save records with the digest of all of them, as a node does."""
    # The file store forgets what it has not checkpointed when it loads, and needs no digest.
    before = store.load().records if isinstance(store, SqliteStore) else ()
    after = {each.record.key(): each for each in before} | changed
    store.save(index, term, changed, digest_records(each for each in after.values() if each is not None))


@pytest.fixture(params=["sqlite", "file"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state.sqlite")
    return lambda: SnapshotFileStore(SystemFiles(tmp_path))


def test_a_new_store_is_empty(open_store: Open) -> None:
    with closing(open_store()) as store:
        assert store.load() == EMPTY


def test_checkpointed_records_are_loaded_again(open_store: Open) -> None:
    with closing(open_store()) as store:
        store.load()
        save(store, 3, 1, {"dynamic_config/b": stored("b", 2), "dynamic_config/a": stored("a", 3)})
        save(store, 5, 2, {"dynamic_config/b": None, "dynamic_config/c": stored("c", 5)})
        store.checkpoint()
    with closing(open_store()) as store:
        image = store.load()
    assert (image.index, image.term) == (5, 2)
    assert list(image.records) == [stored("a", 3), stored("c", 5)]


def test_a_snapshot_replaces_everything_durably(open_store: Open) -> None:
    with closing(open_store()) as store:
        save(store, 3, 1, {"dynamic_config/a": stored("a", 3)})
        store.replace(StateImage(index=90, term=4, records=[stored("z", 80)]))
    with closing(open_store()) as store:
        assert store.load() == StateImage(index=90, term=4, records=[stored("z", 80)])


def test_saving_continues_after_loading(open_store: Open) -> None:
    with closing(open_store()) as store:
        save(store, 1, 1, {"dynamic_config/a": stored("a", 1)})
        store.checkpoint()
    with closing(open_store()) as store:
        store.load()
        save(store, 2, 1, {"dynamic_config/b": stored("b", 2)})
        store.checkpoint()
    with closing(open_store()) as store:
        assert list(store.load().records) == [stored("a", 1), stored("b", 2)]


def test_sqlite_keeps_what_was_saved_without_a_checkpoint(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "s")) as store:
        save(store, 1, 1, {"dynamic_config/a": stored("a", 1)})
    with closing(SqliteStore(tmp_path / "s")) as store:
        assert store.load().index == 1


def test_sqlite_works_in_memory() -> None:
    with closing(SqliteStore(":memory:")) as store:
        save(store, 1, 1, {"dynamic_config/a": stored("a", 1)})
        assert store.load().index == 1


def test_sqlite_returns_freed_space(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "s")) as store:
        save(store, 1, 1, {f"dynamic_config/{n:0250}": stored(f"{n:0250}", 1) for n in range(5000)})
        store.checkpoint()
        full = (tmp_path / "s").stat().st_size
        save(store, 2, 1, {f"dynamic_config/{n:0250}": None for n in range(5000)})
        store.checkpoint()
        assert (tmp_path / "s").stat().st_size < full / 4


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(StorageFailed, match="not a database"):
        SqliteStore(tmp_path / "s")


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "s")) as store:
        save(store, 1, 1, {})
    with closing(sqlite3.connect(tmp_path / "s")) as connection, connection:
        connection.execute("UPDATE applied SET format_version = 8")
    with closing(SqliteStore(tmp_path / "s")) as store, pytest.raises(Corrupt, match="version 8"):
        store.load()


def test_a_malformed_record_is_refused(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "s")) as store:
        save(store, 1, 1, {"dynamic_config/a": stored("a", 1)})
    with closing(sqlite3.connect(tmp_path / "s")) as connection, connection:
        checksum = row_checksum("dynamic_config/a", 1, b"\xc1")
        connection.execute("UPDATE records SET record = x'c1', checksum = ?", (checksum,))
    with closing(SqliteStore(tmp_path / "s")) as store, pytest.raises(Corrupt, match="malformed"):
        store.load()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET record = x'81a46b696e64ae64796e616d69635f636f6e666967' WHERE key = 'dynamic_config/a'",
        "UPDATE records SET version = 3 WHERE key = 'dynamic_config/a'",
        "UPDATE records SET key = 'dynamic_config/x' WHERE key = 'dynamic_config/a'",
        "UPDATE records SET checksum = checksum + 1 WHERE key = 'dynamic_config/b'",
    ],
)
def test_a_row_that_changed_on_the_disk_is_refused_with_its_key_and_the_remedy(tmp_path: Path, damage: str) -> None:
    _two_records(tmp_path / "s")
    _change(tmp_path / "s", damage)
    with (
        closing(SqliteStore(tmp_path / "s")) as store,
        pytest.raises(Corrupt, match=r"row of dynamic_config/.*metadata remove"),
    ):
        store.load()


def test_rows_that_are_missing_or_old_are_refused(tmp_path: Path) -> None:
    """Each remaining row is valid by itself: a page was lost, or restored from an older copy."""
    _two_records(tmp_path / "s")
    _change(tmp_path / "s", "DELETE FROM records WHERE key = 'dynamic_config/b'")
    with closing(SqliteStore(tmp_path / "s")) as store, pytest.raises(Corrupt, match=r"missing or old.*metadata remove"):
        store.load()
    _two_records(tmp_path / "t")
    with closing(SqliteStore(tmp_path / "t")) as store:
        save(store, 2, 1, {"dynamic_config/a": stored("a", 2)})
    old = msgspec.msgpack.encode(stored("a", 1).record)
    _change(
        tmp_path / "t",
        "UPDATE records SET version = 1, checksum = ? WHERE version = 2",
        row_checksum("dynamic_config/a", 1, old),
    )
    with closing(SqliteStore(tmp_path / "t")) as store, pytest.raises(Corrupt, match="missing or old"):
        store.load()


def _two_records(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        save(store, 1, 1, {"dynamic_config/a": stored("a", 1), "dynamic_config/b": stored("b", 1)})


def _change(path: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, arguments).rowcount == 1


def test_a_damaged_state_file_is_refused_at_every_byte(tmp_path: Path) -> None:
    content = snapshot.encode(StateImage(index=7, term=2, records=[stored("a", 7)]))
    assert snapshot.decode(content) == StateImage(index=7, term=2, records=[stored("a", 7)])
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        (tmp_path / STATE_FILE).write_bytes(damaged)
        with pytest.raises(Corrupt):
            SnapshotFileStore(SystemFiles(tmp_path)).load()
    with pytest.raises(Corrupt, match="too short"):
        snapshot.decode(content[:10])
