"""Markers of the exactly-once sink that have expired: what they would say is unknown, so nothing is written. No brokers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from stratalog_core.errors import Conflict, Unavailable
from stratalog_pipeline import sink_markers, sink_transactions
from stratalog_pipeline.jobs.replay import ReplayTarget, _begun_write, _planned, _sink_options
from stratalog_pipeline.kafka_sink import parse_write_options
from stratalog_pipeline.planning import OffsetRange
from stratalog_pipeline.sink_markers import Unit
from stratalog_pipeline.sink_transactions import send_once

SERVERS: Final = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}
STRICT = parse_write_options(SERVERS)
TRUSTING = parse_write_options({**SERVERS, "markers": "trusted"})
MINUTE_MS: Final = 60_000
DAY_MS: Final = 24 * 60 * MINUTE_MS
FIRST = Unit(write="w", batch=0, task=0, run="first")


@dataclass
class Brokers:
    """Committed offsets by group, each with its time, and the committed rows. ``retention_minutes`` None: it is not told.

    ``lost``: so many times the connection is lost while they are asked for it.
    """

    now_ms: int = 1_000 * DAY_MS
    retention_minutes: int | None = 7 * 24 * 60
    offsets: dict[str, tuple[TopicPartition, int]] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    described: int = 0
    lost: int = 0

    def commit(self, group: str, place: TopicPartition) -> None:
        self.offsets[group] = place, self.now_ms

    def expire(self, *, older_than_ms: int, but: Sequence[str] = ()) -> None:
        """Remove the offsets of this age, as each coordinator does when it looks for them; ``but``: it has not looked yet."""
        for group, (_, at_ms) in [*self.offsets.items()]:
            if self.now_ms - at_ms >= older_than_ms and group not in but:
                del self.offsets[group]

    def wall_ms(self) -> int:
        return self.now_ms


class FakeConsumer:
    def __init__(self, brokers: Brokers, config: Mapping[str, Any]) -> None:
        self._brokers = brokers
        self._group = config["group.id"]

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        held = self._brokers.offsets.get(self._group)
        return [held[0] if held is not None else TopicPartition("t", 0, -1001)]

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition]:
        self._brokers.commit(self._group, offsets[0])
        return offsets

    def consumer_group_metadata(self) -> str:
        return str(self._group)

    def close(self) -> None: ...


class FakeProducer:
    def __init__(self, brokers: Brokers, config: Mapping[str, Any]) -> None:
        self._brokers = brokers
        self._rows: list[bytes] = []
        self._marker: tuple[str, TopicPartition] | None = None

    def init_transactions(self, timeout: float) -> None: ...

    def begin_transaction(self) -> None: ...

    def produce(self, *, value: bytes, **rest: Any) -> None:
        self._rows.append(value)

    def poll(self, timeout: float) -> None: ...

    def flush(self, timeout: float) -> int:
        return 0

    def send_offsets_to_transaction(self, places: list[TopicPartition], group: str, timeout: float) -> None:
        self._marker = group, places[0]

    def commit_transaction(self, timeout: float) -> None:
        assert self._marker is not None
        self._brokers.rows += self._rows
        self._brokers.commit(*self._marker)


class FakeAdmin:
    def __init__(self, brokers: Brokers, config: Mapping[str, Any]) -> None:
        self._brokers = brokers

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(brokers={5: "a broker"})

    def describe_configs(self, resources: Sequence[Any], request_timeout: float) -> Mapping[Any, Any]:
        self._brokers.described += 1
        return {resources[0]: self}

    def result(self) -> Mapping[str, Any]:
        if self._brokers.lost:
            self._brokers.lost -= 1
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        minutes = self._brokers.retention_minutes
        if minutes is None:
            raise KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
        return {"offsets.retention.minutes": SimpleNamespace(value=str(minutes))}


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    made = Brokers()
    monkeypatch.setattr(sink_markers, "BEGIN_S", 0.1)
    monkeypatch.setattr(sink_markers, "LOOK_S", 0.01)
    monkeypatch.setattr(sink_markers, "Consumer", partial(FakeConsumer, made))
    monkeypatch.setattr(sink_markers, "AdminClient", partial(FakeAdmin, made))
    monkeypatch.setattr(sink_transactions, "Producer", partial(FakeProducer, made))
    monkeypatch.setattr(sink_markers, "SystemClock", lambda: made)
    return made


def rows_of(unit: Unit) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"value": pa.array([f"{unit.batch}-{unit.task}"])})


def write(unit: Unit, options: Any = STRICT) -> int:
    return send_once(rows_of(unit), options, unit)


def interrupted_batch(brokers: Brokers, batch: int) -> Unit:
    """Batches up to ``batch``, of which the last one is interrupted: task 3 writes, and ten minutes later task 0."""
    for number in range(batch):
        write(replace(FIRST, batch=number))
    for task in (3, 0):
        write(replace(FIRST, batch=batch, task=task))
        brokers.now_ms += 10 * MINUTE_MS
    return Unit(write="w", batch=batch, task=3, run="second")


def test_a_marker_that_expires_before_that_of_task_0_is_not_taken_for_a_task_that_has_not_written(brokers: Brokers) -> None:
    """Task 0 was the witness that no marker has expired, although it may have written after the others."""
    unit = interrupted_batch(brokers, 2)
    brokers.now_ms += 7 * DAY_MS - 15 * MINUTE_MS
    brokers.expire(older_than_ms=7 * DAY_MS)
    assert "stratalog-sink-w-0" in brokers.offsets
    assert unit.name not in brokers.offsets
    before = [*brokers.rows]
    with pytest.raises(Conflict, match=r"there is no marker of batch 1 of write w .* markers=trusted"):
        write(unit)
    with pytest.raises(Conflict, match="no marker of batch 1"):
        write(replace(unit, task=4))
    assert brokers.rows == before
    assert write(unit, TRUSTING) == 1, "the user has looked"
    assert write(replace(unit, batch=3)) == 1, "the next batch has a witness again"


@pytest.mark.parametrize("batch", [0, 2])
def test_a_coordinator_that_expires_offsets_late_is_no_witness(brokers: Brokers, batch: int) -> None:
    """Each one looks every ten minutes only, so the older offset may be there although the younger one is gone."""
    unit = interrupted_batch(brokers, batch)
    brokers.now_ms += 7 * DAY_MS - 15 * MINUTE_MS
    brokers.expire(older_than_ms=7 * DAY_MS - MINUTE_MS, but=["stratalog-sink-w:begun", "stratalog-sink-w-0"])
    before = [*brokers.rows]
    with pytest.raises(Conflict, match=rf"batch {batch} of write w was begun 168 hours ago.* 168 hours .*markers=trusted"):
        write(unit)
    assert brokers.rows == before
    assert write(unit, TRUSTING) == 1


@pytest.mark.parametrize(
    ("retention_minutes", "hours", "is_refused"),
    [
        (7 * 24 * 60, 160, False),
        (24 * 60, 22, False),
        (24 * 60, 23, True),
        (None, 160, False),
        (None, 167, True),
        (30 * 24 * 60, 400, False),
    ],
)
def test_markers_count_while_the_brokers_keep_them(
    brokers: Brokers, retention_minutes: int | None, hours: int, is_refused: bool
) -> None:
    """Of brokers that do not tell how long they keep offsets, Kafka's default is assumed."""
    brokers.retention_minutes = retention_minutes
    write(replace(FIRST, batch=0, task=0))
    brokers.now_ms += hours * 60 * MINUTE_MS
    again = replace(FIRST, run="second", task=1)
    assert write(replace(again, task=0)) == 1, "its marker is there"
    if is_refused:
        with pytest.raises(Conflict, match="was begun"):
            write(again)
    else:
        assert write(again) == 1


