"""The alert rules and the dashboard of ``docs/examples`` ask for metrics that processes report, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratalog.reference.metrics import METRIC_GROUPS
from stratalog_core.metrics.groups import MetricDefinition, definitions

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = DOCS / "examples"
RULES: list[dict[str, Any]] = yaml.safe_load((EXAMPLES / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
METRICS: dict[str, MetricDefinition] = {
    definition.name: definition for _, groups in METRIC_GROUPS for group in groups for definition in definitions(group)
}
SCRAPE_LABELS = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of a histogram's buckets."""


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_metrics_and_labels_exist(title: str, expression: str) -> None:
    used = re.findall(r"stratalog_\w+", expression)
    labels = set(SCRAPE_LABELS)
    for name in used:
        known = METRICS.get(name) or METRICS[re.sub(r"_(bucket|count|sum)$", "", name)]
        assert (known.kind == "histogram") == (known.name != name), f"{name} of a {known.kind}"
        assert ("rate(" in expression or "increase(" in expression) == (known.kind != "gauge"), f"{name} is a {known.kind}"
        labels |= set(known.labels)
    selected = re.findall(r"(\w+)=~?\"", expression)
    grouped = [label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")]
    assert set(selected + grouped) <= labels
    assert expression.count("(") == expression.count(")")
    assert used or expression.startswith(("up{", "process_", "rate(process_"))


def test_every_alert_says_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_the_monitoring_guide_names_every_alert_beside_its_metrics() -> None:
    rows = re.findall(r"^\| [^|]*\? \| ([^|]*) \| ([^|]*) \|$", (DOCS / "how-to" / "monitor.md").read_text(), re.MULTILINE)
    named = [(alert, metrics) for metrics, alerts in rows for alert in re.findall(r"`(\w+)`", alerts)]
    assert sorted(alert for alert, _ in named) == sorted(rule["alert"] for rule in RULES)
    expressions_by_alert = {rule["alert"]: rule["expr"] for rule in RULES}
    for alert, metrics in named:
        used = {name.removesuffix("_bucket") for name in re.findall(r"stratalog_\w+|\bup\b", expressions_by_alert[alert])}
        assert used <= set(re.findall(r"`(\w+)`", metrics)), alert


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
