"""Markers of the exactly-once sink: what is written of a batch, and which run of the batch wrote it. Independent of Spark.

A *unit* is the part of a batch that one task writes. Its marker is an offset that is committed in the unit's own consumer
group: the offset is the batch number; the metadata holds the number of rows and their checksum. A *run* is one attempt of a
driver to write a batch; the tasks that Spark retries belong to the same run.

A run that splits the rows among its tasks in another way than the run before it would write some rows twice. So a batch is
*begun* by an offset in a group of the write, which names the first run, before its first row is written. The tasks of any
other run write nothing until, for each unit that is written already, its rows have been compared with those that its task has
now. Two runs at the same time, as after the death of a driver whose tasks go on, may escape this; ``check_compared`` reports
that when a run ends.

Brokers expire offsets some time after they were committed. A task without a marker writes only if none can have expired: the
batch's own record is older than all of its markers, and it is there and not too old, or it is the one of the batch before,
which this batch would have replaced before its first row. Nothing shows whether batch 0 was begun before if its record is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource

from stratalog_core.errors import Conflict, Corrupt, StratalogError, Unavailable
from stratalog_core.kafka_clients import retried
from stratalog_core.malformed import MALFORMED
from stratalog_core.system import SystemClock
from stratalog_pipeline.brokers import options_checked
from stratalog_pipeline.kafka_sink import REQUEST_S_MAX, WriteOptions

PREFIX: Final = "stratalog-sink-"
"""Prefix of transactional ids and of marker groups, so that one prefixed ACL covers all of them."""
DECIDE_S: Final = 120.0
"""Time limit for an earlier transaction to end, and for the reply to a commit."""
BEGIN_S: Final = 120.0
"""Time limit for a task to begin that must compare its rows, from the time at which another one did."""
LOOK_S: Final = 0.5
PROBED_BITS: Final = 6
"""The markers of the first 64 tasks are always looked for; those of tasks with longer numbers, if such tasks have begun."""
TASK_BITS_MAX: Final = 31
READS_AT_ONCE: Final = 16
TASKS_LISTED: Final = 10
RETENTION: Final = "offsets.retention.minutes"
RETENTION_MINUTES: Final = 7 * 24 * 60
"""The default of Kafka, for brokers that do not tell theirs."""
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
MARGIN_MS: Final = HOUR_MS
"""How much later one marker may expire than another of the same age: coordinators look for expired offsets every ten minutes,
and clocks differ."""
REMEDY: Final = (
    "Run it again split as before: by the same files, number of cores and spark.sql.shuffle.partitions; .repartition(8, 'key') "
    "before a write makes its split repeatable. Only if the split is the same and rows have changed, set markers=trusted: it "
    "leaves written tasks as they are"
)
Stored = TypeVar("Stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Task number ``task`` of batch number ``batch`` of a write. Batches are numbered from 0.

    ``run`` differs in each run of the batch; it is empty if there is only one.
    """

    write: str
    batch: int
    task: int
    run: str = ""

    @property
    def name(self) -> str:
        """The unit's transactional id and marker group. All batches share them, which bounds their number."""
        return f"{PREFIX}{self.write}-{self.task}"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch of which a unit's rows are written. ``checksum`` does not depend on the order of rows.

    ``run`` wrote the rows, or found them equal to its own; ``comparing`` is a run that has begun to compare them.
    """

    batch: int
    rows: int
    checksum: int
    run: str = ""
    comparing: str = ""


class _Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a marker that is stored as the metadata of its offset."""

    rows: int
    checksum: int
    run: str = ""
    comparing: str = ""


