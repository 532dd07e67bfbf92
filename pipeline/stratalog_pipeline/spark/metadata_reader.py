"""Implements Spark's reader of the metadata tables (``metadata_tables.py``): a task for every few partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.metadata_tables import read_table
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import PartitionName
from stratalog_pipeline.scan_plan import wanted_partitions
from stratalog_pipeline.task_process import begin_task

PARTITIONS_PER_TASK: Final = 16


@dataclass
class PartitionsTask(InputPartition):
    """The partitions of one task; none if there is nothing to read."""

    names: tuple[PartitionName, ...]


class MetadataReader(DataSourceReader):
    """Reads one metadata table."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        with Bucket(self._options.store, self._options.second_store) as bucket:
            names = wanted_partitions(bucket, self._options)
        firsts = range(0, len(names), PARTITIONS_PER_TASK)
        return [PartitionsTask(tuple(names[first : first + PARTITIONS_PER_TASK])) for first in firsts] or [PartitionsTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        begin_task()
        yield from read_table(self._options, cast(PartitionsTask, partition).names, self._columns)
