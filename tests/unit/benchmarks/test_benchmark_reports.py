"""Output of the Java tools; the matrix of a comparison, its journal, its page."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from benchmarks import summary
from benchmarks.cells import KINDS, cpu_figures, partition_step
from benchmarks.compare import GivenUp, blocks, gives_up_after, wait_for_room
from benchmarks.coverage import not_measured
from benchmarks.grid import changes_of
from benchmarks.journal import Journal, Row, Run
from benchmarks.kafka_control import GROUP_DELAY_MS
from benchmarks.matrix import Cell, Goal, Profile, cells_of, read_matrix
from benchmarks.page import BEGIN, END, write_page
from benchmarks.progress import bar, expected_s, left_s, limit_s, window_s
from benchmarks.usage import Used, used_within

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.errors import Unavailable
from stratalog_loadgen.java_tools import ToolFailed, parse_consumer, parse_end_to_end, parse_producer


def test_the_last_summary_of_the_producer_counts() -> None:
    line = "{} records sent, 12828.7 records/sec (12.23 MB/sec), 2000.97 ms avg latency, 3338.00 ms max latency, {}\n"
    percentiles = "1951 ms 50th, 2769 ms 95th, 3076 ms 99th, 3337 ms 99.9th."
    steady = line.format("80 steady state", percentiles)
    found = parse_producer("noise\n" + line.format(100, percentiles) + steady)
    assert (found.records, found.records_per_s, found.p99_ms) == (80, 12828.7, 3076)


def test_the_consumer_has_ten_columns() -> None:
    found = parse_consumer("a, b, 95.36, 30.69, 100000, 32185.4, 1859, 1248, 76.41, 80128.2\n")
    assert (found.records, found.megabytes_per_s, found.fetching_records_per_s) == (100000, 30.69, 80128.2)


def test_end_to_end() -> None:
    found = parse_end_to_end("Avg latency: 17.9003 ms\n\nPercentiles: 50th = 14, 99th = 61, 99.9th = 213\n")
    assert (found.average_ms, found.p50_ms, found.p99_ms, found.p999_ms) == (17.9003, 14, 61, 213)


@pytest.mark.parametrize("parse", [parse_producer, parse_consumer, parse_end_to_end])
def test_output_without_a_result_is_an_error(parse: object) -> None:
    assert callable(parse)
    with pytest.raises(ToolFailed, match="no "):
        parse("nothing")


def _run(**medians: dict[str, dict[str, float]]) -> Run:
    """One round, from each cell's figures by system."""
    rows = [
        Row(
            cell=cell if "=" in cell else cell.replace("_", " "),
            system=system,
            round=1,
            at="2026-11-21T10:00:00Z",
            measured=measured,
            settings={},
            client="c",
        )
        for cell, systems in medians.items()
        for system, measured in systems.items()
    ]
    machine = {"cores": 2, "system": "Linux", "python": "3.11"}
    return Run(
        profile="quick", machine=machine, commit="0123456789abcdef", systems={"stratalog": "ours", "kafka": "theirs"}, rows=rows
    )


RUN = _run(
    produce={"stratalog": {"records_per_s": 300.0, "memory_bytes": 90}, "kafka": {"records_per_s": 100.0, "memory_bytes": 100}},
    latency={"stratalog": {"latency_p99_ms": 4.0}, "kafka": {"latency_p99_ms": 10.0}},
    replay={"stratalog": {"megabytes_per_s": 400.0}, "kafka": {}},
)


def test_the_page_replaces_only_what_is_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nWords.\n")
    write_page("a-run", RUN, read_matrix(), page=page, pictures=tmp_path / "benchmarks")
    text = page.read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith(f"{END}\n\nWords.\n")
    assert "old" not in text
    assert "| produce | records/s | 300 | 100 | 3.00 (better) | 1, 1 |" in text
    assert "| throughput with 128 KB batches | produce | ≥ 2 | 3.00 | reached |" in text
    assert "| memory of the whole cluster | produce | ≤ 0.5 | 0.90 | **not reached** |" in text
    assert "| replay | MB/s | 400 | – | – | 1, 0 |" in text
    assert "commits: 0123456789)" in text
    assert sorted(path.stem for path in (tmp_path / "benchmarks").iterdir()) == ["latency", "memory", "throughput"]


