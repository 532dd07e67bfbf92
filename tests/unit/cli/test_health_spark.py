"""Findings about Spark's executors, from what their tasks report. The tasks themselves: ``make spark-cluster``."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

from stratalog.health.finding import Verdict
from stratalog.health.spark import Report, check_spark, executor_findings

HEALTHY: Report = {
    "host": "a", "directory": "/spark/app/0", "prefix": "/env", "python": "3.11.9", "missing": "", "cache": "",
    "stratalog": version("stratalog"),
}  # fmt: skip


def test_an_executor_is_reported_once_whatever_its_slots() -> None:
    other = {**HEALTHY, "directory": "/spark/app/1"}
    found = list(executor_findings([HEALTHY, other, HEALTHY], None))
    assert [(each.check, each.verdict) for each in found] == [
        ("spark executor 1", Verdict.OK),
        ("spark executor 2", Verdict.OK),
    ]


@pytest.mark.parametrize(
    ("changes", "verdict", "detail", "remedy"),
    [
        ({"missing": "numba (No module named 'numba')"}, Verdict.FAIL, "no numba (No module", "stratalog[executor]"),
        ({"stratalog": "0.0.1"}, Verdict.FAIL, "stratalog 0.0.1, here", "of the driver's version"),
        ({"store": "Unavailable: refused"}, Verdict.FAIL, "cannot read s3://b: Unavailable: refused", "credentials"),
        ({"cache": "/env/lib"}, Verdict.WARN, "/env/lib is read-only", "NUMBA_CACHE_DIR"),
    ],
)
def test_what_an_executor_lacks_is_named(changes: Report, verdict: Verdict, detail: str, remedy: str) -> None:
    (found,) = executor_findings([{**HEALTHY, **changes}], "s3://b")
    assert found.verdict is verdict
    assert detail in found.detail
    assert remedy in found.remedy


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    (found,) = check_spark("local[1]", None)
    assert (found.verdict, found.remedy) == (Verdict.FAIL, "pip install 'stratalog[spark]'")
