"""Reports of jobs and their pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from stratalog_core.errors import Corrupt, Refused, StratalogError, Unavailable
from stratalog_pipeline.jobs.audit import PartitionAudit
from stratalog_pipeline.jobs.export import ExportResult
from stratalog_pipeline.jobs.export_journal import WrittenFile
from stratalog_pipeline.jobs.page import LABELS_MAX, SERIES_MAX, render_page
from stratalog_pipeline.jobs.report import Chart, Report, audit_report, export_report, usage_report
from stratalog_pipeline.jobs.session import as_ours
from stratalog_pipeline.jobs.usage import Usage
from stratalog_tiering.store.base import Throttled


def partition_audit(topic: str, partition: int, *problems: str) -> PartitionAudit:
    return PartitionAudit(
        topic=topic,
        topic_id="0",
        partition=partition,
        end_offset=30,
        records=30,
        records_by_day={-400: 1, -1: 1, 19_675: 19, 19_677: 9},
        bytes_by_codec={"zstd": 5000},
        digest="" if problems else "ab" * 32,
        problems=problems,
    )


class _Texts(HTMLParser):
    """The texts of a page, and whatever it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def texts(page: str) -> list[str]:
    parser = _Texts()
    parser.feed(page)
    parser.close()
    assert parser.loaded == []
    return parser.texts


def test_an_audit_of_sound_history() -> None:
    report = audit_report([partition_audit("a", 0), partition_audit("a", 1), partition_audit("b", 0)])
    assert report.document["sound"] is True
    assert report.facts["records"] == 90
    days = report.charts[0]
    assert days.labels == ["2023-11-14", "2023-11-16", "none"]
    assert days.series == {"a": [38, 18, 4], "b": [19, 9, 2]}
    json.dumps(report.document)
    page = texts(render_page(report, "stratalog job audit", "2026-01-01"))
    assert {"Audit", "sound", "2023-11-14", "ab" * 32, "4.9 KiB"} - set(page) <= {"4.9 KiB"}
    assert any(text.startswith("Every offset is present once") for text in page)


def test_an_audit_with_problems_shows_them_escaped() -> None:
    report = audit_report([partition_audit("a", 0, "block <b> & more"), partition_audit("a", 1)])
    assert report.problems == ["a-0: block <b> & more"]
    assert report.document["sound"] is False
    page = render_page(report, "stratalog job audit", "now")
    assert "a-0: block &lt;b&gt; &amp; more" in page
    assert not any(text.startswith("Every offset") for text in texts(page))


def test_an_export_is_summed_by_partition() -> None:
    files = tuple(
        WrittenFile(
            topic="a", partition=0, first=first, end=first + 10, records=10, size_bytes=2048, sha256="00", key=f"k{first}"
        )
        for first in (0, 10)
    )
    report = export_report(ExportResult(run=3, files=files), "/out")
    assert report.tables[0].rows == [
        {"topic": "a", "partition": 0, "start_offset": 0, "end_offset": 20, "records": 20, "files": 2, "size_bytes": 4096}
    ]
    assert "4.0 KiB" in texts(render_page(report, "stratalog job export", "now"))
    json.dumps(export_report(ExportResult(run=3), "/out").document)


def test_usage_shows_what_its_depth_allows() -> None:
    partition = {"topic": "a", "partition": 0, "records": 5, "stored_bytes": 100, "batch_bytes": 200}
    found = Usage(depth="blocks", partitions=[partition], days=[{"topic": "a", "day": None, "records": 5, "bytes": 9}])
    report = usage_report(found)
    assert [table.title for table in report.tables] == ["Partitions", "Days"]
    assert [chart.labels for chart in report.charts] == [["none"]]
    texts(render_page(report, "stratalog job usage", "now"))


def test_a_page_is_bounded() -> None:
    series = {f"topic-{number}": [1.0] * (LABELS_MAX + 5) for number in range(SERIES_MAX + 3)}
    chart = Chart(
        title="c", labels=[f"label-{n}" for n in range(LABELS_MAX + 5)], series=series, unit="records", is_horizontal=True
    )
    page = texts(render_page(Report(title="t", document={}, facts={}, tables=[], charts=[chart]), "c", "now"))
    assert "others" in page
    assert "label-0" not in page
    assert f"label-{LABELS_MAX + 4}" in page


def qualified(error: type[StratalogError]) -> str:
    """As in a trace."""
    return f"{error.__module__}.{error.__qualname__}"


def test_errors_of_tasks_become_the_products_errors() -> None:
    trace = (
        "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job aborted\n"
        '  File "x.py", line 1\nstratalog_core.errors.Corrupt: segment s, block at byte 7: does not match its CRC\n\n'
        "\tat org.apache.spark.api.python.PythonRunner"
    )
    found = as_ours(trace)
    assert isinstance(found, Corrupt)
    assert found.message == "segment s, block at byte 7: does not match its CRC"
    assert isinstance(as_ours(trace.replace(qualified(Corrupt), qualified(Refused))), Refused)
    throttled = as_ours(trace.replace(qualified(Corrupt), qualified(Throttled)))
    assert isinstance(throttled, Throttled), "an error of another module"
    assert throttled.message == found.message
    other = as_ours("An error occurred.\n: java.lang.OutOfMemoryError: Java heap space\n\tat java.base/x")
    assert isinstance(other, Unavailable)
    assert "OutOfMemoryError: Java heap space" in other.message


def drawn(labels: list[str], *series: str) -> str:
    chart = Chart(title="c", labels=labels, series={name: [1.0] * len(labels) for name in series}, unit="records")
    return render_page(Report(title="t", document={}, facts={}, tables=[], charts=[chart]), "c", "now")


def test_a_chart_names_topics_whose_names_begin_with_an_underscore() -> None:
    page = texts(drawn(["2026-01-01"], "_schemas", "_offsets", "orders"))
    assert {"_schemas", "_offsets", "orders"} <= set(page)


def test_a_chart_has_keys_in_any_script_and_no_control_characters() -> None:
    """Its texts are drawn by the reader's browser, which has more glyphs than the font that they are measured with."""
    page = drawn(["日本", "a\x00b<i>", "\x1b[31m", "a\nb$x$"], "keys")
    assert {"日本", r"a\x00b<i>", r"\x1b[31m", r"a\nb$x$"} <= set(texts(page))


def test_usage_names_every_list_of_its_depth_although_it_is_empty() -> None:
    assert usage_report(Usage(depth="blocks")).document == {"depth": "blocks", "partitions": [], "days": []}
    document = usage_report(Usage(depth="records")).document
    assert [*document] == ["depth", "partitions", "days", "codecs", "producers", "keys", "key_counts"]
