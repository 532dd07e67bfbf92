"""An export in a table of Iceberg, against SQL and REST catalogs, read by pyiceberg. Without Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from support.rest_catalog import rest_catalog

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid, OutcomeUnknown, Unavailable
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs import iceberg
from stratalog_pipeline.jobs.export import ExportResult, check_same_options, export_tasks, plan_export
from stratalog_pipeline.jobs.export_files import write_file
from stratalog_pipeline.jobs.export_journal import Journal
from stratalog_pipeline.jobs.iceberg import IcebergTarget, publish
from stratalog_pipeline.jobs.report import export_report
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.value_formats.values import CORRUPT_RECORD

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

TOPIC = "flights-of-a-long-name"
TABLE = "events.flights"


def record(offset: int) -> Record:
    return Record(
        offset=offset,
        timestamp_ms=1_700_000_000_000 + offset,
        key=None if offset % 3 == 0 else b"k%d" % offset,
        value=None if offset % 5 == 0 else b"v" * (offset % 50),
        headers=(("number", b"%d" % offset), ("none", None)) if offset % 4 == 0 else (),
    )


def batches(first: int, count: int) -> list[bytes]:
    return [bytes(build_batch([record(o) for o in range(base, base + 5)])) for base in range(first, first + count, 5)]


def export(bucket: ColdBucket, target: Path, *, has_place: bool = True, more: Mapping[str, str] | None = None) -> None:
    """One run of an export, as the job does it."""
    target.mkdir(exist_ok=True)
    given = {"path": bucket.url, "subscribe": TOPIC, "splitBytes": "1500", "includeHeaders": "true"}
    options = parse_options({**given, **(more or {})})
    with Bucket(bucket.url) as source, Bucket(str(target)) as out:
        journal = Journal(out)
        check_same_options(journal, options, has_place=has_place)
        plan = plan_export(source, options, journal, allow_gaps=False, has_place=has_place)
        journal.begin(plan)
        tasks = export_tasks(source, plan, verify=False, allow_gaps=False)
        journal.finish([write_file(source, out, task) for task in tasks])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def sql(tmp_path: Path) -> IcebergTarget:
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    return IcebergTarget(table=TABLE, properties=properties)


def test_a_store_that_iceberg_cannot_address_is_refused_before_anything_is_read(sql: IcebergTarget) -> None:
    """It was taken for a directory of the same path."""
    with pytest.raises(Invalid, match="not in az:// stores"):
        publish("az://exports/flights?account=mine", sql)


@pytest.fixture(params=["sql", "rest"])
def to(request: pytest.FixtureRequest, sql: IcebergTarget) -> Iterator[IcebergTarget]:
    if request.param == "sql":
        yield sql
        return
    with catalog_of(sql) as catalog, rest_catalog(catalog) as uri:
        yield IcebergTarget(table=TABLE, properties={"type": "rest", "uri": uri})


def catalog_of(to: IcebergTarget) -> Catalog:
    return load_catalog("default", **to.properties)


def loaded(to: IcebergTarget) -> Table:
    with catalog_of(to) as catalog:
        return catalog.load_table(TABLE)


def rows(to: IcebergTarget) -> list[dict[str, Any]]:
    return sorted(loaded(to).scan().to_arrow().to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def check_rows(to: IcebergTarget, counts: dict[int, int]) -> None:
    found = rows(to)
    assert [(row["partition"], row["offset"]) for row in found] == [
        (partition, offset) for partition, count in counts.items() for offset in range(count)
    ]
    for row in found:
        made = record(row["offset"])
        assert (row["topic"], row["key"], row["value"], row["timestampType"]) == (TOPIC, made.key, made.value, 0)
        assert round(row["timestamp"].timestamp() * 1000) == made.timestamp_ms
        assert [(header["key"], header["value"]) for header in row["headers"] or ()] == list(made.headers)


def test_each_run_is_a_snapshot_and_each_record_is_there_once(cold_bucket: ColdBucket, target: Path, to: IcebergTarget) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 60), batches(60, 40)], [batches(0, 30)], []], block_bytes=600)
    export(cold_bucket, target)
    first = publish(str(target), to, verify=True)
    assert (first.runs, first.records, first.table_records, first.exported_records) == ((1,), 130, 130, 130)
    assert first.files > 4
    check_rows(to, {0: 100, 1: 30})
    again = publish(str(target), to)
    assert (again.runs, again.files, again.snapshot_id) == ((), 0, first.snapshot_id)
    cold_bucket.extend(TOPIC, 1, batches(30, 20))
    export(cold_bucket, target)
    export(cold_bucket, target)
    second = publish(str(target), to)
    assert (second.runs, second.records, second.table_records) == ((2,), 20, 150)
    check_rows(to, {0: 100, 1: 50})
    snapshots = loaded(to).snapshots()
    assert [snapshot.summary[iceberg.RUN] for snapshot in snapshots if snapshot.summary is not None] == ["1", "2"]
    versions = [json.loads(str(snapshot.summary[iceberg.MANIFESTS])) for snapshot in snapshots if snapshot.summary is not None]
    assert versions == [{TOPIC: {"0": 2, "1": 1}}, {TOPIC: {"0": 2, "1": 2}}]


def test_runs_before_the_table_are_published_in_order(cold_bucket: ColdBucket, target: Path, sql: IcebergTarget) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target)
    cold_bucket.extend(TOPIC, 0, batches(20, 20))
    export(cold_bucket, target)
    assert publish(str(target), sql).runs == (1, 2)
    check_rows(sql, {0: 40})


def test_a_commit_with_an_unknown_outcome_is_not_repeated(
    cold_bucket: ColdBucket, target: Path, sql: IcebergTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target)
    commit = Table._do_commit

    def lose(self: Table, *given: Any, **named: Any) -> None:
        commit(self, *given, **named)
        if self.metadata.current_snapshot_id is not None:
            raise ConnectionError("the answer is lost")

    with monkeypatch.context() as broken:
        broken.setattr(Table, "_do_commit", lose)
        with pytest.raises(OutcomeUnknown, match="run 1 may be in the table or not"):
            publish(str(target), sql)
    assert publish(str(target), sql).runs == ()
    check_rows(sql, {0: 20})


def test_of_two_that_publish_at_once_one_adds_the_files(
    cold_bucket: ColdBucket, target: Path, sql: IcebergTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target)
    others: list[iceberg.Published] = []

    def meanwhile(_: Table) -> None:
        if not others:
            monkeypatch.undo()
            others.append(publish(str(target), sql))

    monkeypatch.setattr(iceberg, "_disable_client_retries", meanwhile)
    assert publish(str(target), sql).runs == ()
    assert others[0].runs == (1,)
    check_rows(sql, {0: 20})


def test_tables_and_targets_that_do_not_fit_are_refused(
    cold_bucket: ColdBucket, target: Path, tmp_path: Path, sql: IcebergTarget
) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target, has_place=False)
    with pytest.raises(Invalid, match="has no columns topic and partition"):
        publish(str(target), sql)
    with pytest.raises(Invalid, match="was begun without a table of Iceberg"):
        export(cold_bucket, target)
    for name in ("a", "b"):
        export(cold_bucket, tmp_path / name)
    publish(str(tmp_path / "a"), sql)
    with pytest.raises(Invalid, match="the table belongs to the export at file:///"):
        publish(str(tmp_path / "b"), sql)
    with pytest.raises(Invalid, match="has no namespace"):
        publish(str(tmp_path / "b"), IcebergTarget(table="flights", properties=sql.properties))
    with pytest.raises(Invalid, match="catalog 'default'"):
        publish(str(tmp_path / "b"), IcebergTarget(table=TABLE, properties={"type": "no such"}))
    with pytest.raises(Unavailable, match="catalog 'default'"):
        publish(str(tmp_path / "b"), IcebergTarget(table=TABLE, properties={"type": "rest", "uri": "http://127.0.0.1:1"}))


def test_a_file_that_was_changed_is_found(cold_bucket: ColdBucket, target: Path, sql: IcebergTarget) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target)
    (file,) = target.glob("topic=*/*/*.parquet")
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt, match="its SHA-256 differs"):
        publish(str(target), sql, verify=True)
    assert rows(sql) == []


def test_records_of_others_are_reported(cold_bucket: ColdBucket, target: Path, sql: IcebergTarget) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 20)]])
    export(cold_bucket, target)
    published = publish(str(target), sql)
    result = ExportResult(run=1)
    assert export_report(result, str(target), published).problems == []
    with catalog_of(sql) as catalog:
        table = catalog.load_table(TABLE)
        table.append(table.scan(limit=3).to_arrow())
    report = export_report(result, str(target), publish(str(target), sql))
    assert report.problems == [
        f"table {TABLE} has 23 records, and 20 were exported to it: others write to it or delete from it"
    ]
    assert report.document["iceberg"]["table_records"] == 23


@pytest.mark.parametrize("runs_again", [1, 2])
def test_a_target_that_was_begun_again_is_not_published_in_the_old_table(
    cold_bucket: ColdBucket, target: Path, sql: IcebergTarget, runs_again: int
) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 10)]])
    export(cold_bucket, target)
    cold_bucket.extend(TOPIC, 0, batches(10, 10))
    export(cold_bucket, target)
    assert publish(str(target), sql).runs == (1, 2)
    assert publish(str(target), sql).runs == ()
    for name in ("_stratalog", f"topic={TOPIC}"):
        shutil.rmtree(target / name)
    for run in range(runs_again):
        cold_bucket.extend(TOPIC, 0, batches(20 + 10 * run, 10))
        export(cold_bucket, target)
    with pytest.raises(Invalid, match="the table has 2 runs of an export that is not in the target any more"):
        publish(str(target), sql)


def test_values_by_a_schema_are_columns(cold_bucket: ColdBucket, target: Path, to: IcebergTarget) -> None:
    def orders(first: int, count: int) -> list[bytes]:
        content = b'{"id": %d, "lines": [{"sku": "s%d", "euros": 1.5}], "by": {"x": 2}}'
        contents = [content % (offset, offset) for offset in range(first, first + count)]
        made = [Record(offset=first + at, timestamp_ms=first, key=b"k", value=content) for at, content in enumerate(contents)]
        bad = Record(offset=first + count, timestamp_ms=first, key=b"k", value=b"no JSON")
        none = Record(offset=first + count + 1, timestamp_ms=first, key=None, value=None)
        return [bytes(build_batch([*made, bad, none]))]

    shape = "id BIGINT, lines ARRAY<STRUCT<sku: STRING, euros: DECIMAL(9,2)>>, by MAP<STRING, INT>"
    values = {"value_format": "json", "value_schema": shape, "value_mode": "PERMISSIVE"}
    cold_bucket.add_topic(TOPIC, [[orders(0, 8), orders(10, 8)]])
    export(cold_bucket, target, more=values)
    cold_bucket.extend(TOPIC, 0, orders(20, 8))
    export(cold_bucket, target, more=values)
    published = publish(str(target), to, verify=True)
    assert (published.runs, published.records, published.table_records) == ((1, 2), 30, 30)
    found = rows(to)
    assert [row["offset"] for row in found] == list(range(30))
    for row in found:
        offset = row["offset"]
        if offset % 10 < 8:
            lines = [{"sku": f"s{offset}", "euros": Decimal("1.50")}]
            assert row["value"] == {"id": offset, "lines": lines, "by": [("x", 2)]}
        else:
            assert row["value"] is None
        assert row[CORRUPT_RECORD] == (b"no JSON" if offset % 10 == 8 else None)
    # Fields of values are columns of the table: a query reads and prunes by them.
    chosen = loaded(to).scan(row_filter="value.id >= 20", selected_fields=("offset",)).to_arrow()
    assert sorted(chosen["offset"].to_pylist()) == list(range(20, 28))
    refused: tuple[dict[str, str], ...] = ({}, {**values, "value_schema": "id INT"}, {**values, "value_mode": "FAILFAST"})
    for changed in refused:
        with pytest.raises(Invalid, match="the target was begun with"):
            export(cold_bucket, target, more=changed)


def test_a_value_without_the_schema_fails_the_export_before_it_is_published(
    cold_bucket: ColdBucket, target: Path, sql: IcebergTarget
) -> None:
    cold_bucket.add_topic(TOPIC, [[batches(0, 10)]])
    with pytest.raises(Corrupt, match=f"{TOPIC}-0, offset 1: the value cannot be decoded as json"):
        export(cold_bucket, target, more={"value_format": "json", "value_schema": "id INT"})
    assert publish(str(target), sql).records == 0


def test_a_table_is_made_when_the_first_run_has_decided_its_columns(
    cold_bucket: ColdBucket, target: Path, to: IcebergTarget
) -> None:
    """Before that it had the columns of bytes and headers, which the files of no other export fit."""
    target.mkdir()
    nothing = publish(str(target), to)
    assert (nothing.runs, nothing.records, nothing.table_records, nothing.snapshot_id) == ((), 0, 0, None)
    values = [Record(offset=offset, timestamp_ms=1, key=None, value=b'{"id": %d}' % offset) for offset in range(5)]
    cold_bucket.add_topic(TOPIC, [[[bytes(build_batch(values))]]])
    more = {"value_format": "json", "value_schema": "id BIGINT", "includeHeaders": "false"}
    export(cold_bucket, target, more=more)
    assert publish(str(target), to).table_records == 5
    assert [row["value"]["id"] for row in rows(to)] == list(range(5))
    assert "headers" not in loaded(to).schema().column_names
