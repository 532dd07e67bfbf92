"""The doctor looks into the state of metadata nodes that are stopped, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from stratalog.commands.doctor import doctor
from stratalog.health.finding import Finding, Verdict
from stratalog.health.metadata_files import check_metadata_files
from stratalog.local.state import ClusterState, ProcessState
from stratalog_metadata.records import Counter, DynamicConfig, Record, Versioned
from stratalog_metadata.state.digest import digest_of, digest_records, hash_record
from stratalog_metadata.storage.state_store import SqliteStore, row_checksum


def write_node(data: Path, name: str = "metadata-1", count: int = 3) -> Path:
    """A node's directory, as it is after an orderly stop."""
    path = data / name / "state.sqlite"
    path.parent.mkdir(parents=True)
    records: list[Record] = [DynamicConfig(resource=f"topic-{number}") for number in range(count)]
    records.append(Counter(name="ledger", next_value=7))
    with closing(SqliteStore(path)) as store:
        stored = {record.key(): Versioned(40, record) for record in records}
        store.save(41, 5, stored, digest_records(stored.values()))
        store.checkpoint()
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def only_finding(data: Path, state: ClusterState | None = None) -> Finding:
    (finding,) = check_metadata_files(data, state)
    return finding


def test_where_no_node_is_nothing_is_found(tmp_path: Path) -> None:
    assert list(check_metadata_files(tmp_path, None)) == []
    assert list(check_metadata_files(tmp_path / "none", None)) == []


def test_a_stopped_node_is_told_by_position_and_kinds_and_left_as_it_was(tmp_path: Path) -> None:
    path = write_node(tmp_path)
    before = contents(path.parent)
    finding = only_finding(tmp_path)
    assert (finding.check, finding.verdict) == ("files of metadata-1", Verdict.OK)
    assert finding.detail == "intact, format version 2, applied up to 41 (term 5); 1 counter, 3 dynamic_config"
    assert contents(path.parent) == before


def test_a_node_that_crashed_is_read_with_its_write_ahead_log(tmp_path: Path) -> None:
    path = write_node(tmp_path / "running")
    with closing(SqliteStore(path)) as store:
        store.save(44, 6, {}, digest_records(store.load().records))
        shutil.copytree(path.parent, tmp_path / "crashed" / "metadata-1")
    assert "applied up to 44 (term 6)" in only_finding(tmp_path / "crashed").detail


def test_each_node_has_its_finding(tmp_path: Path) -> None:
    for name in ("metadata-2", "metadata-1", "metadata-3"):
        write_node(tmp_path, name)
    checks = [finding.check for finding in check_metadata_files(tmp_path, None)]
    assert checks == ["files of metadata-1", "files of metadata-2", "files of metadata-3"]


def test_a_node_that_never_checkpointed_is_empty(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    SqliteStore(tmp_path / "metadata" / "state.sqlite").close()
    finding = only_finding(tmp_path)
    assert (finding.verdict, finding.detail) == (Verdict.OK, "empty: no checkpoint yet")


@pytest.mark.parametrize("at", [0, 4096, 3 * 4096])
def test_damage_is_a_failure_and_no_reason_to_delete(tmp_path: Path, at: int) -> None:
    path = write_node(tmp_path, count=400)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 64)
    finding = only_finding(tmp_path)
    assert finding.verdict is Verdict.FAIL
    assert "delete nothing" in finding.remedy


def change(path: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, arguments)


def add_row(path: Path, key: str, record: bytes) -> None:
    """One more row, with the checksum and the digest that belong to it."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO records VALUES (?, 40, ?, ?)", (key, record, row_checksum(key, 40, record)))
        rows = connection.execute("SELECT key, version, record FROM records").fetchall()
        connection.execute("UPDATE applied SET digest = ?", (digest_of(hash_record(*row) for row in rows),))


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("UPDATE records SET version = 41 WHERE key = 'counter/ledger'", "row of counter/ledger does not match its checksum"),
        ("DELETE FROM records WHERE key = 'counter/ledger'", "rows are missing or older than entry 41"),
    ],
)
def test_a_row_that_changed_or_went_is_a_failure(tmp_path: Path, statement: str, complaint: str) -> None:
    change(write_node(tmp_path), statement)
    finding = only_finding(tmp_path)
    assert finding.verdict is Verdict.FAIL
    assert complaint in finding.detail
    assert "delete nothing" in finding.remedy


def test_another_format_version_is_a_failure(tmp_path: Path) -> None:
    change(write_node(tmp_path), "UPDATE applied SET format_version = 9")
    finding = only_finding(tmp_path)
    assert (finding.verdict, finding.detail) == (Verdict.FAIL, "format version is 9; this Stratalog reads version 2")


def test_a_missing_table_is_a_failure(tmp_path: Path) -> None:
    change(write_node(tmp_path), "DROP TABLE records")
    assert "has no table records" in only_finding(tmp_path).detail


def test_a_record_of_an_unknown_kind_is_counted_and_a_warning(tmp_path: Path) -> None:
    add_row(write_node(tmp_path), "new/1", msgspec.msgpack.encode({"kind": "novelty"}))
    finding = only_finding(tmp_path)
    assert finding.verdict is Verdict.WARN
    assert "1 novelty; unknown: novelty" in finding.detail


@pytest.mark.parametrize("record", [b"\xc1", msgspec.msgpack.encode({"kind": "topic", "name": 7})])
def test_a_malformed_record_is_a_failure(tmp_path: Path, record: bytes) -> None:
    add_row(write_node(tmp_path), "x", record)
    finding = only_finding(tmp_path)
    assert finding.verdict is Verdict.FAIL
    assert "malformed" in finding.detail


@pytest.mark.parametrize(("name", "role"), [("metadata-1", "metadata"), ("up", "all")])
def test_a_node_that_runs_is_left_alone(tmp_path: Path, name: str, role: str) -> None:
    write_node(tmp_path).write_bytes(b"whatever it is doing")
    started_at = psutil.Process().create_time()
    process = ProcessState(name=name, role=role, address="", pid=os.getpid(), started_at=started_at)
    state = ClusterState(bootstrap="", metadata="", store="", processes=(process,))
    finding = only_finding(tmp_path, state)
    assert (finding.verdict, finding.detail) == (Verdict.OK, "in use; checked only while the node is stopped")


def test_the_command_shows_it_with_nothing_running(tmp_path: Path) -> None:
    write_node(tmp_path)
    done = CliRunner().invoke(doctor, ["--data", str(tmp_path), "--json"])
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "applied up to 41" in findings["files of metadata-1"]["detail"]