def test_what_has_no_figures_is_named_with_the_goals_that_wait_for_it(tmp_path: Path) -> None:
    write_page("a-run", RUN, read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert "- catch-up: not in this run\n" in text
    assert "- replay: not in this run" not in text, "a system that has no such thing was asked, too"
    assert "- produce, grid of 1,000 partitions, zstd: 15 cells not in this run\n" in text
    assert "| fan-out 5:1 | tail groups=5 | ≥ 1 | – | not measured |" in text
    assert "- Profile quick measures 6 s of each cell, after a warm-up of 2 s plus 2 ms per partition" in text


def test_a_failure_is_told_once_with_its_reason(tmp_path: Path) -> None:
    run = _run(failover={"stratalog": {"gap_median_s": 2.0}})
    run.rows.append(msgspec.structs.replace(run.rows[0], system="kafka", measured={}, failure="Unavailable: kill later"))
    assert [line for line in not_measured(run, read_matrix()) if line.startswith("failover,")] == [
        "failover, kafka, round 1: Unavailable: kill later"
    ]
    assert "failover: not in this run" not in list(not_measured(run, read_matrix()))


def test_costs_are_told_for_each_role_and_rows_of_another_commit_tell_theirs(tmp_path: Path) -> None:
    ours = {"records_per_s": 1.0, "memory_bytes": 3e6, "elapsed_s": 6.0, "memory_bytes_broker": 2e6, "memory_bytes_bookie": 1e6}
    run = _run(produce={"stratalog": {**ours, "server_cpu_s_per_gb_broker": 2.5, "server_cpu_s_per_gb_bookie": 4.0}})
    run.rows.append(msgspec.structs.replace(run.rows[0], system="kafka", measured={"records_per_s": 1.0}, commit="fedcba"))
    write_page("a-run", run, read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert "| produce | stratalog | broker 2.5, bookie 4 | broker 2, bookie 1 |" in text
    assert "| produce | measured time, s | 6 | – | – | 1, 1 |" in text
    assert "commits: 0123456789, fedcba)" in text


def test_cells_come_in_the_order_of_the_patterns() -> None:
    names = [cell.name for cell in cells_of(read_matrix(), "size", "connections", "latency*", "catch-up", "latency rate=*")]
    assert (names[0], names[-1]) == ("connections", "catch-up")
    assert len(names) == len(set(names)) == 6


def test_a_missed_goal_says_where_the_time_went_and_what_is_the_most_to_gain(tmp_path: Path) -> None:
    ours = {
        "records_per_s": 90.0,
        "megabytes_per_s": 150.0,
        "clients_cpu_s_per_gb": 5.0,
        "server_cpu_s_per_gb_bookie": 4.0,
        "server_cpu_s_per_gb_broker": 2.0,
        "machine_share_clients": 0.4,
        "machine_share_idle": 0.1,
    }
    theirs = {"records_per_s": 60.0, "megabytes_per_s": 100.0, "machine_share_kafka": 0.6}
    run = _run(produce={"stratalog": ours, "kafka": theirs})
    (missed,) = [each for each in summary.verdicts(run, read_matrix().goals, "kafka") if not each.reached]
    found = summary.limit(run, missed, "kafka")
    assert found is not None
    # Two cores and 5 s/GB of clients: 0.4 GB/s if our servers cost nothing; twice Kafka's 100 MB/s leaves 10 s/GB for all.
    assert (found.ceiling_mb_per_s, found.ceiling_ratio, found.servers_s_per_gb_allowed) == (400, 4, 5)
    write_page("a-run", run, read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert "<summary>throughput with 128 KB batches, produce (≥ 2, measured 1.50)</summary>" in text
    assert "clients 5 s; bookie 4, broker 2; all servers together 6 s" in text
    assert "Share of all cores, stratalog: clients 40%, idle 10%." in text
    assert "400 MB/s, 4.00 times kafka's measured rate" in text


def test_a_missed_latency_names_what_the_client_itself_holds_back(tmp_path: Path) -> None:
    cell = "latency rate=50000 linger_ms=5 seconds=30"
    settings = {"wanted_records_per_s": 50_000.0, "linger_ms": 5, "batch_bytes": 131_072, "payload": {"record_bytes": 1000}}
    run = _run(**{cell: {"stratalog": {"latency_p99_ms": 20.0}, "kafka": {"latency_p99_ms": 10.0}}})
    run.rows = [msgspec.structs.replace(row, settings=settings) for row in run.rows]
    # 131 records are there after 2.6 ms, before the linger is over.
    assert summary.held_ms(run, cell) == pytest.approx(2.62144)
    write_page("a-run", run, read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    assert "a server that took no time would have 0.26 of kafka's p99" in (tmp_path / "page.md").read_text()
    slow = {"wanted_records_per_s": 1000.0}
    run.rows = [msgspec.structs.replace(row, settings=settings | slow) for row in run.rows]
    assert summary.held_ms(run, cell) == 5


def test_a_goal_beyond_the_clients_says_so() -> None:
    ours = {"records_per_s": 1.0, "clients_cpu_s_per_gb": 20.0, "server_cpu_s_per_gb_broker": 2.0}
    run = _run(produce={"stratalog": ours, "kafka": {"records_per_s": 1.0, "megabytes_per_s": 100.0}})
    (missed,) = [each for each in summary.verdicts(run, read_matrix().goals, "kafka") if not each.reached]
    found = summary.limit(run, missed, "kafka")
    assert found is not None
    assert (found.ceiling_ratio, found.servers_s_per_gb_allowed) == (1.0, -10.0)


def test_cpu_time_is_that_of_the_window_interpolated_between_samples() -> None:
    moments = [10.0, 11.0, 12.0]
    samples = [
        {"broker": 1.0, "(idle)": 5.0, "(machine)": 20.0},
        {"broker": 2.0, "(idle)": 6.0, "(machine)": 22.0},
        {"broker": 4.0, "bookie": 7.0, "(idle)": 6.0, "(machine)": 24.0},
    ]
    used = used_within(moments, samples, (10.5, 11.5))
    # A role that came meanwhile counts from its beginning.
    assert used == Used(by_role={"broker": 1.5, "bookie": 7.0}, machine_s=2.0, idle_s=0.5)
    assert used_within(moments, samples, (9.0, 11.0)) is used_within(moments, samples, (11.0, 13.0)) is None


def test_clients_say_what_they_used_and_java_is_sampled() -> None:
    used = Used(by_role={"broker": 3.0, "client": 2.0}, machine_s=12.0, idle_s=4.0)
    told = cpu_figures({"client_cpu_s": 1.0, "produced_client_cpu_s": 2.0, "record_bytes_in_all": 500_000_000}, used)
    assert (told["clients_cpu_s_per_gb"], told["server_cpu_s_per_gb"], told["other_cpu_s_per_gb"]) == (6.0, 6.0, 4.0)
    assert cpu_figures({"record_bytes_in_all": 1_000_000_000}, used)["clients_cpu_s_per_gb"] == 2.0
    shares = [value for name, value in told.items() if name.startswith("machine_share")]
    assert sum(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(("partitions", "step"), [(6, 1), (100, 1), (600, 1), (1000, 5), (10_000, 49)])
def test_partitions_that_are_produced_to_lie_at_all_brokers(partitions: int, step: int) -> None:
    assert partition_step({"partitions": partitions, "produced_partitions": 200}) == step


def test_the_time_left_is_that_of_the_same_cell_before_or_what_is_expected_times_its_error_so_far() -> None:
    profile = Profile(rounds=1, warmup_s=1, duration_s=4, vary=0, warm_cluster_s=10)
    settings = {"record_bytes": 1000}
    cells = [Cell(name=name, kind="produce", title="", settings=settings) for name in ("produce", "produce batch_bytes=1")]
    once_s = expected_s(cells[0], profile)
    assert once_s > window_s(cells[0], profile) == 5
    assert left_s(_run(), profile, cells, [(cells[0], "kafka"), (cells[1], "kafka")]) == 2 * once_s
    run = _run(produce={"stratalog": {"records_per_s": 1.0}})
    run.rows = [msgspec.structs.replace(run.rows[0], took_s=2 * once_s)]
    left = [(cells[0], "stratalog"), (cells[1], "stratalog")]
    assert left_s(run, profile, cells, left) == pytest.approx(4 * once_s)
    assert left_s(run, profile, cells, left, clusters=1) > 4 * once_s + profile.warm_cluster_s


@pytest.mark.parametrize("profile", sorted(read_matrix().profiles))
def test_the_time_of_every_cell_is_estimated_and_bounded(profile: str) -> None:
    shape = read_matrix().profiles[profile]
    for cell in cells_of(read_matrix(), profile):
        assert 0 < expected_s(cell, shape) < limit_s(cell, shape) < 3600, cell.name


def test_a_cell_with_a_time_of_its_own_counts_for_so_long() -> None:
    profile = read_matrix().profiles["size"]
    steady = {cell.settings.get("seconds"): cell.duration_s(profile) for cell in cells_of(read_matrix(), "size", "latency*")}
    assert steady == {None: profile.duration_s, 30: 30.0}


def test_the_bar_is_full_at_the_end() -> None:
    assert bar(0, 4, 120) == f"[{'-' * 30}] 0 of 4 cells, about 2 min left"
    assert bar(4, 4, 0).startswith(f"[{'#' * 30}] 4 of 4")


def test_the_grid_combines_all_but_batches_smaller_than_a_record() -> None:
    matrix = read_matrix()
    cells = cells_of(matrix, "grid")
    produce = next(workload for workload in matrix.workloads if workload.name == "produce")
    assert {cell.kind for cell in cells} == {"produce"}
    assert len(cells) == math.prod(len(values) for values in produce.products["grid"].values()) - 4 * 2
    assert not [cell.name for cell in cells if 1 < cell.settings["batch_bytes"] < cell.settings["record_bytes"]]
    # One name for one cell, whatever the profile: what a run has measured already is not measured again.
    quick = {cell.name: cell.settings for cell in cells_of(matrix, "quick") if changes_of(cell.name, produce) is not None}
    assert len(quick.keys() & {cell.name for cell in cells if quick.get(cell.name) == cell.settings}) >= 7


def test_cells_are_shared_out_to_clusters() -> None:
    cells = [Cell(name=str(number), kind="produce", title="", settings={}, fresh=number > 4) for number in range(7)]
    assert [[cell.name for cell in block] for block in blocks(cells, 2)] == [["0", "1"], ["2", "3"], ["4"], ["5"], ["6"]]
    assert [len(block) for block in blocks(cells, 0)] == [5, 1, 1]


def test_a_cell_that_hangs_is_given_up() -> None:
    with pytest.raises(GivenUp, match="given up after"), gives_up_after(0.05):
        threading.Event().wait(60)
    with gives_up_after(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_new_groups_wait_for_members_as_long_in_both_systems() -> None:
    assert BrokerSettings.__dataclass_fields__["group_initial_rebalance_delay_ms"].default == GROUP_DELAY_MS


def test_a_full_disk_is_told_before_a_cell_fills_it(tmp_path: Path) -> None:
    wait_for_room(tmp_path, free_bytes_min=0)
    with pytest.raises(Unavailable, match="make room"):
        wait_for_room(tmp_path, free_bytes_min=2**62, timeout_s=0)


def test_the_grid_is_shown_as_ratios_a_heat_map_and_figures(tmp_path: Path) -> None:
    rates = {"stratalog": {"records_per_s": 300.0}, "kafka": {"records_per_s": 100.0}}
    slow = {"stratalog": {"records_per_s": 50.0}, "kafka": {"records_per_s": 100.0}}
    one = {"produce": rates, "produce record_bytes=100": rates, "produce record_bytes=100 partitions=100": slow}
    one["produce partitions=10000"] = rates  # measured by another profile, no value of the grid
    run = _run(**one)
    write_page("a-run", run, read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert "| record | batch | 6 partitions, none | 100 partitions, none |\n" in text
    assert "| 100 B | 128 KB | 3.00 | 0.50 |\n| 1 KB | 128 KB | 3.00 |  |\n" in text
    assert "<summary>Figures: 100 partitions, none</summary>" in text
    assert "| produce record_bytes=100 | records/s |" in text
    assert "| produce record_bytes=100 partitions=100 | records/s |" not in text
    assert "| produce partitions=10000 | records/s |" in text
    root = ElementTree.fromstring((tmp_path / "pictures" / "produce-grid.svg").read_text())
    assert sorted(each.text for each in root.iter("{http://www.w3.org/2000/svg}text") if each.text in {"3.00", "0.50"}) == [
        "0.50",
        "3.00",
        "3.00",
    ]


def test_a_goal_of_many_cells_is_one_row_and_those_that_missed_it(tmp_path: Path) -> None:
    cells = {
        f"produce record_bytes={number}": {"stratalog": {"records_per_s": float(number)}, "kafka": {"records_per_s": 2.0}}
        for number in range(1, 12)
    }
    write_page("a-run", _run(**cells), read_matrix(), page=tmp_path / "page.md", pictures=tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert "| throughput in every cell | 11 cells | ≥ 1 | 0.50 … 5.50, median 3.00 | reached in 10 |" in text
    assert "| throughput in every cell | produce record_bytes=1 | ≥ 1 | 0.50 | **not reached** |" in text
    assert "| throughput in every cell | produce record_bytes=2 |" not in text


def test_medians_and_ratios() -> None:
    run = _run(produce={"stratalog": {"records_per_s": 10.0}, "kafka": {"records_per_s": 20.0}})
    for number, value in ((2, 1000.0), (3, 30.0)):
        run.rows.append(msgspec.structs.replace(run.rows[0], round=number, measured={"records_per_s": value}))
    assert summary.median(run, "produce", "stratalog", "records_per_s") == 30
    assert summary.ratio(run, "produce", "records_per_s", "kafka") == 1.5
    assert summary.ratio(run, "produce", "latency_p99_ms", "kafka") is None


def test_a_goal_may_compare_two_cells_of_ours() -> None:
    goal = Goal(title="partitions", cells="produce many", quantity="records_per_s", at_least=0.5, over="produce")
    run = _run(produce={"stratalog": {"records_per_s": 10.0}}, produce_many={"stratalog": {"records_per_s": 4.0}})
    (verdict,) = summary.verdicts(run, [goal], "kafka")
    assert (verdict.ratio, verdict.reached) == (0.4, False)


@pytest.mark.parametrize("profile", ["quick", "size", "grid", "full", "smoke"])
def test_cells_have_names_of_their_own_and_kinds_that_exist(profile: str) -> None:
    cells = cells_of(read_matrix(), profile)
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.kind for cell in cells} <= KINDS.keys()
    assert [cell.fresh for cell in cells] == sorted(cell.fresh for cell in cells)


def test_the_full_matrix_varies_two_axes_at_most_and_covers_every_pair() -> None:
    matrix = read_matrix()
    produce = next(workload for workload in matrix.workloads if workload.name == "produce")
    changed = [
        frozenset((name, value) for name, value in cell.settings.items() if produce.base[name] != value)
        for cell in cells_of(matrix, "full", "produce*")
        if cell.kind == "produce"
    ]
    assert max(map(len, changed)) == 2
    assert frozenset({("record_bytes", 100), ("partitions", 10_000)}) in changed
    assert len(set(changed)) == len(changed)


def test_every_goal_is_about_a_cell_of_the_full_profile() -> None:
    matrix = read_matrix()
    names = {cell.name for cell in cells_of(matrix, "full")}
    for goal in matrix.goals:
        assert any(goal.covers(name) for name in names), goal.title
        assert goal.over is None or goal.over in names


def test_an_interrupted_run_goes_on_and_a_failure_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    journal = Journal(path, _run())
    row = Row(cell="produce", system="kafka", round=1, at="", measured={"records_per_s": 1.0}, settings={})
    journal.add(row)
    journal.add(msgspec.structs.replace(row, cell="latency", measured={}, failure="time-out"))
    again = Journal(path, _run())
    assert again.has("produce", "kafka", 1)
    assert not again.has("produce", "kafka", 2)
    assert not again.has("latency", "kafka", 1)
    again.add(msgspec.structs.replace(row, cell="latency"))
    assert [each.failure for each in Journal(path, _run()).run.rows] == ["", ""]
