"""Renders the registry as Prometheus text (exposition format 0.0.4), with the prometheus-client library.

Imported at the first scrape, in a thread: the library takes a tenth of a second and some megabytes that a process without
scrapes does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from stratalog_core.metrics.groups import Histogram, MetricKind
from stratalog_core.metrics.registry import Family, Registry

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PIECE_LABEL_SETS: Final = 20
"""A label set of a histogram is 18 samples, and a sample takes 5 to 10 µs."""
_process = ProcessCollector(registry=None)


class _One(Collector):
    """A collector of one metric, because ``generate_latest`` takes collectors."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def exposition(registry: Registry) -> Iterator[bytes]:
    """Yield the text in pieces that take some milliseconds each, so that the caller can run other tasks in between."""
    for family in registry.collect():
        yield from _family(family)
    for metric in _process.collect():
        yield generate_latest(_One(metric))


def _family(family: Family) -> Iterator[bytes]:
    for start in range(0, max(1, len(family.samples)), _PIECE_LABEL_SETS):
        piece = family._replace(samples=family.samples[start : start + _PIECE_LABEL_SETS])
        text = generate_latest(_One(_metric(piece)))
        # The lines HELP and TYPE must occur once, before all samples.
        yield text if start == 0 else text.split(b"\n", 2)[2]


def _metric(family: Family) -> Metric:
    definition = family.definition
    made: Any = _KINDS[definition.kind](definition.name, definition.meaning, labels=definition.labels)
    for sample in family.samples:
        if isinstance(sample.value, Histogram):
            made.add_metric(sample.labels, buckets=_buckets(sample.value), sum_value=sample.value.sum)
        else:
            made.add_metric(sample.labels, sample.value)
    return cast(Metric, made)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative bucket counts, as Prometheus requires."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


_KINDS = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}
