"""Replay: sends records from history to a topic again, in windows of bounded size.

The plan is fixed at the start: the range, so that a replay ends although new records arrive; the windows; and the tasks of a
window, each with all records of its partitions in order. After each window, the position is recorded in the checkpoint. An
interrupted replay continues with its current window by the recorded plan, so the sink recognizes tasks that are already
written. Source topics and their groups are only read.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention

from stratalog_core.errors import Conflict, Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.brokers import with_store
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.session import make_directory, translated_errors
from stratalog_pipeline.kafka_sink import WriteOptions, check_topic
from stratalog_pipeline.option_values import integer
from stratalog_pipeline.options import ReadOptions, Subscribed, Wanted, parse_options
from stratalog_pipeline.planning import READ_THE_REST, OffsetRange
from stratalog_pipeline.sink_transactions import TRANSACTION_TIMEOUT_MS
from stratalog_pipeline.stream_plan import (
    Available,
    KnownTopics,
    Offsets,
    batch_bounds,
    new_offsets,
    next_end,
    wanted_ranges,
)

WINDOW_OFFSETS: Final = 1_000_000
RATED_SHARE: Final = 0.6
"""A window with a limited rate is sized so that one task can send all of it within this share of the transaction timeout."""
SOURCE_HEADER: Final = "stratalog.source"
_DIGITS: Final = 10
_CHOICE: Final = ("subscribe", "assign")
_BOUNDS: Final = ("starting", "ending")
"""How the names of the options begin by which the source chooses partitions, and by which it bounds their offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTarget:
    """Where and how records are sent.

    ``topic`` may contain ``{topic}``, the name of the record's topic. ``shift_ms`` is added to original timestamps; None sends
    the time of sending. ``rows_per_s`` 0 means no limit. ``where`` is a condition in SQL over the source's columns.
    ``keeps_partitions``: records keep their partition numbers, otherwise the key decides. ``marks``: add ``SOURCE_HEADER`` with
    topic, partition and offset. ``is_exactly_once`` and ``trusts_markers``: see ``sink_transactions.py``.
    """

    bootstrap: str
    topic: str = "{topic}.replay"
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    shift_ms: int | None = 0
    rows_per_s: float = 0.0
    where: str | None = None
    keeps_partitions: bool = False
    marks: bool = False
    is_exactly_once: bool = True
    trusts_markers: bool = False

    @property
    def to_client(self) -> dict[str, str]:
        """The options of the sink's client."""
        return {**self.client, "bootstrap.servers": self.bootstrap}


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The first object of a checkpoint: what is replayed, in windows of how many offsets, by how many tasks.

    ``bounds``: how the range was given. Checkpoints of earlier releases lack it (None) and ``topic_ids``.
    """

    write_id: str
    start: Offsets
    end: Offsets
    target: str
    window_offsets: int
    tasks: int
    bounds: str | None = None
    topic_ids: dict[str, UUID] = {}

    @property
    def ranges(self) -> Available:
        return {
            (topic, number): OffsetRange(first=self.start[topic][number], end=end)
            for topic, numbers in self.end.items()
            for number, end in numbers.items()
        }


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
    bounds: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay what ``source``, options of the data source, selects. ``on_progress`` gets offsets done and offsets in all.

    ``bounds`` are those of ``source`` as a user gave them, if it has what they come to now, such as the time seven days ago.
    Raises ``Invalid`` for a checkpoint of another replay, or if a topic was created again since the replay began, ``Conflict``
    if one with the same checkpoint runs, and the errors of the source and the sink.
    """
    options = with_store(parse_options(source))
    given = _given_bounds(source) if bounds is None else bounds
    with Bucket(options.store, options.second_store) as bucket, reader_lease(bucket, options, "replay"):
        return _replay(spark, source, options, target, checkpoint, window_offsets, given, on_progress)


def _replay(
    spark: SparkSession,
    source: Mapping[str, str],
    options: ReadOptions,
    target: ReplayTarget,
    checkpoint: str | None,
    window_offsets: int,
    bounds: str,
    on_progress: Callable[[int, int], None],
) -> ReplayResult:
    def planned() -> _Plan:
        topics = KnownTopics()
        plan = _planned(wanted_ranges(options, topics), target, window_offsets, spark.sparkContext.defaultParallelism)
        return msgspec.structs.replace(plan, bounds=bounds, topic_ids=dict(topics.ids))

    if checkpoint is None:
        return _run(spark, source, target, planned(), None, on_progress, was_resumed=False)
    make_directory(checkpoint)
    with Bucket(checkpoint) as opened:
        log = _Checkpoint(opened)
        begun = log.begun(target, options.wanted, bounds)
        plan = begun or log.begin(planned())
        return _run(spark, source, target, plan, log, on_progress, was_resumed=begun is not None)