class _Begun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metadata: the first run of a batch and its wall time, and a later one in which all units of earlier runs are compared."""

    run: str
    compared: str = ""
    begun_ms: int = 0


def marker_offset(topic: str, marker: Marker) -> TopicPartition:
    """Return the offset that stores a marker."""
    stored = _Metadata(rows=marker.rows, checksum=marker.checksum, run=marker.run, comparing=marker.comparing)
    return TopicPartition(topic, 0, marker.batch, metadata=msgspec.json.encode(stored).decode())


@contextmanager
def consumer_of(options: WriteOptions, group: str) -> Iterator[Consumer]:
    """Open a consumer that never joins its group. Reading committed data, it waits until offsets are decided."""
    fixed = {"group.id": group, "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0}
    with options_checked():
        consumer = Consumer({**options.client, **fixed})
    try:
        yield consumer
    finally:
        consumer.close()


class Markers:
    """The markers of one write. Every method raises ``Unavailable`` if the brokers do not answer.

    A consumer for each group: the admin client of confluent-kafka 2.16 can end the process with a segmentation fault when it is
    asked for a group's offsets while the group has no coordinator yet.
    """

    def __init__(self, options: WriteOptions) -> None:
        assert options.topic is not None, "parse_write_options checks it"
        self._options = options
        self._topic = options.topic

    def read(self, unit: Unit) -> Marker | None:
        """Return the unit's newest marker. Raises ``Corrupt`` if something else uses its group."""
        return _marker(unit, self._committed(unit.name))

    def begin(self, unit: Unit) -> bool:
        """Record that the unit's run writes its batch. Return whether an earlier run has written some of it, uncompared.

        The unit has no marker of the batch. Raises ``Conflict`` if a later batch has begun or, unless the options trust
        markers, one may have expired: that of this unit, or of another that an earlier run wrote.
        """
        begun_group = _begun_group(unit.write, 0)
        begun = self._begin(begun_group, unit)
        # After the batch's own record, which must be the oldest.
        for group in _groups_of_longer(unit):
            self._begin(group, unit)
        if begun.offset < unit.batch:
            return False
        stored = _decoded(begun, begun_group, _Begun)
        return unit.run not in (stored.run, stored.compared)

    def _begin(self, group: str, unit: Unit) -> TopicPartition:
        """Return the offset of the group, after it has been set to the unit's batch if it was lower. Raises as `begin`."""
        with consumer_of(self._options, group) as consumer:
            found = _committed(consumer, self._topic)
            if group == _begun_group(unit.write, 0):
                self._check_order(unit, found, group)
            if found.offset < unit.batch:
                self._commit(consumer, unit.batch, _Begun(run=unit.run, begun_ms=SystemClock().wall_ms()))
        return found

    def _check_order(self, unit: Unit, begun: TopicPartition, group: str) -> None:
        """Raise ``Conflict`` unless the batch may be written after what was ``begun``, the newest batch of the write."""
        if begun.offset > unit.batch:
            raise Conflict(f"batch {begun.offset} of write {unit.write} has begun already; batch {unit.batch} comes before it")
        if self._options.trusts_markers:
            return
        if begun.offset == unit.batch:
            self._check_age(unit, _decoded(begun, group, _Begun))
        elif begun.offset != unit.batch - 1 and unit.batch:
            raise Conflict(
                f"there is no marker of batch {unit.batch - 1} of write {unit.write} with topic {self._topic}: it expired "
                f"({RETENTION} of the brokers), the topic was recreated, or earlier batches were written elsewhere or with "
                f"delivery=at-least-once. Batch {unit.batch} may be partly written. If it is not, or if duplicates are "
                "acceptable, continue with the option markers=trusted"
            )

    def _check_age(self, unit: Unit, begun: _Begun) -> None:
        """Raise ``Conflict`` if markers of the batch may have expired, although the older record of its begin has not."""
        age_ms = SystemClock().wall_ms() - begun.begun_ms if begun.begun_ms else 0
        if age_ms < MARGIN_MS:
            return
        retention_ms = self._retention_ms()
        if age_ms >= retention_ms - MARGIN_MS:
            raise Conflict(
                f"batch {unit.batch} of write {unit.write} was begun {age_ms // HOUR_MS} hours ago, and the brokers keep "
                f"markers for {retention_ms // HOUR_MS} hours ({RETENTION}): those of tasks that have written may be gone, and "
                f"their rows would be written again. If topic {self._topic} has no rows of the batch, or if duplicates are "
                "acceptable, continue with the option markers=trusted"
            )

    def _retention_ms(self) -> int:
        """How long the brokers keep committed offsets; the default of Kafka if they do not tell it."""
        with options_checked():
            admin = AdminClient({"log_level": 0, **self._options.client})

        def ask() -> Any:
            broker_id = next(iter(admin.list_topics(timeout=REQUEST_S_MAX).brokers))
            asked = ConfigResource(ConfigResource.Type.BROKER, str(broker_id))
            [answered] = admin.describe_configs([asked], request_timeout=REQUEST_S_MAX).values()
            return answered.result().get(RETENTION)

        try:
            found = retried(ask, DECIDE_S)
        except Unavailable:
            # Not the default then: theirs may be shorter, and rows would be written again.
            raise
        except StratalogError:
            found = None
        return int(found.value if found is not None and found.value else RETENTION_MINUTES) * MINUTE_MS

    def wait_until_compared(self, unit: Unit) -> None:
        """Wait until the rows of each unit that earlier runs wrote are compared with those of its task in this run.

        Raises ``Conflict`` if a task that must compare its rows does not begin: then there is no such task in this run.
        """
        before: Mapping[int, Marker] = {}
        deadline = time.monotonic() + BEGIN_S
        left = self._uncompared(unit, self._begun_tasks(unit))
        while left:
            if left != before or any(marker.comparing == unit.run for marker in left.values()):
                deadline = time.monotonic() + BEGIN_S
            elif time.monotonic() > deadline:
                raise Conflict(
                    f"{_listed(left)} of batch {unit.batch} of write {unit.write} wrote rows in an earlier run, and did not "
                    f"begin to compare them within {BEGIN_S:.0f} s: the batch is split into other tasks now, or there are too "
                    f"few cores to run them beside task {unit.task}, which has written nothing. {REMEDY}"
                )
            before = left
            time.sleep(LOOK_S)
            left = self._uncompared(unit, left)
        # Saves the other tasks from looking.
        begun_group = _begun_group(unit.write, 0)
        with consumer_of(self._options, begun_group) as consumer:
            begun = _committed(consumer, self._topic)
            if begun.offset == unit.batch:
                first = _decoded(begun, begun_group, _Begun)
                self._commit(consumer, unit.batch, msgspec.structs.replace(first, compared=unit.run))

    def check_compared(self, unit: Unit) -> None:
        """Raise ``Conflict`` if an earlier run wrote rows of the unit's batch that no task of this run has compared."""
        begun_group = _begun_group(unit.write, 0)
        begun = self._committed(begun_group)
        if begun.offset == unit.batch and _decoded(begun, begun_group, _Begun).run == unit.run:
            return
        left = self._uncompared(unit, self._begun_tasks(unit))
        if left:
            raise Conflict(
                f"{_listed(left)} of batch {unit.batch} of write {unit.write} wrote rows in an earlier run, and no task of this"
                " run has them: the batch is split into other tasks now, or its rows changed. Rows that this run wrote may be"
                f" in the topic twice. {REMEDY}"
            )

    def _begun_tasks(self, unit: Unit) -> list[int]:
        """Return the numbers of all tasks that may have written rows of the unit's batch."""
        longer = range(PROBED_BITS + 1, TASK_BITS_MAX + 1)
        begun = self._all_committed([_begun_group(unit.write, bits) for bits in longer])
        tasks = list(range(1 << PROBED_BITS))
        for bits, place in zip(longer, begun, strict=True):
            if place.offset == unit.batch:
                tasks += range(1 << bits - 1, 1 << bits)
        return tasks

    def _uncompared(self, unit: Unit, tasks: Iterable[int]) -> dict[int, Marker]:
        units = [Unit(write=unit.write, batch=unit.batch, task=task, run=unit.run) for task in tasks]
        places = self._all_committed([one.name for one in units])
        found = {one.task: _marker(one, place) for one, place in zip(units, places, strict=True)}
        return {
            task: marker
            for task, marker in found.items()
            if marker is not None and marker.batch == unit.batch and marker.run != unit.run
        }

    def _all_committed(self, groups: Sequence[str]) -> list[TopicPartition]:
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            return list(pool.map(self._committed, groups))

    def _committed(self, group: str) -> TopicPartition:
        with consumer_of(self._options, group) as consumer:
            return _committed(consumer, self._topic)

    def _commit(self, consumer: Consumer, batch: int, begun: _Begun) -> None:
        place = TopicPartition(self._topic, 0, batch, metadata=msgspec.json.encode(begun).decode())
        retried(lambda: _checked(consumer.commit(offsets=[place], asynchronous=False)), DECIDE_S)


