"""confluent-kafka clients for the command line, and the translation of its errors into ours.

Works with any Kafka server: nothing here depends on Stratalog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from stratalog_core.errors import Conflict, Invalid, NotFound, StratalogError, Unavailable

Result = TypeVar("Result")
TIMEOUT_S = 15.0
_RETRY_S = 0.2
_LOOK = "is the cluster up? Check with `stratalog cluster status` or `stratalog doctor`"

_NOT_FOUND = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,  # An admin client found no leader of any partition: the topic has not reached the brokers yet.
    KafkaError.GROUP_ID_NOT_FOUND,
    KafkaError.UNKNOWN_TOPIC_ID,
}
_CONFLICT = {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.NON_EMPTY_GROUP, KafkaError.UNKNOWN_MEMBER_ID}
_MOVING = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
# Transient: the same request succeeds later.
_LATER = {
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_ENOUGH_REPLICAS,
}
_UNAVAILABLE = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT}


def as_ours(failure: KafkaError) -> StratalogError:
    """Return our error for a Kafka error, chosen by what the user can do about it."""
    text = failure.str()
    if failure.code() in _NOT_FOUND:
        return NotFound(text)
    if failure.code() in _CONFLICT:
        return Conflict(text)
    if failure.code() in _UNAVAILABLE:
        return Unavailable(f"{text}; {_LOOK}")
    return Unavailable(text) if failure.retriable() or failure.code() in _MOVING | _LATER else Invalid(text)


@contextmanager
def translated() -> Iterator[None]:
    """Turn confluent-kafka's exceptions into ours."""
    try:
        yield
    except KafkaException as failure:
        raise as_ours(failure.args[0]) from failure


def admin(bootstrap: str) -> AdminClient:
    """Return an admin client. Keep a reference until its futures are done: they never complete after it is collected."""
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def producer(bootstrap: str, options: Mapping[str, str | int]) -> Producer:
    with translated():
        return Producer({"bootstrap.servers": bootstrap, "log_level": 0, "enable.idempotence": True, **options})


def consumer(bootstrap: str, options: Mapping[str, str | int | bool]) -> Consumer:
    with translated():
        return Consumer({"bootstrap.servers": bootstrap, "log_level": 0, "enable.auto.commit": False, **options})


def only(futures: Mapping[Any, Future[Result]]) -> Result:
    """Return the result of an admin call with a single future. Raises ``Unavailable`` after ``TIMEOUT_S``."""
    (future,) = futures.values()
    try:
        with translated():
            return future.result(TIMEOUT_S)
    except TimeoutError as late:
        raise Unavailable(f"no answer within {TIMEOUT_S:.0f} s; {_LOOK}") from late


def partitions_of(list_topics: Callable[..., Any], topic: str) -> list[int]:
    """Return the partition numbers of ``topic``. ``list_topics`` is a client's method. Raises ``NotFound``."""
    with translated():
        # Lists all topics, because asking for one by name would create it.
        metadata = list_topics(timeout=TIMEOUT_S).topics.get(topic)
    if metadata is None:
        raise NotFound(f"no topic {topic!r}: see `stratalog topic list`")
    return sorted(metadata.partitions)


def list_offsets(
    bootstrap: str, wanted: Mapping[TopicPartition, OffsetSpec], timeout_s: float = TIMEOUT_S
) -> dict[tuple[str, int], int]:
    """Return offsets by topic and partition number. Raises ``Unavailable`` after ``timeout_s``.

    Retries with a new client if a partition's leader moved, because a client keeps asking the leader that it asked first.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        client = admin(bootstrap)
        futures = client.list_offsets(dict(wanted), request_timeout=timeout_s)
        try:
            with translated():
                return {(place.topic, place.partition): future.result(timeout_s).offset for place, future in futures.items()}
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def offsets_at(client: Consumer, topic: str, partitions: list[int], time_ms: int) -> list[TopicPartition]:
    """Return, per partition, the offset of the first record not earlier than ``time_ms``, or the end if there is none."""
    wanted = [TopicPartition(topic, partition, time_ms) for partition in partitions]
    with translated():
        return list(client.offsets_for_times(wanted, timeout=TIMEOUT_S))
