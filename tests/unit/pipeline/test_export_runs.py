"""An export's runs, one after the other, in this process; and values that are compared with those of an earlier attempt."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.pipeline.test_export import Exporter, batches, offsets, options_for

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, NotFound
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs import export as export_module
from stratalog_pipeline.jobs.export import ExportResult, export
from stratalog_pipeline.jobs.export_journal import Journal
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.options import ReadOptions, parse_options

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExportResult]:
    """Run the job with its tasks in this process."""

    def here(
        spark: None, store: str, tasks: Sequence[Any], work: Callable[[Bucket, Any], Any], on_progress: Callable[..., None]
    ) -> list[Any]:
        with Bucket(store) as bucket:
            return [work(bucket, task) for task in tasks]

    monkeypatch.setattr(export_module, "run_tasks", here)

    def exported(options: ReadOptions, *, allow_gaps: bool = False) -> ExportResult:
        spark: Any = None
        return export(spark, options, str(target), allow_gaps=allow_gaps)

    return exported


def of_topic(bucket: ColdBucket, topic: str) -> ReadOptions:
    return parse_options({"path": bucket.url, "subscribe": topic})


def interrupt(bucket: ColdBucket, target: Path, topic: str) -> None:
    """Begin a run, and write nothing."""
    target.mkdir(exist_ok=True)
    with Bucket(bucket.url) as opened, Bucket(str(target)) as out:
        journal = Journal(out)
        journal.begin(export_module.plan_export(opened, of_topic(bucket, topic), journal, allow_gaps=False))


def test_after_an_interrupted_run_the_export_goes_on(
    cold_bucket: ColdBucket, target: Path, run: Callable[..., ExportResult]
) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 60)]])
    interrupt(cold_bucket, target, "flights")
    cold_bucket.extend("flights", 0, batches(60, 40))
    done = run(of_topic(cold_bucket, "flights"))
    assert (done.run, done.records, done.was_resumed) == (2, 100, True)
    assert offsets(target) == {0: list(range(100))}
    assert run(of_topic(cold_bucket, "flights")) == ExportResult(run=2)


def test_an_interrupted_run_of_another_topic_is_not_taken_for_the_export_of_this_one(
    cold_bucket: ColdBucket, target: Path, run: Callable[..., ExportResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [cold_bucket.add_topic(name, [[batches(0, 20)]]) for name in ("flights", "weather")]
    interrupt(cold_bucket, target, "flights")
    leased: list[set[Any]] = []

    def noted(bucket: Bucket, options: ReadOptions, job: str, more_ids: Iterable[Any] = ()) -> Any:
        leased.append(set(more_ids))
        return reader_lease(bucket, options, job, set(more_ids))

    monkeypatch.setattr(export_module, "reader_lease", noted)
    done = run(of_topic(cold_bucket, "weather"))
    assert {file.topic: file.records for file in done.files} == {"flights": 20, "weather": 20}
    assert leased == [{ids[0]}, set()], "nothing that is read may be deleted meanwhile"


def test_what_retention_removed_of_a_partition_that_had_no_history_is_an_error(
    cold_bucket: ColdBucket, run: Callable[..., ExportResult]
) -> None:
    topic_id = cold_bucket.add_topic("flights", [[batches(0, 20)], []])
    options = of_topic(cold_bucket, "flights")
    assert run(options).records == 20
    cold_bucket.add_topic("flights", [[], [batches(0, 20), batches(20, 20)]], drop_below=20, topic_id=topic_id)
    with pytest.raises(NotFound, match=r"flights-1: offsets 0\.\.20 were not exported yet"):
        run(options)
    assert run(options, allow_gaps=True).records == 20


def test_a_value_that_is_not_a_number_equals_itself(cold_bucket: ColdBucket, target: Path) -> None:
    """Arrow compares values as numbers, and NaN equals none: a complete file looked like a wrong one, at every attempt."""
    fastavro = pytest.importorskip("fastavro")
    schema = {
        "type": "record", "name": "reading",
        "fields": [{"name": "all", "type": {"type": "array", "items": ["null", "double"]}}, {"name": "last", "type": "float"}],
    }  # fmt: skip

    def reading(offset: int) -> bytes:
        written = io.BytesIO()
        last = float("nan") if offset % 2 else float(offset)
        fastavro.schemaless_writer(written, schema, {"all": [1.5, None, float("nan"), -0.0][: offset % 5], "last": last})
        return written.getvalue()

    records = [Record(offset=offset, timestamp_ms=1, key=None, value=reading(offset)) for offset in range(40)]
    cold_bucket.add_topic("flights", [[[bytes(build_batch(records[:25])), bytes(build_batch(records[25:]))]]])
    values = {"value_format": "avro", "value_schema": json.dumps(schema)}
    exporter = Exporter(cold_bucket, target, options_for(cold_bucket, splitBytes="100000000", **values))
    try:
        journal, plan = exporter.plan()
        journal.begin(plan)
        (written,) = exporter.write(exporter.tasks(plan, verify=True))
        assert exporter.write(exporter.tasks(plan)) == [written]
        path = target / written.key
        whole = pq.ParquetFile(path).read()
        rows = whole.to_pylist()
        rows[1]["value"]["last"] = 0.0
        pq.write_table(pa.Table.from_pylist(rows, whole.schema), path)
        with pytest.raises(Corrupt, match="does not hold the records"):
            exporter.write(exporter.tasks(plan))
    finally:
        exporter.close()
