"""Condensed runs: they give the same page as the journal that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import journal, recorded
from benchmarks.journal import Row, Run
from benchmarks.matrix import read_matrix
from benchmarks.page import write_page

RATE = {"wanted_records_per_s": 2000.0, "linger_ms": 5.0, "batch_bytes": 131_072, "payload": {"record_bytes": 1000, "pool": 9}}


def _row(system: str, cell: str, rate: float, settings: dict[str, object]) -> Row:
    measured = {
        "records_per_s": rate,
        "megabytes_per_s": rate / 1000,
        "latency_p99_ms": 10.123456789,
        "machine_share_idle": 0.25,
        "server_cpu_s_per_gb_broker": 2.5,
        "memory_bytes_broker": 1e6,
        "clients_cpu_s_per_gb": 1.5,
        "in_the_log": 5,
        "failure": None,
    }
    moment = "2026-11-21T10:00:00Z"
    return Row(cell=cell, system=system, round=1, at=moment, measured=measured, settings=settings | {"keep": False}, client="c")


@pytest.fixture
def run() -> Run:
    rows = [
        _row(system, cell, rate, settings)
        for system, rate in (("stratalog", 1_800.0), ("kafka", 1_990.0))
        for cell, settings in (("produce", {}), ("latency", RATE))
    ]
    failed = Row(cell="tail", system="kafka", round=1, at=rows[0].at, measured={}, settings={}, failure="Unavailable: gone")
    machine = {"cores": 2, "system": "Linux", "python": "3.11"}
    systems = {"stratalog": "ours", "kafka": "theirs"}
    return Run(profile="quick", machine=machine, commit="0123456789abcdef", systems=systems, rows=[*rows, failed])


def _page(run: Run, directory: Path) -> str:
    write_page("a-run", run, read_matrix(), page=directory / "page.md", pictures=directory / "pictures")
    return (directory / "page.md").read_text()


def test_the_page_of_a_condensed_run_is_the_page_of_the_run(run: Run, tmp_path: Path) -> None:
    assert _page(recorded.condensed(run), tmp_path) == _page(run, tmp_path)


def test_a_condensed_run_is_read_back_and_condensing_again_changes_nothing(run: Run, tmp_path: Path) -> None:
    recorded.write("a-run", run, tmp_path)
    found = journal.read_runs(tmp_path)["a-run"]
    assert found == recorded.condensed(run) == recorded.condensed(found)
    assert "in_the_log" not in found.rows[0].measured


def test_every_recorded_run_of_the_repository_is_condensed() -> None:
    runs = journal.read_runs(recorded.DIRECTORY)
    assert runs
    assert all(recorded.condensed(run) == run for run in runs.values())
