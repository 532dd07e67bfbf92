"""Implements Spark's writers, batch and stream: rows go to brokers, each at least once (``kafka_sink.py``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from stratalog_pipeline.kafka_sink import WriteOptions, send

_LOGGER: Final = logging.getLogger(__name__)


@dataclass
class Sent(WriterCommitMessage):
    """The number of rows that a task sent; all of them are acknowledged."""

    rows: int


class KafkaWriter(DataSourceArrowWriter):
    """Writes a batch. Nothing is left to commit: brokers have acknowledged every row when its task ends."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Sent(send(iterator, self._options))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _warn(messages)


class KafkaStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream. A batch that is run again is sent again."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Sent(send(iterator, self._options))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing to do: every row is acknowledged."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _warn(messages)


def _warn(messages: Sequence[WriterCommitMessage | None]) -> None:
    rows = sum(message.rows for message in messages if isinstance(message, Sent))
    _LOGGER.warning(
        "the write failed; the %d rows of tasks that ended are in the topic, and some of the others may be: rows are written "
        "at least once, so running it again writes them again",
        rows,
    )
