"""Implements Spark's writers, batch and stream: rows go to brokers, exactly once or at least once (``kafka_sink.py``)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from stratalog_pipeline.kafka_sink import WriteOptions, send
from stratalog_pipeline.sink_markers import Markers, Unit
from stratalog_pipeline.sink_transactions import end_transactions, send_once
from stratalog_pipeline.task_process import begin_task

_LOGGER: Final = logging.getLogger(__name__)
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Local properties of a stream's tasks. A restart from the checkpoint runs an unfinished batch with the same ids."""


@dataclass
class Sent(WriterCommitMessage):
    """The number of rows that a task sent; all of them are acknowledged. ``unit`` is the task's, if it writes exactly once."""

    rows: int
    unit: Unit | None = None


class KafkaWriter(DataSourceArrowWriter):
    """Writes a batch. Nothing is left to commit: each task's rows are committed when it ends.

    Without the option ``writeId`` the write is new each time, and exactly once while its driver lives.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._write_id = options.write_id or str(uuid.uuid4())
        # A write without a name is not run again, so nothing needs to be compared.
        self._run = str(uuid.uuid4()) if options.write_id else ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        begin_task()
        if not self._options.is_exactly_once:
            return Sent(send(iterator, self._options))
        unit = Unit(write=self._write_id, batch=self._options.write_batch, task=_task().partitionId(), run=self._run)
        return Sent(send_once(iterator, self._options, unit), unit)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Check what an earlier run wrote. Nothing is left to commit."""
        _check(messages, self._options)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._options.is_exactly_once:
            _end(messages, self._options, Unit(write=self._write_id, batch=self._options.write_batch, task=0))
        if self._options.write_id is not None:
            _warn(messages, "run it again with the same writeId to write the others")
        else:
            _warn(messages, "running it again writes them again, since it had no writeId")


class KafkaStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._run = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        begin_task()
        if not self._options.is_exactly_once:
            return Sent(send(iterator, self._options))
        task = _task()
        write, batch = _property(task, QUERY_ID), int(_property(task, BATCH_ID))
        unit = Unit(write=write, batch=batch, task=task.partitionId(), run=self._run)
        return Sent(send_once(iterator, self._options, unit), unit)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Check what an earlier run wrote. Nothing is left to commit."""
        _check(messages, self._options)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        units = _units(messages)
        if units:
            _end(messages, self._options, units[0])
        again = "writes only the others" if self._options.is_exactly_once else "writes them again"
        _warn(messages, f"the query's next run, from its checkpoint, {again}")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes in tasks"
    return task


def _property(task: TaskContext, name: str) -> str:
    value = task.getLocalProperty(name)
    assert value is not None, "Spark sets it for every batch of a stream"
    return value


def _units(messages: Sequence[WriterCommitMessage | None]) -> list[Unit]:
    return [message.unit for message in messages if isinstance(message, Sent) and message.unit is not None]


def _end(messages: Sequence[WriterCommitMessage | None], options: WriteOptions, one: Unit) -> None:
    """End the transactions of the tasks without a message, which are in the tasks' order; ``one`` is any unit of the write."""
    ended = [replace(one, task=task) for task, message in enumerate(messages) if message is None]
    end_transactions(options, ended)


def _check(messages: Sequence[WriterCommitMessage | None], options: WriteOptions) -> None:
    units = _units(messages)
    if units and units[0].run and not options.trusts_markers:
        Markers(options).check_compared(units[0])


def _warn(messages: Sequence[WriterCommitMessage | None], advice: str) -> None:
    rows = sum(message.rows for message in messages if isinstance(message, Sent))
    _LOGGER.warning("the write failed; the %d rows of tasks that ended are in the topic: %s", rows, advice)
