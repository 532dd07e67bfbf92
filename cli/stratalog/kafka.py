"""The Kafka side of the command line: confluent-kafka clients, and its errors as ours.

Nothing here knows that the server is Stratalog.
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
_LOOK = "`stratalog cluster status`, `stratalog doctor`"

_NOT_FOUND = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,  # an admin client that found no leader of any partition: the brokers have not heard of the topic yet
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
# Nobody is wrong and nothing is lost: the same again, later.
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
    """One of our errors, by what the user can do about it."""
    text = failure.str()
    if failure.code() in _NOT_FOUND:
        return NotFound(text)
    if failure.code() in _CONFLICT:
        return Conflict(text)
    if failure.code() in _UNAVAILABLE:
        return Unavailable(f"{text}; is the cluster up? ({_LOOK})")
    return Unavailable(text) if failure.retriable() or failure.code() in _MOVING | _LATER else Invalid(text)


@contextmanager
def translated() -> Iterator[None]:
    """Turn confluent-kafka's exceptions into ours."""
    try:
        yield
    except KafkaException as failure:
        raise as_ours(failure.args[0]) from failure


def admin(bootstrap: str) -> AdminClient:
    """Keep it in a variable until its answers are there: with it, they are lost."""
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def producer(bootstrap: str, options: Mapping[str, str | int]) -> Producer:
    with translated():
        return Producer({"bootstrap.servers": bootstrap, "log_level": 0, "enable.idempotence": True, **options})


def consumer(bootstrap: str, options: Mapping[str, str | int | bool]) -> Consumer:
    with translated():
        return Consumer({"bootstrap.servers": bootstrap, "log_level": 0, "enable.auto.commit": False, **options})


def only(futures: Mapping[Any, Future[Result]]) -> Result:
    """The result of an admin call about one thing. Raises ``Unavailable`` if there is none in time."""
    (future,) = futures.values()
    try:
        with translated():
            return future.result(TIMEOUT_S)
    except TimeoutError as late:
        raise Unavailable(f"no answer within {TIMEOUT_S:.0f} s; is the cluster up? ({_LOOK})") from late


def partitions_of(list_topics: Callable[..., Any], topic: str) -> list[int]:
    """Partition numbers of ``topic``; ``list_topics`` is a client's method. Raises ``NotFound``."""
    with translated():
        # All topics, because asking for one by name would create it.
        metadata = list_topics(timeout=TIMEOUT_S).topics.get(topic)
    if metadata is None:
        raise NotFound(f"no topic {topic!r}: see `stratalog topic list`")
    return sorted(metadata.partitions)


def list_offsets(
    bootstrap: str, wanted: Mapping[TopicPartition, OffsetSpec], timeout_s: float = TIMEOUT_S
) -> dict[tuple[str, int], int]:
    """Offsets by topic and partition number.

    A partition that moved meanwhile is asked for again, by a new client: one that has asked goes on asking its old leader.
    Raises ``Unavailable`` when the time is over.
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
    """Per partition the first offset whose record is not earlier than ``time_ms``; the end where there is none."""
    wanted = [TopicPartition(topic, partition, time_ms) for partition in partitions]
    with translated():
        return list(client.offsets_for_times(wanted, timeout=TIMEOUT_S))