def test_a_lost_connection_is_not_taken_for_brokers_that_do_not_tell(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's default may be longer than what they keep, and the rows would be written twice."""
    brokers.retention_minutes = 24 * 60
    write(FIRST)
    write(replace(FIRST, task=1))
    brokers.now_ms += 30 * 60 * MINUTE_MS
    brokers.expire(older_than_ms=DAY_MS, but=["stratalog-sink-w:begun"])
    again = replace(FIRST, run="second", task=1)
    before = [*brokers.rows]
    brokers.lost = 1
    with pytest.raises(Conflict, match="was begun 30 hours ago, and the brokers keep markers for 24 hours"):
        write(again)
    monkeypatch.setattr(sink_markers, "DECIDE_S", 0.0)
    brokers.lost = 1
    with pytest.raises(Unavailable):
        write(again)
    assert brokers.rows == before


def test_brokers_are_asked_only_after_a_long_interruption(brokers: Brokers) -> None:
    unit = interrupted_batch(brokers, 1)
    assert write(unit) == 1
    assert write(replace(unit, batch=2)) == 1
    brokers.now_ms += 30 * DAY_MS
    assert write(replace(unit, batch=3)) == 1, "nothing of batch 3 was begun: that would have replaced the record of batch 2"
    assert brokers.described == 0


def test_comparing_an_old_batch_does_not_make_it_young(brokers: Brokers) -> None:
    """A run that has compared the batch records that, and the time at which the batch was begun stays."""
    unit = interrupted_batch(brokers, 1)
    for task in (3, 0, 1):
        assert write(replace(unit, task=task)) == 1
    brokers.now_ms += 7 * DAY_MS - 30 * MINUTE_MS
    with pytest.raises(Conflict, match="was begun"):
        write(replace(unit, task=5, run="third"))


def test_the_first_window_of_a_replay_is_not_sent_again_when_its_markers_have_expired(brokers: Brokers) -> None:
    """The first batch of another write has no batch before it that could tell."""
    ranges = {("t", "0"): OffsetRange(first=0, end=9)}
    target = ReplayTarget(bootstrap="127.0.0.1:1", topic="t")
    plan = _begun_write(target, _planned(ranges, target, 5, 1))
    options = parse_write_options(_sink_options(target, plan, 0))
    unit = Unit(write=plan.write_id, batch=options.write_batch, task=0, run="first")
    assert write(unit, options) == 1
    assert write(replace(unit, run="second"), options) == 1, "it is written"
    brokers.now_ms += 8 * DAY_MS
    brokers.expire(older_than_ms=7 * DAY_MS)
    with pytest.raises(Conflict, match="there is no marker of batch 0"):
        write(replace(unit, run="third"), options)
    assert brokers.rows == ["1-0"]
    assert _begun_write(replace(target, is_exactly_once=False), plan) == plan
    assert parse_write_options(_sink_options(target, plan, 7)).write_batch == 8
