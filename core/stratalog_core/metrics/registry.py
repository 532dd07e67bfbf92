"""The metrics of one process: groups that components hold, and sources that fill groups at a scrape.

At most ``label_sets_max`` label sets of a group are reported, so that the size of a scrape does not grow with topics or
partitions. The number of omitted label sets is a metric.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from stratalog_core.metrics.groups import (
    Histogram,
    MetricDefinition,
    MetricGroup,
    counter,
    definitions,
    gauge,
    label_names,
)

LABEL_SETS_MAX: Final = 200
Value = int | float | Histogram
Source = Callable[[], Iterable[MetricGroup]]
Group = TypeVar("Group", bound=MetricGroup)
_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One label set's value."""

    labels: tuple[str, ...]
    value: Value


class Family(NamedTuple):
    """One metric with all its samples."""

    definition: MetricDefinition
    samples: list[Sample]


@dataclass(slots=True, kw_only=True)
class ScrapeMetrics(MetricGroup):
    """Metrics of the registry itself."""

    subsystem = "metrics"

    scrapes: int = counter("scrapes", "Scrapes of this process; identical ones within a second count as one")
    source_errors: int = counter("errors", "Failed sources of metrics; their metrics are missing from that scrape")
    left_out_label_sets: int = gauge(
        "label sets", "Label sets that the last scrape left out because a metric had more than [http] label_sets_max"
    )


class Registry:
    """Created once per process and passed to its components."""

    def __init__(self, label_sets_max: int = LABEL_SETS_MAX) -> None:
        self._label_sets_max = label_sets_max
        self._sources: list[Source] = []
        self._own = self.add(ScrapeMetrics())

    def add(self, group: Group) -> Group:
        """Report ``group`` at every scrape and return it. Its owner updates it."""
        self._sources.append(lambda: (group,))
        return group

    def add_source(self, source: Source) -> None:
        """Call ``source`` at every scrape and report the groups that it returns, the most important label sets first.

        It runs on the event loop: it must be quick, and its work bounded or proportional to what the process holds.
        """
        self._sources.append(source)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics with their current values. Groups of one class with equal labels are added up."""
        self._own.scrapes += 1
        self._own.left_out_label_sets = 0
        by_class: dict[type[MetricGroup], _GroupsOfClass] = {}
        for source in self._sources:
            try:
                groups = list(source())
            except Exception:
                # A scrape that fails as a whole would hide all other metrics because of one.
                _log.exception("a source of metrics failed")
                self._own.source_errors += 1
                continue
            for group in groups:
                of_class = by_class.get(type(group))
                if of_class is None:
                    of_class = by_class[type(group)] = _GroupsOfClass(type(group))
                if not of_class.take(group, self._label_sets_max):
                    self._own.left_out_label_sets += 1
        for of_class in by_class.values():
            yield from of_class.families()


class _GroupsOfClass:
    """The groups of one class in one scrape, by their labels."""

    def __init__(self, kind: type[MetricGroup]) -> None:
        self._kind = kind
        self._names = label_names(kind)
        self._by_labels: dict[tuple[str, ...], list[MetricGroup]] = {}

    def take(self, group: MetricGroup, label_sets_max: int) -> bool:
        """Add ``group``; return False if that would exceed ``label_sets_max``."""
        labels = tuple([getattr(group, name) for name in self._names])
        if labels not in self._by_labels and len(self._by_labels) >= label_sets_max:
            return False
        self._by_labels.setdefault(labels, []).append(group)
        return True

    def families(self) -> Iterator[Family]:
        for definition in definitions(self._kind):
            samples = [Sample(labels, _total(groups, definition.field)) for labels, groups in self._by_labels.items()]
            yield Family(definition, samples)


def _total(groups: list[MetricGroup], field: str) -> Value:
    first: Value = getattr(groups[0], field)
    if isinstance(first, Histogram):
        total = first.copy()
        for group in groups[1:]:
            total.add(getattr(group, field))
        return total
    return first if len(groups) == 1 else sum(getattr(group, field) for group in groups)
