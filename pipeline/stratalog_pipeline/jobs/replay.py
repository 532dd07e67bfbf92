"""Replay: records of the past, sent again to a topic, in windows of bounded size.

The range is decided at the start, so a replay ends by itself although records come in. Each partition's records are sent in
order. After a window is acknowledged, the position is recorded in the checkpoint; a replay that was interrupted goes on with
the window that was under way, whose records may then be there twice. Groups and topics that are read are not touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention

from stratalog_core.errors import Conflict, Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.session import clear_errors, make_directory
from stratalog_pipeline.kafka_sink import WriteOptions, check_topic
from stratalog_pipeline.options import ReadOptions, parse_options
from stratalog_pipeline.planning import OffsetRange
from stratalog_pipeline.stream_plan import Available, Offsets, batch_bounds, new_offsets, next_end, wanted_ranges

WINDOW_OFFSETS: Final = 1_000_000
SOURCE_HEADER: Final = "stratalog.source"
_DIGITS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """Where and how records are sent.

    ``topic`` may contain ``{topic}``, the name of the record's topic. ``shift_ms`` is added to original timestamps; None sends
    the time of sending. ``rows_per_s`` 0 means no limit. ``where`` is a condition in SQL over the source's columns.
    ``keeps_partitions``: to partitions of the same numbers, otherwise by key. ``marks``: with a header ``SOURCE_HEADER`` that
    tells topic, partition and offset.
    """

    bootstrap: str
    topic: str = "{topic}.replay"
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    shift_ms: int | None = 0
    rows_per_s: float = 0.0
    where: str | None = None
    keeps_partitions: bool = False
    marks: bool = False

    @property
    def to_client(self) -> dict[str, str]:
        """The options of the sink's client."""
        return {**self.client, "bootstrap.servers": self.bootstrap}


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The first object of a checkpoint: what is replayed."""

    start: Offsets
    end: Offsets
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """``records`` were sent by this run in ``windows`` windows, for ``offsets`` of the range from ``start`` to ``end``."""

    start: Offsets
    end: Offsets
    records: int
    offsets: int
    windows: int
    was_resumed: bool


def replay(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    *,
    checkpoint: str | None = None,
    window_offsets: int = WINDOW_OFFSETS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay what ``source``, options of the data source, selects. ``on_progress`` gets offsets done and offsets in all.

    Raises ``Invalid`` for a checkpoint of another replay, ``Conflict`` if one with the same checkpoint runs, and the errors of
    the source and the sink.
    """
    options = parse_options(source)
    with Bucket(options.store, options.second_store) as bucket, reader_lease(bucket, options, "replay"):
        return _replay(spark, source, options, target, checkpoint, window_offsets, on_progress)


def _replay(
    spark: SparkSession,
    source: Mapping[str, str],
    options: ReadOptions,
    target: ReplayTarget,
    checkpoint: str | None,
    window_offsets: int,
    on_progress: Callable[[int, int], None],
) -> ReplayResult:
    if checkpoint is None:
        return _run(spark, source, target, wanted_ranges(options), None, window_offsets, on_progress)
    make_directory(checkpoint)
    with Bucket(checkpoint) as opened:
        log = _Checkpoint(opened)
        ranges = log.begin(target) or log.create(wanted_ranges(options), target)
        return _run(spark, source, target, ranges, log, window_offsets, on_progress)


def _run(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    ranges: Available,
    log: _Checkpoint | None,
    window_offsets: int,
    on_progress: Callable[[int, int], None],
) -> ReplayResult:
    first = _edges(ranges, lambda held: held.first)
    for topic in first:
        check_topic(WriteOptions(topic=target.topic.replace("{topic}", topic), client=target.to_client))
    position = log.position or first if log is not None else first
    begun, total = position, new_offsets(first, ranges)
    before = total - new_offsets(position, ranges)
    records = windows = 0
    on_progress(before, total)
    while left := new_offsets(position, ranges):
        end = next_end(position, ranges, window_offsets)
        records += _send_window(spark, source, target, position, end)
        windows += 1
        position = end
        if log is not None:
            log.record(position)
        on_progress(total - new_offsets(position, ranges), total)
        assert new_offsets(position, ranges) < left, "a window has at least one offset"
    return ReplayResult(
        start=first,
        end=_edges(ranges, lambda held: held.end),
        records=records,
        offsets=total - before,
        windows=windows,
        was_resumed=begun != first,
    )


def _edges(ranges: Available, edge: Callable[[OffsetRange], int]) -> Offsets:
    edges: Offsets = {}
    for (topic, number), held in sorted(ranges.items()):
        edges.setdefault(topic, {})[number] = edge(held)
    return edges


