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
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's convention

from stratalog_core.errors import Invalid
from stratalog_pipeline.brokers import with_store
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.jobs.lease import reader_lease
from stratalog_pipeline.jobs.replay_checkpoint import Checkpoint, Plan
from stratalog_pipeline.jobs.replay_gaps import Gap, joined, readable
from stratalog_pipeline.jobs.session import make_directory, translated_errors
from stratalog_pipeline.kafka_sink import WriteOptions, check_topic, parse_write_options
from stratalog_pipeline.option_values import integer
from stratalog_pipeline.options import LATEST, AllAt, Assigned, PerPartition, ReadOptions, parse_options
from stratalog_pipeline.planning import READ_THE_REST, OffsetRange
from stratalog_pipeline.sink_markers import Markers, Unit
from stratalog_pipeline.sink_transactions import TRANSACTION_TIMEOUT_MS
from stratalog_pipeline.stream_plan import (
    Available,
    KnownTopics,
    Offsets,
    available,
    batch_bounds,
    new_offsets,
    next_end,
    wanted_ranges,
)

WINDOW_OFFSETS: Final = 1_000_000
RATED_SHARE: Final = 0.6
"""A window with a limited rate is sized so that one task can send all of it within this share of the transaction timeout."""
SOURCE_HEADER: Final = "stratalog.source"
ATTEMPTS_MAX: Final = 5
"""Plans of one window while retention goes on."""
SendWindow: TypeAlias = Callable[[int, Offsets, Offsets], tuple[int, list[Gap]]]
"""Sends a window with this number, between these positions; returns the number of its records, and what was left out."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """``records`` were sent by this run in ``windows`` windows, for ``offsets`` of the range from ``start`` to ``end``.

    ``gaps`` are parts of the range that retention had removed, also those that earlier runs left out.
    """

    start: Offsets
    end: Offsets
    records: int
    offsets: int
    windows: int
    was_resumed: bool
    gaps: tuple[Gap, ...] = ()


def replay(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    *,
    checkpoint: str | None = None,
    window_offsets: int = WINDOW_OFFSETS,
    bounds: str | None = None,
    allow_gaps: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay what ``source``, options of the data source, selects. ``on_progress`` gets offsets done and offsets in all.

    ``bounds`` are those of ``source`` as a user gave them, if it has what they come to now, such as the time seven days ago.
    ``allow_gaps`` leaves out what retention removed before the replay came to it. Raises ``Invalid`` otherwise, for a
    checkpoint of another replay, or if a topic was created again since the replay began, ``Conflict`` if one with the same
    checkpoint runs, and the errors of the source and the sink.
    """
    options = with_store(parse_options(source))
    given = _given_bounds(source) if bounds is None else bounds
    with Bucket(options.store, options.second_store) as bucket, reader_lease(bucket, options, "replay"):
        return _replay(spark, source, options, target, checkpoint, window_offsets, given, on_progress, allow_gaps=allow_gaps)


def _replay(
    spark: SparkSession,
    source: Mapping[str, str],
    options: ReadOptions,
    target: ReplayTarget,
    checkpoint: str | None,
    window_offsets: int,
    bounds: str,
    on_progress: Callable[[int, int], None],
    *,
    allow_gaps: bool,
) -> ReplayResult:
    def planned() -> Plan:
        topics = KnownTopics()
        plan = _planned(wanted_ranges(options, topics), target, window_offsets, spark.sparkContext.defaultParallelism)
        return msgspec.structs.replace(plan, bounds=bounds, topic_ids=dict(topics.ids))

    def send_of(plan: Plan) -> SendWindow:
        return _send_left(spark, source, options, target, plan) if allow_gaps else _send_all(spark, source, target, plan)

    if checkpoint is None:
        plan = planned()
        _check_plan(target, plan)
        return _run(send_of(plan), target, plan, None, on_progress, was_resumed=False)
    make_directory(checkpoint)
    with Bucket(checkpoint) as opened:
        log = Checkpoint(opened)
        begun = log.begun(_described(target), options.wanted, bounds)
        plan = begun or planned()
        _check_plan(target, plan)
        if begun is None:
            plan = log.begin(_begun_write(target, plan))
        return _run(send_of(plan), target, plan, log, on_progress, was_resumed=begun is not None)


def _planned(ranges: Available, target: ReplayTarget, window_offsets: int, parallelism: int) -> Plan:
    tasks = max(1, min(len(ranges), parallelism))
    if target.is_exactly_once and target.rows_per_s:
        # A window must be sent before its transactions time out. One task may have all records of it, at its part of the rate.
        timeout_ms = integer(target.client, "transaction.timeout.ms", TRANSACTION_TIMEOUT_MS, 1)
        window_offsets = max(1, min(window_offsets, int(target.rows_per_s / tasks * timeout_ms / 1000 * RATED_SHARE)))
    return Plan(
        write_id=str(uuid.uuid4()),
        start=_edges(ranges, lambda held: held.first),
        end=_edges(ranges, lambda held: held.end),
        target=_described(target),
        window_offsets=window_offsets,
        tasks=tasks,
    )


