"""The arithmetic of ``make bench-cold``, its command line, and what it tells load processes."""

from __future__ import annotations

import pytest
from benchmarks.cold.__main__ import MEASURES, SMOKE, parsed
from benchmarks.cold.figures import Figure, percentile, ratios, shown, worst_ratio
from benchmarks.cold.replays import Replay, assigned_loads, gets_at_once
from benchmarks.cold.stage import Options
from benchmarks.cold.store_work import in_turns
from benchmarks.usage import Used

from stratalog_tiering.cold.reader import ColdReaderSettings


def test_the_line_of_a_figure_names_it_and_its_median_first() -> None:
    figure = Figure(name="cold_replay_ratio", values=(0.9, 0.5, 0.85), target=0.8)
    assert figure.line() == "cold_replay_ratio 0.8500 min=0.5000 max=0.9000 n=3 target>=0.8 met"
    assert Figure(name="raw", values=(1234.5,)).line() == "raw 1234 min=1234 max=1234 n=1"


@pytest.mark.parametrize(
    ("wanted", "median", "met"),
    [
        ("at least", 0.8, True),
        ("at least", 0.79, False),
        ("at most", 0.8, True),
        ("at most", 0.81, False),
        ("below", 0.79, True),
        ("below", 0.8, False),
    ],
)
def test_the_median_reaches_the_target_or_not(wanted: str, median: float, met: bool) -> None:
    figure = Figure(name="a", values=(0.0, median, 9.0), target=0.8, wanted=wanted)  # type: ignore[arg-type]
    assert figure.is_met is met
    assert figure.document()["met"] is met
    assert figure.line().endswith("met" if met else "missed")


def test_a_figure_without_a_target_is_neither_met_nor_missed() -> None:
    document = Figure(name="a", values=(2.0, 1.0)).document()
    assert document == {"name": "a", "median": 1.5, "values": [2.0, 1.0], "target": None, "wanted": None, "met": None}


def test_numbers_are_shown_with_four_digits_and_no_exponent() -> None:
    assert [shown(value) for value in (0, 0.000123456, 0.98765, 12.3456, 98765.4)] == [
        "0", "0.0001235", "0.9877", "12.35", "98765",
    ]  # fmt: skip


def test_each_value_is_divided_by_the_control_of_its_own_pair() -> None:
    assert ratios([1.0, 9.0], [2.0, 3.0]) == (0.5, 3.0)
    with pytest.raises(ValueError, match="raise the sizes"):
        ratios([1.0], [0.0])
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_the_ratio_of_several_loads_is_that_of_the_worst_one() -> None:
    figures = [Figure(name="1", values=(0.9, 0.7, 0.8)), Figure(name="8", values=(0.6, 0.95, 0.75))]
    assert worst_ratio("all", figures, 0.8) == Figure(name="all", values=(0.6, 0.95, 0.75), target=0.8)


def test_a_replay_compares_the_same_bytes_and_leaves_the_store_and_clients_out_of_the_servers() -> None:
    used = Used(by_role={"broker": 1.0, "bookie": 0.25, "store": 5.0, "client": 9.0}, machine_s=40.0, idle_s=20.0)
    replay = Replay(
        size=500_000_000, consumer_s=2.0, raw_s=1.5, used=used, raw_used=used, raw_cpu_s=0.3, base_bytes=1, peak_bytes=2
    )
    assert replay.ratio == 0.75
    assert replay.servers_s_per_gb == 2.5


def test_the_control_has_as_many_gets_in_flight_as_the_broker_may_have() -> None:
    settings = ColdReaderSettings(fetch_reads=8, read_ahead_reads=4, read_ahead_blocks=8)
    assert [gets_at_once(consumers, settings) for consumers in (1, 2, 8, 20)] == [5, 6, 12, 12]


def test_blocks_of_partitions_are_read_in_turns() -> None:
    first, second = [("a", 0, 1), ("a", 1, 1), ("a", 2, 1)], [("b", 0, 1)]
    assert in_turns([first, second]) == [("a", 0, 1), ("b", 0, 1), ("a", 1, 1), ("a", 2, 1)]


def test_every_partition_is_assigned_to_one_consumer() -> None:
    loads = assigned_loads("127.0.0.1:9092", "t", 5)
    assert [load.assigned for load in loads] == [[[0], [2], [4]], [[1], [3]]]
    assert [load.consumers * len(load.groups) for load in loads] == [3, 2]


def test_sizes_come_from_the_profile_unless_they_are_given() -> None:
    assert parsed([])[1] == Options()
    assert parsed(["--smoke"])[1] == SMOKE
    arguments, options = parsed(["--smoke", "--history-mb", "7", "--only", "cold_seek_p99_ms"])
    assert (options.history_mb, options.seeks) == (7, SMOKE.seeks)
    assert arguments.only == ["cold_seek_p99_ms"]


def test_a_size_of_nothing_and_an_unknown_measure_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--rounds", "0"], "--rounds is 0"), (["--only", "speed"], next(iter(MEASURES)))):
        with pytest.raises(SystemExit):
            parsed(words)
        assert message in capsys.readouterr().err
