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
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_pipeline.spark.metadata_reader import MetadataReader, PartitionsTask
from stratalog_pipeline.spark.reader import StratalogReader, TaskPartition

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


@pytest.mark.parametrize(
    "read",
    [
        lambda options: StratalogReader(options, ("offset",)).read(TaskPartition((), 0)),
        lambda options: MetadataReader(options, ("topic",)).read(PartitionsTask(())),
    ],
)
def test_each_reader_begins_a_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read: Callable[[ReadOptions], Iterator[pa.RecordBatch]]
) -> None:
    options = parse_options({"path": str(tmp_path), "subscribe": "t", "table": "segments"})
    frozen: list[bool] = []
    monkeypatch.setattr(task_process._Frozen, "modules", 0)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    assert (list(read(options)), frozen) == ([], [True])
