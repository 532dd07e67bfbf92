"""Implements Spark's batch writer for the bulk sink: tasks write segments, one commit attaches them (``bulk_sink.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from stratalog_pipeline.bulk_sink import BulkOptions, Written, abandon, begin, commit, write_rows
from stratalog_pipeline.task_process import begin_task


@dataclass
class WrittenSegments(WriterCommitMessage):
    """The segments of one task."""

    segments: Written


class BulkWriter(DataSourceArrowWriter):
    """Writes a new topic. Creating one reserves the topic's id."""

    def __init__(self, options: BulkOptions) -> None:
        self._options = options
        self._reserved = begin(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        begin_task()
        return WrittenSegments(write_rows(iterator, self._options, self._reserved))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        tasks = [message.segments for message in messages if isinstance(message, WrittenSegments)]
        commit(self._options, self._reserved, tasks)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abandon(self._options, self._reserved)
