"""What the stream reader tells Spark between batches, without a Spark session."""

from __future__ import annotations

from pyspark.sql.streaming.datasource import ReadMaxRows
from unit.pipeline.conftest import ColdBucket

from stratalog_core.batches.records import Record, build_batch
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.spark.stream_reader import StratalogStreamReader


def segment(first: int, count: int) -> list[bytes]:
    records = [Record(offset=offset, timestamp_ms=1000, key=None, value=b"v") for offset in range(first, first + count)]
    return [bytes(build_batch(records))]


def test_the_latest_offset_is_that_of_the_last_planned_batch(cold_bucket: ColdBucket) -> None:
    cold_bucket.add_topic("t", [[segment(0, 10)], [segment(0, 4)]])
    reader = StratalogStreamReader(parse_options({"path": cold_bucket.url, "subscribe": "t"}, "stream"), COLUMNS)
    assert reader.reportLatestOffset() is None
    start = {"t": {"0": 0, "1": 0}}
    end = reader.latestOffset(start, ReadMaxRows(7))
    assert end == {"t": {"0": 5, "1": 2}}
    assert reader.reportLatestOffset() == {"t": {"0": 10, "1": 4}}
    cold_bucket.extend("t", 0, segment(10, 5))
    # Spark asks after each batch: it must not read the bucket again.
    assert reader.reportLatestOffset() == {"t": {"0": 10, "1": 4}}
    reader.latestOffset(end, ReadMaxRows(7))
    assert reader.reportLatestOffset() == {"t": {"0": 15, "1": 4}}