def _send_window(spark: SparkSession, source: Mapping[str, str], target: ReplayTarget, start: Offsets, end: Offsets) -> int:
    """Send one window and return the number of its records, when each is acknowledged."""
    firsts, ends = batch_bounds(start, end)
    bounds = ("subscribe", "assign", "starting", "ending")
    chosen = {name: text for name, text in source.items() if not name.lower().startswith(bounds)}
    reader = spark.read.format("stratalog").options(
        **{
            **chosen,
            "assign": json.dumps({topic: list(numbers) for topic, numbers in ends.items()}),
            "startingOffsets": json.dumps(firsts),
            "endingOffsets": json.dumps(ends),
            "includeHeaders": "true",
            # The replay itself has one.
            "lease": "false",
        }
    )
    partitions = sum(map(len, ends.values()))
    tasks = min(partitions, spark.sparkContext.defaultParallelism)
    sent = Observation()
    with clear_errors():
        rows = reader.load()
        wanted = rows if target.where is None else rows.where(target.where)
        # One task for all records of a partition, in their order.
        in_order = wanted.repartition(tasks, "topic", "partition").sortWithinPartitions("topic", "partition", "offset")
        observed = _shaped(in_order, target).observe(sent, F.count(F.lit(1)).alias("records"))
        writer = observed.write.format("stratalog").mode("append")
        writer.options(
            **{f"kafka.{name}": text for name, text in target.to_client.items()},
            rowsPerSecond=str(target.rows_per_s / tasks),
        ).save()
        return int(sent.get["records"])


def _shaped(rows: DataFrame, target: ReplayTarget) -> DataFrame:
    """Return the columns of the sink."""
    parts: list[Column] = []
    for number, text in enumerate(target.topic.split("{topic}")):
        parts += [F.col("topic")] if number else []
        parts += [F.lit(text)] if text else []
    columns: list[Column] = [F.col("key"), F.col("value"), F.concat(*parts).alias("topic")]
    headers = F.col("headers")
    if target.marks:
        place = F.concat_ws("/", "topic", F.col("partition").cast("string"), F.col("offset").cast("string"))
        mark = F.array(F.struct(F.lit(SOURCE_HEADER).alias("key"), place.cast("binary").alias("value")))
        headers = F.concat(F.coalesce(headers, F.slice(mark, 1, 0)), mark)
    columns.append(headers.alias("headers"))
    if target.keeps_partitions:
        columns.append(F.col("partition"))
    if target.shift_ms is not None:
        columns.append((F.col("timestamp") + F.make_dt_interval(secs=F.lit(target.shift_ms / 1000))).alias("timestamp"))
    return rows.select(*columns)


class _Checkpoint:
    """Numbered objects: the first says what is replayed, each later one how far. Created only if absent."""

    def __init__(self, opened: Bucket) -> None:
        self._opened = opened
        self._keys = sorted(opened.run(_keys(opened)))
        self.position: Offsets | None = self._read(self._keys[-1], dict[str, dict[str, int]]) if len(self._keys) > 1 else None

    def begin(self, target: ReplayTarget) -> Available | None:
        """Return the ranges of the replay that was begun here; None if there is none. Raises ``Invalid`` for another one."""
        if not self._keys:
            return None
        begun: _Begun = self._read(self._keys[0], _Begun)
        if begun.target != _described(target):
            raise Invalid(
                f"the checkpoint is that of a replay to {begun.target}; use another checkpoint for {_described(target)}"
            )
        return {
            (topic, number): OffsetRange(first=begun.start[topic][number], end=end)
            for topic, numbers in begun.end.items()
            for number, end in numbers.items()
        }

    def create(self, ranges: Available, target: ReplayTarget) -> Available:
        start, end = _edges(ranges, lambda held: held.first), _edges(ranges, lambda held: held.end)
        self._put(_Begun(start=start, end=end, target=_described(target)))
        return ranges

    def record(self, position: Offsets) -> None:
        self._put(position)

    def _put(self, content: object) -> None:
        key = f"{len(self._keys):0{_DIGITS}}.json"
        try:
            self._opened.run(self._opened.store.put(key, [msgspec.json.encode(content)]))
        except Conflict:
            raise Conflict("another replay with the same checkpoint is running") from None
        self._keys.append(key)

    def _read(self, key: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(self._opened.run(self._opened.store.get(key)), type=kind)
        except MALFORMED as malformed:
            raise Corrupt(f"{key} is not of a replay's checkpoint: {malformed}", key=key) from malformed


async def _keys(opened: Bucket) -> list[str]:
    return [info.key async for info in opened.store.list("")]


def _described(target: ReplayTarget) -> str:
    return f"{target.topic} at {target.bootstrap}" + (f" where {target.where}" if target.where else "")
