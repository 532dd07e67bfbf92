"""A metric group: a dataclass whose fields are labels, counters, gauges and histograms.

The declaration of a field is the one place that holds a metric's name, kind, unit and meaning; the reference page is generated
from it. The name is ``stratalog_<subsystem>_<field>``; a counter's ends with ``_total``. A group's labels are constant:
they are set when the group is created, and every metric of the group has them.

A component either holds a group for its lifetime and counts with ``group.field += 1`` and ``group.field.observe(value)``, or
fills a new one at each scrape from values that it has anyway.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Final

LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of buckets for durations, from a durable write on NVMe to a request that timed out."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricGroup:
    """Base of all groups. Subclasses are dataclasses with slots and set ``subsystem``."""

    __slots__ = ()
    subsystem: ClassVar[str]


class Histogram:
    """Counts of observed values by fixed buckets, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """``bounds`` are the inclusive upper bounds of the buckets, ascending; one more bucket takes what is above the last."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``. Takes well below a microsecond: one binary search and two additions."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add the counts of ``other``, which has the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def copy(self) -> Histogram:
        copied = Histogram(self.bounds)
        copied.add(self)
        return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDefinition:
    """One metric as users see it. ``field`` is the attribute of the group that holds its value."""

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    labels: tuple[str, ...]
    field: str


def counter(unit: str, meaning: str) -> Any:
    """Return a field of type int that only grows, from 0 at the start of the process."""
    return dataclasses.field(default=0, metadata={"kind": MetricKind.COUNTER, "unit": unit, "meaning": meaning})


def gauge(unit: str, meaning: str) -> Any:
    """Return a field of type int or float that rises and falls."""
    return dataclasses.field(default=0, metadata={"kind": MetricKind.GAUGE, "unit": unit, "meaning": meaning})


def histogram(unit: str, meaning: str, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> Any:
    """Return a field of type :class:`Histogram`."""
    metadata = {"kind": MetricKind.HISTOGRAM, "unit": unit, "meaning": meaning}
    return dataclasses.field(default_factory=lambda: Histogram(bounds), metadata=metadata)


def label() -> Any:
    """Return a field of type str that is a label of all metrics of its group, under the field's name."""
    return dataclasses.field(metadata={"kind": None})


def label_names(group: type[MetricGroup]) -> tuple[str, ...]:
    """Return the names of a group's labels, in the order of its fields."""
    return tuple(field.name for field in _fields(group) if field.metadata["kind"] is None)


def definitions(group: type[MetricGroup]) -> tuple[MetricDefinition, ...]:
    """Return the metrics of a group, in the order of its fields."""
    labels = label_names(group)
    return tuple(_definition(group, field, labels) for field in _fields(group) if field.metadata["kind"] is not None)


def _definition(group: type[MetricGroup], field: dataclasses.Field[Any], labels: tuple[str, ...]) -> MetricDefinition:
    kind = field.metadata["kind"]
    name = f"stratalog_{group.subsystem}_{field.name}" + ("_total" if kind is MetricKind.COUNTER else "")
    unit, meaning = field.metadata["unit"], field.metadata["meaning"]
    return MetricDefinition(name=name, kind=kind, unit=unit, meaning=meaning, labels=labels, field=field.name)


def _fields(group: type[MetricGroup]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(group)  # type: ignore[arg-type]
