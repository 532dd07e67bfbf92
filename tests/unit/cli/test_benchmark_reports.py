"""What the Java tools print, and the table of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.report import BEGIN, END, QUANTITIES, write_report

from stratalog.bench.java_tools import ToolFailed, parse_consumer, parse_end_to_end, parse_producer


def test_the_last_summary_of_the_producer_counts() -> None:
    line = "{} records sent, 12828.7 records/sec (12.23 MB/sec), 2000.97 ms avg latency, 3338.00 ms max latency, {}\n"
    percentiles = "1951 ms 50th, 2769 ms 95th, 3076 ms 99th, 3337 ms 99.9th."
    found = parse_producer("noise\n" + line.format(100, percentiles) + line.format(80, percentiles))
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


def test_the_table_replaces_only_itself(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nWords.\n")
    measured = {quantity.key: 10.0 for quantity in QUANTITIES}
    rounds = [
        {"system": "stratalog", "measured": measured},
        {"system": "kafka", "measured": {**measured, "latency_p99_ms": 20.0}},
    ]
    sizes = {"record_bytes": 1000, "failover_partitions": 100}
    write_report({"at": "2026-11-21", "machine": {"cores": 2}, "sizes": sizes, "rounds": rounds}, page)
    text = page.read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith(f"{END}\n\nWords.\n")
    assert "| … p99, ms | 10.0 | 20.0 | 0.50 (better) |" in text
    assert "old" not in text