def _planned(ranges: Available, target: ReplayTarget, window_offsets: int, parallelism: int) -> _Plan:
    tasks = max(1, min(len(ranges), parallelism))
    if target.is_exactly_once and target.rows_per_s:
        # A window must be sent before its transactions time out. One task may have all records of it, at its part of the rate.
        timeout_ms = integer(target.client, "transaction.timeout.ms", TRANSACTION_TIMEOUT_MS, 1)
        window_offsets = max(1, min(window_offsets, int(target.rows_per_s / tasks * timeout_ms / 1000 * RATED_SHARE)))
    return _Plan(
        write_id=str(uuid.uuid4()),
        start=_edges(ranges, lambda held: held.first),
        end=_edges(ranges, lambda held: held.end),
        target=_described(target),
        window_offsets=window_offsets,
        tasks=tasks,
    )


def _run(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    plan: _Plan,
    log: _Checkpoint | None,
    on_progress: Callable[[int, int], None],
    *,
    was_resumed: bool,
) -> ReplayResult:
    first, ranges = plan.start, plan.ranges
    check_targets(target, {topic: 1 + max(map(int, numbers)) for topic, numbers in first.items()})
    position = log.position or first if log is not None else first
    total = new_offsets(first, ranges)
    before = total - new_offsets(position, ranges)
    records = windows = 0
    done = log.windows if log is not None else 0
    on_progress(before, total)
    while left := new_offsets(position, ranges):
        end = next_end(position, ranges, plan.window_offsets)
        records += _send_window(spark, source, target, plan, done + windows, position, end)
        windows += 1
        position = end
        if log is not None:
            log.record(position)
        on_progress(total - new_offsets(position, ranges), total)
        assert new_offsets(position, ranges) < left, "a window has at least one offset"
    return ReplayResult(
        start=first,
        end=plan.end,
        records=records,
        offsets=total - before,
        windows=windows,
        was_resumed=was_resumed,
    )


def check_targets(target: ReplayTarget, topics: Mapping[str, int]) -> None:
    """Raise ``NotFound`` unless the topics exist to which the records of ``topics`` are sent.

    The values are numbers of partitions, 0 if unknown: raises ``Invalid`` if records keep theirs, and a topic has fewer.
    """
    needed: dict[str, int] = {}
    for topic, partitions in topics.items():
        name = _topic_of(target, topic)
        needed[name] = max(needed.get(name, 0), partitions)
    for name, partitions in sorted(needed.items()):
        found = check_topic(WriteOptions(topic=name, client=target.to_client))
        if target.keeps_partitions and found < partitions:
            raise Invalid(
                f"topic {name!r} has {found} partitions, and records of {partitions} keep theirs: add partitions, or leave out"
                " --keep-partitions"
            )


def _edges(ranges: Available, edge: Callable[[OffsetRange], int]) -> Offsets:
    edges: Offsets = {}
    for (topic, number), held in sorted(ranges.items()):
        edges.setdefault(topic, {})[number] = edge(held)
    return edges


def _topic_of(target: ReplayTarget, topic: str) -> str:
    return target.topic.replace("{topic}", topic)


def _send_window(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    plan: _Plan,
    window: int,
    start: Offsets,
    end: Offsets,
) -> int:
    """Write window number ``window``, and return the number of its records."""
    reader = spark.read.format("stratalog").options(**_window_options(source, plan, start, end))
    sent = Observation()
    with _remedy_of_replays(), translated_errors():
        rows = reader.load()
        wanted = rows if target.where is None else rows.where(target.where)
        # One task for all records of a partition, in their order.
        in_order = wanted.repartition(plan.tasks, "topic", "partition").sortWithinPartitions("topic", "partition", "offset")
        observed = _shaped(in_order, target).observe(sent, F.count(F.lit(1)).alias("records"))
        writer = observed.write.format("stratalog").mode("append")
        writer.options(**_sink_options(target, plan, window)).save()
        return int(sent.get["records"])


@contextmanager
def _remedy_of_replays() -> Iterator[None]:
    """Exchange the remedy for missing offsets: a replay cannot leave out a part of its range."""
    try:
        yield
    except Invalid as refused:
        if READ_THE_REST not in refused.message:
            raise
        remedy = "Begin another replay, with a checkpoint of its own, at a later offset or time"
        raise Invalid(refused.message.replace(READ_THE_REST, remedy)) from refused


