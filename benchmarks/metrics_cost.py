"""Measures the cost of counting on the hot path and of a scrape; prints the best of several runs.

python -m benchmarks.metrics_cost
"""

from __future__ import annotations

import timeit
from dataclasses import dataclass

from stratalog_core.http.exposition import exposition
from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, histogram, label
from stratalog_core.metrics.registry import Registry

CALLS = 1_000_000
ROUNDS = 5


@dataclass(slots=True, kw_only=True)
class _Group(MetricGroup):
    subsystem = "benchmark"

    topic: str = label()
    requests: int = counter("requests", "Counted here")
    request_seconds: Histogram = histogram("seconds", "Observed here")


def _best_s(statement: str, names: dict[str, object], number: int) -> float:
    return min(timeit.repeat(statement, globals=names, number=number, repeat=ROUNDS)) / number


def main() -> None:
    group = _Group(topic="")
    empty_s = _best_s("pass", {}, CALLS)
    counted_s = _best_s("group.requests += 1", {"group": group}, CALLS) - empty_s
    observed_s = _best_s("group.request_seconds.observe(0.003)", {"group": group}, CALLS) - empty_s
    registry = Registry(label_sets_max=1_000)
    for number in range(1_000):
        registry.add(_Group(topic=f"topic-{number}"))
    names: dict[str, object] = {"exposition": exposition, "registry": registry}
    scraped_s = _best_s("for _ in exposition(registry): pass", names, 1)
    pieces = sum(1 for _ in exposition(registry))
    print(f"increment of a counter           {counted_s * 1e9:7.0f} ns")
    print(f"observation of a histogram       {observed_s * 1e9:7.0f} ns")
    print(f"scrape of 1,000 label sets       {scraped_s * 1e3:7.1f} ms for 19,000 samples in {pieces} pieces")


if __name__ == "__main__":
    main()
