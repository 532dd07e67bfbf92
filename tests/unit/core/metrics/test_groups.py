"""Names, labels and histograms of metric groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.metrics.groups import (
    Histogram,
    MetricGroup,
    MetricKind,
    counter,
    definitions,
    gauge,
    histogram,
    label,
    label_names,
)


@dataclass(slots=True, kw_only=True)
class Kitchen(MetricGroup):
    subsystem = "kitchen"

    stove: str = label()
    meals: int = counter("meals", "Meals that were served")
    heat_celsius: float = gauge("degrees Celsius", "Its heat")
    cooking_seconds: Histogram = histogram("seconds", "Time from order to meal", (1.0, 5.0))


def test_a_definition_holds_name_kind_unit_meaning_and_labels() -> None:
    meals, heat, cooking = definitions(Kitchen)
    assert (meals.name, meals.kind, meals.unit) == ("stratalog_kitchen_meals_total", MetricKind.COUNTER, "meals")
    assert (heat.name, heat.kind, heat.meaning) == (
        "stratalog_kitchen_heat_celsius",
        MetricKind.GAUGE,
        "Its heat",
    )
    assert (cooking.name, cooking.kind) == ("stratalog_kitchen_cooking_seconds", MetricKind.HISTOGRAM)
    assert {definition.labels for definition in definitions(Kitchen)} == {("stove",)} == {label_names(Kitchen)}


def test_groups_count_apart() -> None:
    one, other = Kitchen(stove="gas"), Kitchen(stove="coal")
    one.meals += 2
    one.cooking_seconds.observe(3.0)
    assert (other.meals, sum(other.cooking_seconds.counts)) == (0, 0)


bounds = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8, unique=True).map(sorted).map(tuple)


@given(bounds, st.lists(st.floats(-1e7, 1e7)))
def test_each_value_is_in_the_first_bucket_that_is_not_below_it(bounds: tuple[float, ...], values: list[float]) -> None:
    made = Histogram(bounds)
    for value in values:
        made.observe(value)
    for index, bound in enumerate(bounds):
        assert sum(made.counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(made.counts) == len(values)
    # Since Python 3.12, sum() compensates for rounding.
    assert made.sum == reduce(add, values, 0.0)


@given(st.lists(st.floats(0, 1e3)), st.lists(st.floats(0, 1e3)))
def test_added_histograms_hold_the_values_of_both(one: list[float], other: list[float]) -> None:
    first, second, both = (Histogram((1.0, 10.0, 100.0)) for _ in range(3))
    for target, values in ((first, one), (second, other), (both, [*one, *other])):
        for value in values:
            target.observe(value)
    copied = first.copy()
    copied.add(second)
    assert copied.counts == both.counts
    assert sum(first.counts) == len(one)
