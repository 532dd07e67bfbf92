"""Implements Spark's stream reader: batch after batch from the bucket, and from the brokers what is not offloaded yet.

A stream that starts years back is read from the bucket until it reaches the brokers' tail; each batch is planned like a batch
read, so only the source of the records changes. Spark records the end of each batch before it runs, and plans it
again from the same offsets after a failure; where the first batch begins is recorded with its end (``stream_plan.py``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Final, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import Matching, ReadOptions
from stratalog_pipeline.read_lease import write_lease
from stratalog_pipeline.scan_plan import ScanPlan
from stratalog_pipeline.spark.reader import TaskPartition, read_task
from stratalog_pipeline.stream_plan import (
    KnownTopics,
    Offsets,
    StoredTopics,
    available,
    check_no_loss,
    cut_at,
    first_offsets,
    is_set_back,
    new_offsets,
    next_end,
    plan_batch,
    with_start,
    without_start,
)
from stratalog_pipeline.value_formats.values import Values
from stratalog_tiering.cold.lease import SharedLease

_LOGGER: Final = logging.getLogger(__name__)
LEASED_TASKS_MIN: Final = 64
"""A batch with at least this many tasks (4 GiB by default) writes a lease: it may take long. Smaller ones save the request."""


class StratalogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what the options select, batch after batch."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], values: Values | None = None) -> None:
        self._options = options
        self._columns = columns
        self._values = values
        self._initial: Offsets | None = None
        self._target: Offsets | None = None
        self._latest: Offsets | None = None
        self._topics = KnownTopics()
        self._stored = StoredTopics()
        self._last_trigger_s = -math.inf

    def initialOffset(self) -> Offsets:  # noqa: N802 - Spark's name
        if not self._options.client and self._options.missing_tail != "ignore":
            _LOGGER.warning(
                "only the bucket is followed, so records appear when they are offloaded; set kafka.bootstrap.servers to read "
                "them from the brokers at once, or missingTail to ignore"
            )
        self._initial = first_offsets(self._options)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self._options.rows_per_trigger_max:
            return ReadMaxRows(self._options.rows_per_trigger_max)
        if self._options.rows_per_trigger_min:
            return ReadMinRows(self._options.rows_per_trigger_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = next_end({}, available(self._options), None)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802 - Spark's name
        """Return the end of the next batch; ``start`` for no batch yet. Raises ``Invalid`` if records were lost."""
        end = self._next_end(without_start(start)[0], limit)
        if end is None:
            return start
        return with_start(end, start) if start == self._initial else end

    def _next_end(self, start: Offsets, limit: ReadLimit) -> Offsets | None:
        """Return the end of the next batch; None for no batch yet."""
        found = available(self._options, self._topics, self._stored)
        self._latest = next_end({}, found, None)
        if self._options.fail_on_data_loss:
            check_no_loss(start, found)
        goes_back = is_set_back(start, found)
        if self._target is not None:
            found = cut_at(found, self._target, start)
        elif not goes_back and self._waits(new_offsets(start, found), limit):
            return None
        self._last_trigger_s = time.monotonic()
        if not goes_back and not new_offsets(start, found):
            return None
        end = next_end(start, found, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        # A topic that a pattern does not match any more is forgotten; one that is named may have been missing for a moment.
        return end if isinstance(self._options.wanted, Matching) else {**start, **end}

    def _waits(self, count: int, limit: ReadLimit) -> bool:
        """Return whether to wait for more new offsets. Spark's read limits have no maximum delay, so it is applied here.

        The first trigger never waits, as in Spark's Kafka source.
        """
        if isinstance(limit, ReadAllAvailable) or count >= self._options.rows_per_trigger_min:
            return False
        return time.monotonic() - self._last_trigger_s < self._options.trigger_delay_max_s

    def reportLatestOffset(self) -> Offsets | None:  # noqa: N802 - Spark's name
        """Return what was available when the last batch was planned, as Spark's Kafka source does: Spark asks after each."""
        return self._latest

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        topics = self._topics if self._options.fail_on_data_loss else None
        now_ms = SystemClock().wall_ms()
        until, begun = without_start(end)
        first = without_start(start)[0] if begun is None else begun
        plan = plan_batch(self._options, first, until, topics, self._stored)
        lease = self._lease(plan, now_ms) if len(plan.tasks) >= LEASED_TASKS_MIN else None
        return [TaskPartition(splits, now_ms, lease) for splits in plan.tasks]

    def _lease(self, plan: ScanPlan, begun_ms: int) -> SharedLease | None:
        with Bucket(self._options.store, self._options.second_store) as bucket:
            return write_lease(bucket, self._options, {split.name.topic_id for split in plan.splits}, begun_ms)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(self._options, cast(TaskPartition, partition), self._columns, self._values)
