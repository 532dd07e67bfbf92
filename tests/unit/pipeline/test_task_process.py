"""What tasks have loaded is not looked through by the garbage collections after them."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stratalog_pipeline import task_process
from stratalog_pipeline.bulk_sink import BulkOptions
from stratalog_pipeline.kafka_sink import WriteOptions
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_pipeline.spark.bulk_writer import BulkWriter
from stratalog_pipeline.spark.metadata_reader import MetadataReader, PartitionsTask
from stratalog_pipeline.spark.reader import StratalogReader, TaskPartition
from stratalog_pipeline.spark.writer import KafkaStreamWriter, KafkaWriter

_TASKS = """
import gc
from stratalog_pipeline.task_process import begin_task

begin_task()
first = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
begin_task()
second = gc.get_freeze_count()
import stratalog_pipeline.scan
begin_task()
print(first > 0, second == first, gc.get_freeze_count() > second + 1000)
"""


def test_objects_are_set_aside_when_modules_were_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", _TASKS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an item each time objects are set aside, beginning as in a new process."""
    times: list[bool] = []
    monkeypatch.setattr(task_process._Frozen, "modules", 0)
    monkeypatch.setattr(gc, "freeze", lambda: times.append(True))
    return times


@pytest.mark.parametrize(
    "read",
    [
        lambda options: StratalogReader(options, ("offset",)).read(TaskPartition((), 0)),
        lambda options: MetadataReader(options, ("topic",)).read(PartitionsTask(())),
    ],
)
def test_each_reader_begins_a_task(
    frozen: list[bool], tmp_path: Path, read: Callable[[ReadOptions], Iterator[pa.RecordBatch]]
) -> None:
    options = parse_options({"path": str(tmp_path), "subscribe": "t", "table": "segments"})
    assert (list(read(options)), frozen) == ([], [True])


@pytest.mark.parametrize("writer", [KafkaWriter, KafkaStreamWriter])
def test_each_writer_to_brokers_begins_a_task(
    frozen: list[bool], monkeypatch: pytest.MonkeyPatch, writer: type[KafkaWriter | KafkaStreamWriter]
) -> None:
    monkeypatch.setattr("stratalog_pipeline.spark.writer.send", lambda rows, options: len(frozen))
    sent = writer(WriteOptions(topic="t", client={})).write(iter(()))
    assert (getattr(sent, "rows", None), frozen) == (1, [True])


def test_the_writer_of_segments_begins_a_task(frozen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratalog_pipeline.spark.bulk_writer.begin", lambda options: None)
    monkeypatch.setattr("stratalog_pipeline.spark.bulk_writer.write_rows", lambda rows, options, reserved: len(frozen))
    options = BulkOptions(
        store="file:///nowhere", metadata=(), topic="t", partitions=1, codec=0, replication_factor=None, configs={},
        first_offsets=(0,),
    )  # fmt: skip
    written = BulkWriter(options).write(iter(()))
    assert (getattr(written, "segments", None), frozen) == (1, [True])