def _run(
    send: SendWindow,
    target: ReplayTarget,
    plan: Plan,
    log: Checkpoint | None,
    on_progress: Callable[[int, int], None],
    *,
    was_resumed: bool,
) -> ReplayResult:
    first, ranges = plan.start, plan.ranges
    position = log.position or first if log is not None else first
    total = new_offsets(first, ranges)
    before = total - new_offsets(position, ranges)
    records = windows = 0
    done = log.windows if log is not None else 0
    gaps = log.gaps if log is not None else []
    on_progress(before, total)
    while left := new_offsets(position, ranges):
        end = next_end(position, ranges, plan.window_offsets)
        with _remedy_of_replays():
            sent, found = send(done + windows, position, end)
        records += sent
        windows += 1
        position, gaps = end, joined([*gaps, *found])
        if log is not None:
            log.record(position, gaps)
        on_progress(total - new_offsets(position, ranges), total)
        assert new_offsets(position, ranges) < left, "a window has at least one offset"
    return ReplayResult(
        start=first,
        end=plan.end,
        records=records,
        offsets=total - before,
        windows=windows,
        was_resumed=was_resumed,
        gaps=tuple(gaps),
    )


def _check_plan(target: ReplayTarget, plan: Plan) -> None:
    check_targets(target, {topic: 1 + max(map(int, numbers)) for topic, numbers in plan.start.items()})


def _begun_write(target: ReplayTarget, plan: Plan) -> Plan:
    """Record with the sink's markers that the write of a plan has begun, before its first window, and return the plan.

    Nothing else would show that the markers of the first window have expired when it is sent again. Raises as `Markers.begin`.
    """
    if not target.is_exactly_once or not plan.start:
        return plan
    options = parse_write_options(_sink_options(target, plan, 0))
    Markers(options).begin(Unit(write=plan.write_id, batch=0, task=0, run=plan.write_id))
    return msgspec.structs.replace(plan, first_batch=1)


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


def _send_all(spark: SparkSession, source: Mapping[str, str], target: ReplayTarget, plan: Plan) -> SendWindow:
    """Return what sends a window whole."""

    def send(window: int, start: Offsets, end: Offsets) -> tuple[int, list[Gap]]:
        return _send_window(spark, source, target, plan, window, *batch_bounds(start, end)), []

    return send


def _send_left(
    spark: SparkSession, source: Mapping[str, str], options: ReadOptions, target: ReplayTarget, plan: Plan
) -> SendWindow:
    """Return what sends that part of a window which retention has not removed."""
    partitions = {topic: tuple(sorted(map(int, numbers))) for topic, numbers in plan.end.items()}
    everything = replace(options, wanted=Assigned(partitions=partitions), end=AllAt(position=LATEST), fail_on_data_loss=True)
    if plan.topic_ids:
        everything = replace(everything, topic_ids=frozenset(plan.topic_ids.values()))

    def send(window: int, start: Offsets, end: Offsets) -> tuple[int, list[Gap]]:
        attempts = 0
        while True:
            firsts, ends, gaps = readable(available(everything), start, end)
            try:
                return _send_window(spark, source, target, plan, window, firsts, ends), gaps
            except Invalid as refused:
                # Retention went on before the window was planned; nothing of it is sent yet.
                attempts += 1
                if READ_THE_REST not in refused.message or attempts == ATTEMPTS_MAX:
                    raise

    return send


def _send_window(
    spark: SparkSession,
    source: Mapping[str, str],
    target: ReplayTarget,
    plan: Plan,
    window: int,
    firsts: PerPartition,
    ends: PerPartition,
) -> int:
    """Write window number ``window``, with the records between these offsets, and return their number."""
    reader = spark.read.format("stratalog").options(**_window_options(source, plan, firsts, ends))
    sent = Observation()
    with translated_errors():
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
    """Exchange the remedy for missing offsets by that of a replay."""
    try:
        yield
    except Invalid as refused:
        if READ_THE_REST not in refused.message:
            raise
        remedy = (
            "Continue without what retention removed by --allow-gaps, or begin another replay, with a checkpoint of its own, at"
            " a later offset or time"
        )
        raise Invalid(refused.message.replace(READ_THE_REST, remedy)) from refused


def _window_options(source: Mapping[str, str], plan: Plan, firsts: PerPartition, ends: PerPartition) -> dict[str, str]:
    """Return the options by which the source reads a window between these offsets."""
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


def _sink_options(target: ReplayTarget, plan: Plan, window: int) -> dict[str, str]:
    options = {f"kafka.{name}": text for name, text in target.to_client.items()}
    options["rowsPerSecond"] = str(target.rows_per_s / plan.tasks)
    if not target.is_exactly_once:
        return {**options, "delivery": "at-least-once"}
    markers = "trusted" if target.trusts_markers else "strict"
    # Rows name their topics. The markers of all tasks are kept with the first one.
    topic = _topic_of(target, min(plan.start))
    return {
        **options,
        "topic": topic,
        "writeId": plan.write_id,
        "writeBatch": str(plan.first_batch + window),
        "markers": markers,
    }


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
