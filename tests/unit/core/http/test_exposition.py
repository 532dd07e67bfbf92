"""The Prometheus text of a registry, read back by Prometheus' own parser."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from stratalog_core.http.exposition import exposition
from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, gauge, histogram, label
from stratalog_core.metrics.registry import Registry


@dataclass(slots=True, kw_only=True)
class Mill(MetricGroup):
    subsystem = "mill"

    river: str = label()
    flour_bytes: int = counter("bytes", 'Flour with a "quote", a \\ and\na second line')
    wheels: int = gauge("wheels", "Wheels that turn")
    grinding_seconds: Histogram = histogram("seconds", "Time for a sack", (0.5, 2.0))


def _parsed(registry: Registry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    text = b"".join(exposition(registry)).decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_the_text_parses_to_the_values() -> None:
    registry = Registry()
    mill = registry.add(Mill(river='Blau "the\nblue"', flour_bytes=7, wheels=2))
    for seconds in (0.1, 0.5, 1.0, 9.0):
        mill.grinding_seconds.observe(seconds)
    found = _parsed(registry)
    river = ("river", 'Blau "the\nblue"')
    assert found["stratalog_mill_flour_bytes_total"] == {(river,): 7}
    assert found["stratalog_mill_wheels"] == {(river,): 2}
    buckets = {labels[0][1]: value for labels, value in found["stratalog_mill_grinding_seconds_bucket"].items()}
    assert buckets == {"0.5": 2, "2.0": 3, "+Inf": 4}
    assert found["stratalog_mill_grinding_seconds_count"] == {(river,): 4}
    assert found["stratalog_mill_grinding_seconds_sum"] == {(river,): 10.6}


def test_a_metric_of_many_pieces_is_one_metric() -> None:
    registry = Registry()
    registry.add_source(lambda: [Mill(river=f"river {number}", wheels=number) for number in range(55)])
    text = b"".join(exposition(registry))
    assert text.count(b"# TYPE stratalog_mill_wheels gauge") == 1
    assert text.count(b"# HELP stratalog_mill_flour_bytes_total") == 1
    assert _parsed(registry)["stratalog_mill_wheels"] == {(("river", f"river {number}"),): number for number in range(55)}


def test_it_has_the_process_itself() -> None:
    found = _parsed(Registry())
    assert found["process_resident_memory_bytes"][()] > 1e6
    assert found["process_open_fds"][()] > 0


def test_repeated_scrapes_leave_nothing_behind() -> None:
    registry = Registry()
    registry.add(Mill(river="Blau"))
    registry.add_source(lambda: [Mill(river=f"river {number}") for number in range(50)])

    def scrape() -> None:
        for _ in range(20):
            b"".join(exposition(registry))
        gc.collect()

    scrape()
    tracemalloc.start()
    try:
        scrape()
        before = tracemalloc.get_traced_memory()[0]
        scrape()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4096