def _window_options(source: Mapping[str, str], plan: _Plan, start: Offsets, end: Offsets) -> dict[str, str]:
    """Return the options by which the source reads a window."""
    firsts, ends = batch_bounds(start, end)
    chosen = {name: text for name, text in source.items() if not name.lower().startswith((*_CHOICE, *_BOUNDS))}
    if plan.topic_ids:
        # Offsets mean nothing in a topic that was created again, so not by name.
        chosen = {name: text for name, text in chosen.items() if name.lower() != "topicids"}
        chosen["topicIds"] = ",".join(str(plan.topic_ids[topic]) for topic in ends)
    return {
        **chosen,
        "assign": json.dumps({topic: list(numbers) for topic, numbers in ends.items()}),
        "startingOffsets": json.dumps(firsts),
        "endingOffsets": json.dumps(ends),
        "includeHeaders": "true",
        # The replay itself has one.
        "lease": "false",
    }


def _given_bounds(source: Mapping[str, str]) -> str:
    given = sorted((name.lower(), text) for name, text in source.items() if name.lower().startswith(_BOUNDS))
    return ", ".join(f"{name} {text}" for name, text in given)


def _sink_options(target: ReplayTarget, plan: _Plan, window: int) -> dict[str, str]:
    options = {f"kafka.{name}": text for name, text in target.to_client.items()}
    options["rowsPerSecond"] = str(target.rows_per_s / plan.tasks)
    if not target.is_exactly_once:
        return {**options, "delivery": "at-least-once"}
    markers = "trusted" if target.trusts_markers else "strict"
    # Rows name their topics. The markers of all tasks are kept with the first one.
    topic = _topic_of(target, min(plan.start))
    return {**options, "topic": topic, "writeId": plan.write_id, "writeBatch": str(window), "markers": markers}


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
        shifted = F.col("timestamp") + F.make_dt_interval(secs=F.lit(target.shift_ms / 1000))
        # A record without a timestamp has none after a shift, either.
        columns.append(F.when(F.unix_micros("timestamp") < 0, F.col("timestamp")).otherwise(shifted).alias("timestamp"))
    return rows.select(*columns)


class _Checkpoint:
    """Numbered objects: the first is the plan, each later one the position after a window. Created only if absent."""

    def __init__(self, opened: Bucket) -> None:
        self._opened = opened
        self._keys = sorted(opened.run(_keys(opened)))
        self.position: Offsets | None = self._read(self._keys[-1], dict[str, dict[str, int]]) if len(self._keys) > 1 else None

    @property
    def windows(self) -> int:
        """The number of windows that are written."""
        return len(self._keys) - 1

    def begun(self, target: ReplayTarget, wanted: Wanted, bounds: str) -> _Plan | None:
        """Return the recorded plan, or None. Raises ``Invalid`` if it is the plan of another replay."""
        if not self._keys:
            return None
        begun: _Plan = self._read(self._keys[0], _Plan)
        if begun.target != _described(target):
            raise Invalid(
                f"the checkpoint belongs to a replay to {begun.target}; use another checkpoint for {_described(target)}"
            )
        # A pattern may match other topics now.
        if isinstance(wanted, Subscribed) and set(wanted.topics) != begun.start.keys():
            topics, others = ", ".join(sorted(begun.start)), ", ".join(sorted(wanted.topics))
            raise Invalid(f"the checkpoint belongs to a replay of {topics}; use another checkpoint for {others}")
        if begun.bounds not in (None, bounds):
            raise Invalid(
                f"the checkpoint belongs to a replay of {begun.bounds or 'everything'}; use another checkpoint for "
                f"{bounds or 'everything'}"
            )
        return begun

    def begin(self, plan: _Plan) -> _Plan:
        self._put(plan)
        return plan

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
            raise Corrupt(f"{key} is not an object of a replay's checkpoint: {malformed}", key=key) from malformed


async def _keys(opened: Bucket) -> list[str]:
    return [info.key async for info in opened.store.list("")]


def _described(target: ReplayTarget) -> str:
    """Return in words everything that decides what is sent, without defaults."""
    condition = f" where {target.where}" if target.where else ""
    unusual = (
        (not target.is_exactly_once, "at least once"),
        (target.shift_ms is None, "with the time of sending"),
        (bool(target.shift_ms), f"shifted by {target.shift_ms} ms"),
        (target.keeps_partitions, "to the same partitions"),
        (target.marks, f"with header {SOURCE_HEADER}"),
    )
    return ", ".join([f"{target.topic} at {target.bootstrap}{condition}", *(words for holds, words in unusual if holds)])
