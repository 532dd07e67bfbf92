"""A scrape collects from groups and sources, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from stratalog_core.metrics.groups import Histogram, MetricGroup, counter, gauge, histogram, label
from stratalog_core.metrics.registry import Registry, Value


@dataclass(slots=True, kw_only=True)
class Shop(MetricGroup):
    subsystem = "shop"

    town: str = label()
    sales: int = counter("sales", "Sales")
    till_bytes: int = gauge("bytes", "Content of the till")
    queue_seconds: Histogram = histogram("seconds", "Time in the queue", (1.0,))


def _collected(registry: Registry) -> dict[str, dict[tuple[str, ...], Value]]:
    return {family.definition.name: {one.labels: one.value for one in family.samples} for family in registry.collect()}


def test_a_held_group_and_a_source_are_read_at_each_scrape() -> None:
    registry = Registry()
    held = registry.add(Shop(town="Ulm"))
    till = 0
    registry.add_source(lambda: [Shop(town="Bonn", till_bytes=till)])
    held.sales += 3
    till = 9
    found = _collected(registry)
    assert found["stratalog_shop_sales_total"] == {("Ulm",): 3, ("Bonn",): 0}
    assert found["stratalog_shop_till_bytes"] == {("Ulm",): 0, ("Bonn",): 9}
    held.sales += 1
    assert _collected(registry)["stratalog_shop_sales_total"][("Ulm",)] == 4


def test_groups_with_equal_labels_are_added_up() -> None:
    registry = Registry()
    for _ in range(2):
        shop = registry.add(Shop(town="Ulm", sales=2, till_bytes=5))
        shop.queue_seconds.observe(0.5)
    found = _collected(registry)
    assert found["stratalog_shop_sales_total"] == {("Ulm",): 4}
    assert found["stratalog_shop_till_bytes"] == {("Ulm",): 10}
    waited = found["stratalog_shop_queue_seconds"]["Ulm",]
    assert isinstance(waited, Histogram)
    assert waited.counts == [2, 0]
    assert shop.queue_seconds.counts == [1, 0]


def test_label_sets_beyond_the_bound_are_left_out_and_counted() -> None:
    registry = Registry(label_sets_max=5)
    registry.add_source(lambda: (Shop(town=f"town {number}") for number in range(10_000)))
    found = _collected(registry)
    assert list(found["stratalog_shop_sales_total"]) == [(f"town {number}",) for number in range(5)]
    assert found["stratalog_metrics_left_out_label_sets"] == {(): 9_995}


def test_a_source_that_fails_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[MetricGroup]:
        yield Shop(town="Ulm")
        raise ZeroDivisionError

    registry = Registry()
    registry.add_source(broken)
    registry.add(Shop(town="Bonn"))
    found = _collected(registry)
    assert list(found["stratalog_shop_sales_total"]) == [("Bonn",)]
    assert found["stratalog_metrics_source_errors_total"] == {(): 1}
    assert "ZeroDivisionError" in caplog.text
