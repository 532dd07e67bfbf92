"""The benchmarks' page: loads that were not carried, what is seen at a glance, and how to find the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import summary
from benchmarks.carried import overload, overloads
from benchmarks.compare import writes_page
from benchmarks.journal import Row, Run
from benchmarks.matrix import read_matrix
from benchmarks.page import contents_of, write_page
from benchmarks.tables import times

CELL = "latency rate=50000 linger_ms=5 seconds=30"


def _row(system: str, carried: float, *, cell: str = CELL, number: int = 1, wanted: float = 50_000.0, **measured: float) -> Row:
    return Row(
        cell=cell,
        system=system,
        round=number,
        at="2026-11-21T10:00:00Z",
        measured={"records_per_s": carried, "latency_p99_ms": 10.0, **measured},
        settings={"wanted_records_per_s": wanted} if wanted else {},
        client="c",
    )


def _run(*rows: Row) -> Run:
    machine = {"cores": 2, "system": "Linux", "python": "3.11"}
    systems = {"stratalog": "ours", "kafka": "theirs"}
    return Run(profile="quick", machine=machine, commit="0123456789abcdef", systems=systems, rows=list(rows))


def _page(run: Run, directory: Path) -> str:
    write_page("a-run", run, read_matrix(), page=directory / "page.md", pictures=directory / "pictures")
    return (directory / "page.md").read_text()


def test_one_round_that_fell_behind_is_enough() -> None:
    run = _run(
        _row("stratalog", 49_900.0), _row("stratalog", 40_000.0, number=2, machine_share_idle=0.05), _row("kafka", 49_600.0)
    )
    (found,) = overloads(run, CELL, "kafka")
    assert (found.system, found.rounds, found.rounds_in_all, found.carried) == ("stratalog", 1, 2, 40_000)
    assert "the cores were 95% busy" in found.why


def test_idle_cores_are_told_as_a_stall() -> None:
    found = overload(_run(_row("kafka", 1.0, machine_share_idle=0.4)), CELL, "kafka")
    assert found is not None
    assert "the cores were 40% idle" in found.why
    silent = overload(_run(_row("kafka", 1.0)), CELL, "kafka")
    assert silent is not None
    assert silent.why == "CPU time was not measured"


def test_at_full_speed_there_is_nothing_to_carry() -> None:
    assert overload(_run(_row("kafka", 1.0, wanted=0.0)), CELL, "kafka") is None


def test_what_producers_did_counts_where_readers_are_measured() -> None:
    beside = _row("kafka", 200_000.0, cell="catch-up", produced_records_per_s=30_000.0)
    found = overload(_run(beside), "catch-up", "kafka")
    assert found is not None
    assert found.carried == 30_000


def test_the_latency_of_a_load_that_was_not_carried_is_no_latency(tmp_path: Path) -> None:
    run = _run(_row("stratalog", 40_000.0, latency_p99_ms=1.0), _row("kafka", 50_000.0))
    (verdict,) = [each for each in summary.verdicts(run, read_matrix().goals, "kafka") if each.cell == CELL]
    assert not verdict.reached, "however small it is"
    text = _page(run, tmp_path)
    assert f"| {CELL} | ≤ 0.5 | † | **not reached**: the load was not carried |" in text
    assert f"| {CELL} | p99, ms | 1 † | 10 | – | 1, 1 |" in text
    assert f"- {CELL}, stratalog, 1 of 1 rounds: 40,000 of 50,000 records/s; CPU time was not measured." in text
    assert not (tmp_path / "pictures" / "latency.svg").exists(), "no bar"


def test_a_load_that_was_carried_is_compared_but_not_by_its_rate(tmp_path: Path) -> None:
    text = _page(_run(_row("stratalog", 50_000.0, latency_p99_ms=4.0), _row("kafka", 49_990.0)), tmp_path)
    assert f"| {CELL} | 50,000 | 4 / 10 (0.40) |" in text
    assert f"| {CELL} | records/s | 50,000 | 49,990 | – | 1, 1 |" in text
    assert "†" not in text


def test_readers_that_slow_producers_down_are_told(tmp_path: Path) -> None:
    ours = _row("stratalog", 300.0, cell="catch-up", wanted=100.0, produced_records_per_s=50.0)
    run = _run(ours, _row("kafka", 200.0, cell="catch-up", wanted=100.0, produced_records_per_s=100.0))
    for row in run.rows:
        del row.measured["latency_p99_ms"]
    text = _page(run, tmp_path)
    assert "Producers sent less than 99% of their rate" in text
    assert "- catch-up, stratalog, 1 of 1 rounds: 50 of 100 records/s" in text
    assert "| catch-up | 100 | 300 / 200 (1.50) | 50 / 100 (0.50) |" in text


def test_the_page_begins_with_its_contents(tmp_path: Path) -> None:
    text = _page(_run(_row("stratalog", 50_000.0), _row("kafka", 50_000.0)), tmp_path)
    assert text.index("- [Goals](#goals)") < text.index("Run `a-run`") < text.index("### Goals")


def test_what_a_run_remarks_about_a_workload_stands_above_its_figures(tmp_path: Path) -> None:
    run = _run(_row("stratalog", 50_000.0), _row("kafka", 50_000.0))
    run.remarks = {"latency": "Beside a backup.", "tail": "Not here."}
    text = _page(run, tmp_path)
    assert text.index("### Latency") < text.index("**Beside a backup.**") < text.index("| cell |", text.index("### Latency"))
    assert "Not here." not in text


def test_links_are_as_they_are_made_of_headings() -> None:
    assert contents_of(["text", "### kill -9 of a broker, 5:1"]) == [
        "- [kill -9 of a broker, 5:1](#kill--9-of-a-broker-51)",
        "",
    ]
    assert contents_of(["text"]) == []


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(604.12, "604"), (2.291, "2.29"), (0.0951, "0.10"), (0.0271, "0.027"), (0.00461, "0.0046"), (0.0, "0.00")],
)
def test_a_small_ratio_is_not_rounded_to_nothing(ratio: float, told: str) -> None:
    assert times(ratio) == told


def test_equal_is_neither_better_nor_worse(tmp_path: Path) -> None:
    rows = [_row(system, 1.0, cell="connections", wanted=0.0, connections=1000) for system in ("stratalog", "kafka")]
    assert "| connections | connections held | 1,000 | 1,000 | 1.00 (equal) | 1, 1 |" in _page(_run(*rows), tmp_path)


def test_memory_is_told_in_megabytes(tmp_path: Path) -> None:
    rows = [_row(system, 1.0, cell="produce", wanted=0.0, memory_bytes=5e8) for system in ("stratalog", "kafka")]
    assert "| produce | memory of all processes, MB (PSS) | 500 | 500 | 1.00 (equal) | 1, 1 |" in _page(_run(*rows), tmp_path)


@pytest.mark.parametrize(
    ("profile", "cells", "goes_on", "written"),
    [
        ("quick", ["*"], False, True),
        ("quick", [], False, True),
        ("quick", ["tail"], False, False),
        ("quick", ["tail"], True, True),
        ("smoke", ["*"], True, False),
    ],
)
def test_a_few_cells_do_not_replace_the_page(profile: str, cells: list[str], *, goes_on: bool, written: bool) -> None:
    assert writes_page(profile, cells, goes_on=goes_on, wanted=True) is written
    assert not writes_page(profile, cells, goes_on=goes_on, wanted=False)
