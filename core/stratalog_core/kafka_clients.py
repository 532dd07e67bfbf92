"""Translates errors of confluent-kafka's clients into ours and looks up offsets: for the command line and for Spark.

Works with any Kafka server: nothing here depends on Stratalog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from stratalog_core.errors import Conflict, Fenced, Invalid, NotFound, StratalogError, Unavailable

Result = TypeVar("Result")
CHECK_CLUSTER = "is the cluster up? Check with `stratalog cluster status` or `stratalog doctor`"
_RETRY_S = 0.2

_NOT_FOUND = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,  # An admin client found no leader of any partition: the topic has not reached the brokers yet.
    KafkaError.GROUP_ID_NOT_FOUND,
    KafkaError.UNKNOWN_TOPIC_ID,
}
_CONFLICT = {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.NON_EMPTY_GROUP, KafkaError.UNKNOWN_MEMBER_ID}
# A producer that began later with the same transactional id, or the coordinator, ended this one's transaction.
_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
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
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError._WAIT_COORD,
}
_UNAVAILABLE = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT}


def as_ours(failure: KafkaError) -> StratalogError:
    """Return our error for a Kafka error, chosen by what the user can do about it."""
    text = failure.str()
    if failure.code() in _NOT_FOUND:
        return NotFound(text)
    if failure.code() in _CONFLICT:
        return Conflict(text)
    if failure.code() in _FENCED:
        return Fenced(text)
    if failure.code() in _UNAVAILABLE:
        return Unavailable(f"{text}; {CHECK_CLUSTER}")
    return Unavailable(text) if failure.retriable() or failure.code() in _MOVING | _LATER else Invalid(text)


@contextmanager
def translated() -> Iterator[None]:
    """Turn confluent-kafka's exceptions into ours."""
    try:
        yield
    except KafkaException as failure:
        raise as_ours(failure.args[0]) from failure


def uuid_of(topic_id: Any) -> UUID:
    """Return a topic id of the client library, which has signed halves, as one of Python."""
    high, low = topic_id.get_most_significant_bits() % 2**64, topic_id.get_least_significant_bits() % 2**64
    return UUID(int=high << 64 | low)


def retried(call: Callable[[], Result], timeout_s: float) -> Result:
    """Return the result of ``call``, repeated for ``timeout_s`` while it raises ``Unavailable`` or what translates to it.

    librdkafka (2.16) retries only some requests: an OffsetFetch that was answered with NOT_COORDINATOR, because the group's
    coordinator moved, fails at once. Java's client retries it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with translated():
                return call()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def list_offsets(
    connect: Callable[[], AdminClient], wanted: Mapping[TopicPartition, OffsetSpec], timeout_s: float, **options: Any
) -> dict[tuple[str, int], int]:
    """Return offsets by topic and partition number. ``options`` are those of ``AdminClient.list_offsets``.

    Retries with a new client if a partition's leader moved, because a client keeps asking the leader that it asked first.
    So it does if the connection to a leader was lost: librdkafka (2.16) answers with the offset ``OFFSET_INVALID`` then, and
    without an error. Raises ``NotFound``, ``Invalid``, and ``Unavailable`` after ``timeout_s``.
    """

    def once() -> dict[tuple[str, int], int]:
        client = connect()
        futures = client.list_offsets(dict(wanted), request_timeout=timeout_s, **options)
        try:
            found = {(place.topic, place.partition): future.result(timeout_s).offset for place, future in futures.items()}
        except TimeoutError as late:
            raise Unavailable(f"no answer within {timeout_s:.0f} s; {CHECK_CLUSTER}") from late
        for (topic, partition), offset in found.items():
            if offset == OFFSET_INVALID:
                raise Unavailable(f"{topic}-{partition}: the connection to its leader was lost; {CHECK_CLUSTER}")
        return found

    return retried(once, timeout_s)
