"""Implements Spark's readers: plans splits in the planner's process and yields Arrow record batches in the tasks.

Spark pickles a reader and sends it to the tasks, so it holds values only; every task opens the bucket itself. There are two
classes because Spark fails a query whose reader has ``pushFilters`` while pushdown is off, which is its default.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from stratalog_core.errors import Invalid
from stratalog_core.system import SystemClock
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import BrokerSplit, ColdEnd, Split, describe_missing_tail
from stratalog_pipeline.pruning import ANY_TIME, EVERYTHING, TimeRange
from stratalog_pipeline.read_lease import kept, write_lease
from stratalog_pipeline.scan_plan import plan_scan
from stratalog_pipeline.spark.filters import pruning_of
from stratalog_pipeline.task_process import begin_task
from stratalog_pipeline.value_formats.values import Values
from stratalog_tiering.cold.lease import SharedLease

_LOGGER: Final = logging.getLogger(__name__)


@dataclass
class TaskPartition(InputPartition):
    """The splits of one task, in order. Empty if there is nothing to read: Spark requires at least one partition.

    Records that expire after ``planned_ms`` are read: a task that Spark runs again must have the same rows.
    """

    splits: tuple[Split | BrokerSplit, ...]
    planned_ms: int
    lease: SharedLease | None = None


class StratalogReader(DataSourceReader):
    """Reads everything that the options select."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], values: Values | None = None) -> None:
        self._options = options
        self._columns = columns
        self._values = values
        self._pruning = EVERYTHING

    def partitions(self) -> list[InputPartition]:
        with Bucket(self._options.store, self._options.second_store) as bucket:
            begun_ms = SystemClock().wall_ms()
            plan = plan_scan(bucket, self._options, self._pruning)
            topic_ids = {split.name.topic_id for split in plan.splits}
            lease = write_lease(bucket, self._options, topic_ids, begun_ms)
        self._report(plan.cold_ends)
        return [TaskPartition(splits, begun_ms, lease) for splits in plan.tasks] or [TaskPartition((), begun_ms)]

    def _report(self, cold_ends: Sequence[ColdEnd]) -> None:
        """Tell the user that newer records may exist. Raises ``Invalid`` instead if the options ask for it."""
        if cold_ends and self._options.missing_tail == "fail":
            raise Invalid(describe_missing_tail(cold_ends))
        if cold_ends and self._options.missing_tail == "warn":
            _LOGGER.warning(describe_missing_tail(cold_ends))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(self._options, cast(TaskPartition, partition), self._columns, self._values, self._pruning.times)


def read_task(
    options: ReadOptions,
    task: TaskPartition,
    columns: tuple[str, ...],
    values: Values | None = None,
    times: TimeRange = ANY_TIME,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's splits: those in the bucket, then those at the brokers. ``values`` are decoded.

    With ``expiryHeader``, rows are left out whose records had expired when the task was planned.
    """
    begin_task()
    if values is None or not values.are_wanted(columns):
        yield from _unexpired_rows(options, task, columns, times)
    else:
        yield from values.columns(columns, _unexpired_rows(options, task, values.read_columns(columns), times))


def _unexpired_rows(
    options: ReadOptions, task: TaskPartition, columns: tuple[str, ...], times: TimeRange
) -> Iterator[pa.RecordBatch]:
    if not options.expiry_header:
        yield from _all_rows(options, task, columns, times)
        return
    from stratalog_pipeline.arrow.expiry import unexpired, with_headers

    rows = _all_rows(options, task, with_headers(columns), times)
    yield from unexpired(rows, columns, options.expiry_header, task.planned_ms)


def _all_rows(
    options: ReadOptions, task: TaskPartition, columns: tuple[str, ...], times: TimeRange
) -> Iterator[pa.RecordBatch]:
    # Imported in tasks only: numba costs a second, and Spark starts several processes before the first task.
    from stratalog_pipeline.arrow.messages import to_arrow
    from stratalog_pipeline.scan import scan_split

    cold = [split for split in task.splits if isinstance(split, Split)]
    if cold:
        with Bucket(options.store, options.second_store) as bucket, kept(bucket, task.lease):
            for split in cold:
                yield from scan_split(
                    bucket, split, columns, read_committed=options.read_committed, times=times,
                    skips_corrupt=options.skips_corrupt,
                )  # fmt: skip
    for hot in task.splits:
        if isinstance(hot, BrokerSplit):
            yield from to_arrow(Brokers(options).read(hot), columns)


class PushdownReader(StratalogReader):
    """A reader that also skips segments and blocks by pushed-down filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Prune by all filters and return them all for Spark to apply again: a block also holds unwanted rows."""
        self._pruning = pruning_of(filters)
        return filters
