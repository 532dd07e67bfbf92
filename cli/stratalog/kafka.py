"""confluent-kafka clients for the command line.

Works with any Kafka server: nothing here depends on Stratalog.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from stratalog_core import kafka_clients
from stratalog_core.errors import NotFound, Unavailable
from stratalog_core.kafka_clients import CHECK_CLUSTER, retried, translated

Result = TypeVar("Result")
TIMEOUT_S = 15.0


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
        raise Unavailable(f"no answer within {TIMEOUT_S:.0f} s; {CHECK_CLUSTER}") from late


def of_group(bootstrap: str, call: Callable[[AdminClient], Mapping[Any, Future[Result]]]) -> Result:
    """Return the result of an admin call that a group's coordinator answers. Raises as :func:`only`.

    Repeated while the coordinator moves or loads, with a new client each time: a client keeps the coordinator that it found.
    """

    def once() -> Result:
        client = admin(bootstrap)
        return only(call(client))

    return retried(once, TIMEOUT_S)


def partitions_of(list_topics: Callable[..., Any], topic: str, wanted: Collection[int] = ()) -> list[int]:
    """Return the partition numbers of ``topic``, only ``wanted`` if there are any. ``list_topics`` is a client's method.

    Raises ``NotFound`` for a topic or a partition that does not exist.
    """
    return selected(topic, sorted(topic_of(list_topics, topic).partitions), wanted)


def topic_of(list_topics: Callable[..., Any], topic: str) -> Any:
    """Return the brokers' metadata of ``topic``. ``list_topics`` is a client's method. Raises ``NotFound``."""
    # Lists all topics, because asking for one by name would create it.
    metadata = listed(list_topics).topics.get(topic)
    if metadata is None:
        raise NotFound(f"no topic {topic!r}: see `stratalog topic list`")
    return metadata


def check_reachable(list_topics: Callable[..., Any]) -> None:
    """Return if a broker answers. ``list_topics`` is a client's method. Raises ``Unavailable`` after ``TIMEOUT_S``."""
    listed(list_topics)


def listed(list_topics: Callable[..., Any]) -> Any:
    """Return the metadata of all brokers and topics. Raises ``Unavailable`` after ``TIMEOUT_S``.

    ``list_topics`` is a client's method. It is called in a thread of its own, because Python handles no Ctrl-C while a call of
    the client library waits. After Ctrl-C the call goes on: do not close the client then.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(list_topics(timeout=TIMEOUT_S))
        except BaseException as failure:
            answer.set_exception(failure)

    threading.Thread(target=ask, daemon=True).start()
    with translated():
        return answer.result()


def selected(topic: str, known: list[int], wanted: Collection[int]) -> list[int]:
    """Return ``wanted``, or all partitions if there are none. Raises ``NotFound`` for one that is not ``known``."""
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise NotFound(f"topic {topic!r} has no partition {unknown[0]}; it has {len(known)}")
    return sorted(set(wanted)) or known


def list_offsets(
    bootstrap: str, wanted: Mapping[TopicPartition, OffsetSpec], timeout_s: float = TIMEOUT_S
) -> dict[tuple[str, int], int]:
    """Return offsets by topic and partition number. Raises ``Unavailable`` after ``timeout_s``."""
    return kafka_clients.list_offsets(lambda: admin(bootstrap), wanted, timeout_s)


def offsets_at(client: Consumer, topic: str, partitions: list[int], time_ms: int) -> list[TopicPartition]:
    """Return, per partition, the offset of the first record not earlier than ``time_ms``, or the end if there is none."""
    # To a broker, negative times are names, such as -1 for the end.
    wanted = [TopicPartition(topic, partition, max(time_ms, 0)) for partition in partitions]
    with translated():
        return list(client.offsets_for_times(wanted, timeout=TIMEOUT_S))
