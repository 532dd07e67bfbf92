"""Reads of the part of a topic that is not in the bucket yet, from the brokers, by an unmodified Kafka client.

The client joins no group and commits nothing. It checks every batch's CRC. Always: reads only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from stratalog_core.errors import Corrupt, Invalid, NotFound, Unavailable
from stratalog_core.kafka_clients import CHECK_CLUSTER, as_ours, list_offsets, retried, translated, uuid_of
from stratalog_pipeline.options import ReadOptions, Subscribed, Wanted
from stratalog_pipeline.planning import BrokerSplit, OffsetRange, PartitionName, is_wanted
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.store.store_url import STORE_URL_CONFIG

REQUEST_S_MAX: Final = 30.0
MESSAGES_AT_ONCE: Final = 100
BYTES_AT_ONCE: Final = 32 * 1024 * 1024
"""Limits of one call to the client, beside its queue. Bytes are estimated by the largest message of the call before."""
WAIT_S: Final = 0.5
_READ_ONLY: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
}


class Brokers:
    """One cluster as the options of a read name it. Connects for each call; keeps no connection between calls."""

    def __init__(self, options: ReadOptions) -> None:
        self._client: dict[str, Any] = {"log_level": 0, **options.client}
        self._level = "read_committed" if options.read_committed else "read_uncommitted"
        self._poll_timeout_s = options.poll_timeout_s
        self._request_s = min(REQUEST_S_MAX, options.poll_timeout_s)

    def topics(self, wanted: Wanted) -> list[TopicDescriptor]:
        """Return the wanted topics that the brokers serve. Raises ``Unavailable``, or ``Invalid`` for an unusable option."""
        described = retried(lambda: self._described(wanted), self._request_s)
        return [
            TopicDescriptor(
                topic_id=uuid_of(topic.topic_id),
                name=topic.name,
                partition_count=len(topic.partitions),
                replication_factor=len(topic.partitions[0].replicas),
            )
            for topic in described
            if topic is not None
        ]

    def _described(self, wanted: Wanted) -> list[Any]:
        client = self._admin()
        # Lists all topics, because asking for one by name would create it.
        names = [name for name in client.list_topics(timeout=self._request_s).topics if is_wanted(wanted, name)]
        if not names:
            return []
        futures = client.describe_topics(TopicCollection(names), request_timeout=self._request_s)
        return [_unless_deleted(future, self._request_s) for future in futures.values()]

    def store_url(self) -> str:
        """Return the URL of the object store that these brokers read. Raises ``Invalid`` if they do not tell one."""

        def ask() -> tuple[int, Any]:
            client = self._admin()
            broker = next(iter(client.list_topics(timeout=self._request_s).brokers))
            resource = ConfigResource(ConfigResource.Type.BROKER, str(broker))
            future = client.describe_configs([resource], request_timeout=self._request_s)[resource]
            return broker, _answer(future, self._request_s).get(STORE_URL_CONFIG)

        broker, found = retried(ask, self._request_s)
        if found is None or not found.value:
            raise Invalid(
                f"broker {broker} has no config {STORE_URL_CONFIG}, so it is not Stratalog's, or older: give option 'store',"
                " such as file:///dir or s3://bucket/prefix"
            )
        return str(found.value)

    def limits(self, names: Iterable[PartitionName]) -> dict[PartitionName, OffsetRange]:
        """Return the available offsets of each partition, up to the last stable offset if only committed records are read."""
        wanted = list(names)
        firsts = self._offsets(dict.fromkeys(wanted, OffsetSpec.earliest()))
        ends = self._offsets(dict.fromkeys(wanted, OffsetSpec.latest()))
        return {name: OffsetRange(first=firsts[name], end=max(firsts[name], ends[name])) for name in wanted}

    def served_limits(self, wanted: Wanted, names: Iterable[PartitionName]) -> dict[PartitionName, OffsetRange]:
        """Return the limits of those partitions that the brokers serve; some topics may be only in the bucket."""
        served = {topic.topic_id for topic in self.topics(wanted)}
        return self.limits(name for name in names if name.topic_id in served)

    def offsets_at(self, timestamps_ms: Mapping[PartitionName, int]) -> dict[PartitionName, int | None]:
        """Return each partition's first record at or after the given time; None if there is none."""
        found = self._offsets({name: OffsetSpec.for_timestamp(time_ms) for name, time_ms in timestamps_ms.items()})
        return {name: None if offset < 0 else offset for name, offset in found.items()}

    def _offsets(self, wanted: Mapping[PartitionName, OffsetSpec]) -> dict[PartitionName, int]:
        if not wanted:
            return {}
        level = IsolationLevel.READ_COMMITTED if self._level == "read_committed" else IsolationLevel.READ_UNCOMMITTED
        by_place = {TopicPartition(name.topic, name.partition): spec for name, spec in wanted.items()}
        found = list_offsets(self._admin, by_place, self._request_s, isolation_level=level)
        return {name: found[name.topic, name.partition] for name in wanted}

    def read(self, split: BrokerSplit) -> Iterator[Sequence[Message]]:
        """Yield the split's messages in order, a few at a time.

        Raises ``NotFound`` if retention or a deletion removed them since the plan was made, and ``Unavailable`` if no record
        comes within the poll timeout.
        """
        self._check_same_topic(split.name)
        options = {"group.id": "stratalog-spark", **self._client, "isolation.level": self._level, **_READ_ONLY}
        with options_checked():
            consumer = Consumer(options)
        try:
            consumer.assign([TopicPartition(split.name.topic, split.name.partition, split.offsets.first)])
            yield from self._messages(consumer, split)
        finally:
            consumer.close()
        self._check_same_topic(split.name)

    def _messages(self, consumer: Consumer, split: BrokerSplit) -> Iterator[Sequence[Message]]:
        position, end, at_once = split.offsets.first, split.offsets.end, 1
        deadline = time.monotonic() + self._poll_timeout_s
        while position < end:
            with translated():
                polled = consumer.consume(min(at_once, end - position), timeout=WAIT_S)
            messages = [message for message in polled if message.error() is None]
            if messages:
                at_once = min(MESSAGES_AT_ONCE, max(1, BYTES_AT_ONCE // max(map(_size, messages))))
            reached = [_reached(message, split.name) for message in polled]
            if reached and max(reached) > position:
                position = max(reached)
                yield [message for message in messages if _offset(message) < end]
                # Only now: the caller may take no rows for minutes.
                deadline = time.monotonic() + self._poll_timeout_s
            elif time.monotonic() >= deadline:
                self._check_same_topic(split.name)
                raise Unavailable(
                    f"{split.name}: no record from offset {position} on within {self._poll_timeout_s:.0f} s; {CHECK_CLUSTER}, "
                    "or raise kafkaConsumer.pollTimeoutMs"
                )

    def _check_same_topic(self, name: PartitionName) -> None:
        """Raise ``NotFound`` if the topic was deleted since the plan was made, or created again: offsets say nothing then."""
        ids = [topic.topic_id for topic in self.topics(Subscribed(topics=(name.topic,)))]
        if ids != [name.topic_id]:
            raise NotFound(f"topic {name.topic!r} with the id {name.topic_id} was deleted after the query began; run it again")

    def _admin(self) -> AdminClient:
        with options_checked():
            return AdminClient(self._client)


def with_store(options: ReadOptions) -> ReadOptions:
    """Ask the brokers for the store's URL if the options have none. Raises as ``Brokers.store_url``."""
    return options if options.store else replace(options, store=Brokers(options).store_url())


@contextmanager
def options_checked() -> Iterator[None]:
    """Turn the client's complaint about an option into ``Invalid`` that names it."""
    try:
        yield
    except KafkaException as refused:
        raise Invalid(f"options kafka.*: {refused.args[0].str()} (the client is librdkafka)") from refused


def _reached(message: Message, name: PartitionName) -> int:
    """Return the offset after this message; of an end-of-partition event, the offset where the partition ends."""
    failure = message.error()
    if failure is None:
        return _offset(message) + 1
    if failure.code() == KafkaError._PARTITION_EOF:
        return _offset(message)
    if failure.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise NotFound(f"{name}: retention or a deletion removed records while they were read: {failure.str()}")
    if failure.code() == KafkaError._BAD_MSG:
        raise Corrupt(f"{name}: a batch from the brokers does not match its CRC: {failure.str()}")
    raise as_ours(failure)


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None, "a consumed message has an offset"
    return offset


def _unless_deleted(described: Future[Any], timeout_s: float) -> Any:
    """Return the description; None if the topic was deleted since it was listed."""
    try:
        return _answer(described, timeout_s)
    except KafkaException as failure:
        if failure.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise
        return None


def _answer(future: Future[Any], timeout_s: float) -> Any:
    try:
        return future.result(timeout_s)
    except TimeoutError as late:
        raise Unavailable(f"no answer within {timeout_s:.0f} s; {CHECK_CLUSTER}") from late


def _size(message: Message) -> int:
    return 1 + len(message.key() or b"") + len(message.value() or b"")