def _committed(consumer: Consumer, topic: str) -> TopicPartition:
    return retried(lambda: _checked(consumer.committed([TopicPartition(topic, 0)], REQUEST_S_MAX)), DECIDE_S)


def _checked(answered: Sequence[TopicPartition] | None) -> TopicPartition:
    assert answered is not None, "a call that waits has an answer"
    [place] = answered
    if place.error is not None:
        # Not the same as no offset: then the rows would be written again.
        raise KafkaException(place.error)
    return place


def _begun_group(write: str, bits: int) -> str:
    """Return the group that names the first run of a batch; of tasks whose numbers have so many bits, unless ``bits`` is 0.

    The colon is in no name of a write, and so in no name of a unit.
    """
    return f"{PREFIX}{write}:begun" + (f"-{bits}" if bits else "")


def _groups_of_longer(unit: Unit) -> list[str]:
    bits = unit.task.bit_length()
    return [_begun_group(unit.write, bits)] if bits > PROBED_BITS else []


def _listed(left: Mapping[int, Marker]) -> str:
    numbers = sorted(left)
    more = f" and {len(numbers) - TASKS_LISTED} more" if len(numbers) > TASKS_LISTED else ""
    return f"task{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:TASKS_LISTED]))}{more}"


def _marker(unit: Unit, place: TopicPartition) -> Marker | None:
    if place.offset < 0:
        return None
    stored = _decoded(place, unit.name, _Metadata)
    return Marker(batch=place.offset, rows=stored.rows, checksum=stored.checksum, run=stored.run, comparing=stored.comparing)


def _decoded(place: TopicPartition, group: str, kind: type[Stored]) -> Stored:
    try:
        return msgspec.json.decode(place.metadata or "", type=kind)
    except MALFORMED as bad:
        raise Corrupt(f"the offset in group {group} is not a marker: {place.metadata!r}") from bad
