"""The demo's unmodified Kafka client: sends all events while a broker is killed, replays them, and seeks by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from stratalog_demo.digest import Sent, SequenceDigest
from stratalog_demo.flights import Event

IDLE_S = 60.0
_CONSUME_RECORDS = 5_000
_CRITICAL = 2
"""librdkafka's log level: that the killed broker cannot be reached is what the demo shows, and not a problem."""


class DemoFailed(Exception):
    """A check failed; the message says which one and by how much."""


def send_all(bootstrap: str, topic: str, sent: Sent, half_way: Callable[[], None], progress: Callable[[int], None]) -> None:
    """Send every event (acks=all, idempotent, zstd); call ``half_way`` once. Raises ``DemoFailed`` on any lost delivery."""
    errors: list[KafkaError] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": "zstd",
            "linger.ms": 20,
            "batch.size": 262_144,
            "delivery.timeout.ms": 120_000,
            "log_level": _CRITICAL,
        }
    )

    def on_delivery(index: int) -> Callable[[KafkaError | None, Message], None]:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                sent.partition_of[index] = _place(message)[0]

        return delivered

    middle = len(sent.events) // 2
    for index, event in enumerate(sent.events):
        if index == middle:
            half_way()
        _send(producer, topic, event, on_delivery(index))
        if index % 1_000 == 0:
            progress(index)
    remaining = producer.flush(120.0)
    progress(len(sent.events))
    if errors or remaining:
        raise DemoFailed(f"the producer reported {len(errors)} errors ({errors[:1]}) and {remaining} undelivered events")


def _send(producer: Producer, topic: str, event: Event, on_delivery: Callable[[KafkaError | None, Message], None]) -> None:
    while True:
        try:
            producer.produce(
                topic,
                event.value,
                event.key,
                timestamp=event.timestamp_ms,
                headers=list(event.headers),
                on_delivery=on_delivery,
            )
        except BufferError:
            producer.poll(0.1)
        else:
            producer.poll(0)
            return


@dataclass(frozen=True, slots=True)
class Replay:
    """The records that a consumer saw: a digest per partition, and the number of records out of sequence."""

    digests: list[SequenceDigest]
    out_of_sequence: int


def replay_all(bootstrap: str, topic: str, partition_count: int, progress: Callable[[int], None]) -> Replay:
    """Read every partition from its earliest offset to its end."""
    digests = [SequenceDigest() for _ in range(partition_count)]
    out_of_sequence = 0
    consumer = _consumer(bootstrap)
    try:
        ends = _end_offsets(consumer, topic, partition_count)
        total = sum(ends)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partition_count)])
        for message in _messages(consumer, total):
            partition, offset = _place(message)
            digest = digests[partition]
            out_of_sequence += offset != digest.count
            digest.add(event_of(message))
            if offset % 500 == 0:
                progress(sum(one.count for one in digests))
        progress(total)
    finally:
        consumer.close()
    return Replay(digests, out_of_sequence)


def first_from(bootstrap: str, topic: str, partition_count: int, timestamp_ms: int) -> list[tuple[int, Event] | None]:
    """Return, per partition, the offset and event where a seek to ``timestamp_ms`` starts; None if there is none."""
    consumer = _consumer(bootstrap)
    try:
        wanted = [TopicPartition(topic, partition, timestamp_ms) for partition in range(partition_count)]
        found = consumer.offsets_for_times(wanted, timeout=30)
        return [_read_one(consumer, place) for place in found]
    finally:
        consumer.close()


def read_at(bootstrap: str, topic: str, partition: int, offset: int) -> Event:
    """Read one record. Raises ``KafkaException`` with the broker's error."""
    consumer = _consumer(bootstrap)
    try:
        found = _read_one(consumer, TopicPartition(topic, partition, offset))
    finally:
        consumer.close()
    assert found is not None
    return found[1]


def _read_one(consumer: Consumer, place: TopicPartition) -> tuple[int, Event] | None:
    if place.offset < 0:
        return None
    consumer.assign([place])
    message = next(_messages(consumer, 1))
    return _place(message)[1], event_of(message)


def _messages(consumer: Consumer, count: int) -> Iterator[Message]:
    seen = 0
    while seen < count:
        batch = consumer.consume(min(_CONSUME_RECORDS, count - seen), timeout=IDLE_S)
        if not batch:
            raise DemoFailed(f"no record arrived for {IDLE_S:.0f} s after {seen} of {count} records")
        for message in batch:
            error = message.error()
            if error is not None:
                raise KafkaException(error)
            yield message
        seen += len(batch)


def event_of(message: Message) -> Event:
    """Convert a consumed record to the form in which it was sent."""
    headers = tuple((name, _bytes(value)) for name, value in cast(list[tuple[str, str | bytes]], message.headers() or []))
    return Event(message.key(), _bytes(message.value()), message.timestamp()[1], headers)


def _bytes(content: str | bytes | None) -> bytes:
    if not isinstance(content, bytes):
        raise DemoFailed(f"read {content!r} instead of the bytes that were sent")
    return content


def _place(message: Message) -> tuple[int, int]:
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return partition, offset


def _end_offsets(consumer: Consumer, topic: str, partition_count: int) -> list[int]:
    return [
        consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)[1] for partition in range(partition_count)
    ]


def _consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "stratalog-demo",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "log_level": _CRITICAL,
        }
    )
