"""Topics of a measurement: creates them before it and deletes them after it, unless they existed; counts their records."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import TopicPartition
from confluent_kafka.admin import ConfigResource, NewTopic, OffsetSpec

from stratalog import kafka
from stratalog_core.errors import Invalid, NotFound, StratalogError, Unavailable
from stratalog_core.kafka_clients import translated
from stratalog_loadgen.settings import Topics, Traffic, batch_records

_Answer = TypeVar("_Answer")
_TIMEOUT_S = 180.0
_KNOWN_S = 90.0
_POLL_S = 0.1
_ANSWER_S = 20.0
# Apache Kafka's controller takes at most 10,000 records per request, and each partition is one.
_PARTITIONS_PER_REQUEST = 5000
PARTITIONS_MAX = 100_000
"""Maximum partitions of all new topics, about ten times the number that a cluster on one machine is made for."""


class Prepared:
    """Names and partitions of the topics; asks the cluster about them."""

    def __init__(self, bootstrap: str, names: Sequence[str], partitions: int) -> None:
        self.bootstrap = bootstrap
        self.names = list(names)
        self.partitions = partitions

    def records(self) -> int:
        """Return the sum of the end offsets of all partitions."""
        latest = OffsetSpec.latest()
        wanted = {TopicPartition(name, number): latest for name in self.names for number in range(self.partitions)}
        deadline = time.monotonic() + _KNOWN_S
        while True:
            try:
                return sum(kafka.list_offsets(self.bootstrap, wanted, _TIMEOUT_S).values())
            except NotFound:
                # A leader learns of a new topic after the broker that named it.
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)

    def batch_bytes_max(self) -> int | None:
        """Return the topics' ``max.message.bytes``; None if the cluster does not report it."""
        client = kafka.admin(self.bootstrap)
        asked = client.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, self.names[0])])
        try:
            found = kafka.only(asked).get("max.message.bytes")
        except StratalogError:
            return None
        return int(found.value) if found is not None and str(found.value).isdigit() else None

    def leaders(self) -> dict[tuple[str, int], int]:
        """Broker id by topic and partition; -1 where there is none."""
        return self._leaders(self.bootstrap, _TIMEOUT_S)

    def _leaders(self, address: str, timeout_s: float) -> dict[tuple[str, int], int]:
        client = kafka.admin(address)
        with translated():
            found = client.list_topics(timeout=timeout_s).topics
        return {
            (name, number): partition.leader
            for name in self.names
            if name in found
            for number, partition in found[name].partitions.items()
        }

    def wait_until_led(self) -> None:
        """Wait until each broker reports a leader for every partition: brokers learn of new topics at different times.

        Raises ``Unavailable`` if some partition has no leader for a long time.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        for address in self.bootstrap.split(","):
            while (missing := self._not_led(address)) > 0:
                if time.monotonic() >= deadline:
                    raise Unavailable(
                        f"{missing} partitions of {', '.join(self.names[:3])} have no leader after {_TIMEOUT_S:.0f} s, "
                        f"according to broker {address}"
                    )
                time.sleep(_POLL_S)

    def _not_led(self, address: str) -> int:
        """Return how many partitions have no leader according to this broker; 0 if it does not answer."""
        try:
            leaders = self._leaders(address, _ANSWER_S)
        except Unavailable:
            return 0
        return len(self.names) * self.partitions - sum(leader >= 0 for leader in leaders.values())


@contextmanager
def prepared(bootstrap: str, topics: Topics, traffic: Traffic | None = None) -> Iterator[Prepared]:
    """Yield the topics when every partition has a leader; check that they accept the batches of ``traffic``.

    Raises ``Invalid`` if they are too many or take no batch so large, ``Unavailable`` if no broker answers.
    """
    validate(topics)
    _reach(bootstrap)
    if topics.name is not None:
        client = kafka.admin(bootstrap)
        found = Prepared(bootstrap, [topics.name], len(kafka.partitions_of(client.list_topics, topics.name)))
        _fits(found, traffic)
        yield found
        return
    names = [f"bench-{secrets.token_hex(4)}" for _ in range(topics.count)]
    _create(bootstrap, names, topics)
    try:
        found = Prepared(bootstrap, names, topics.partitions)
        found.wait_until_led()
        _fits(found, traffic)
        yield found
    finally:
        if not topics.keep:
            _delete(bootstrap, names)


def validate(topics: Topics) -> None:
    """Raise ``Invalid`` for more than ``PARTITIONS_MAX`` partitions, which is likely a mistake."""
    partitions = topics.count * topics.partitions
    if partitions > PARTITIONS_MAX:
        raise Invalid(
            f"{topics.count:,} topics of {topics.partitions:,} partitions are {partitions:,} partitions; "
            f"maximum is {PARTITIONS_MAX:,}: lower --topics or --partitions"
        )


def _reach(bootstrap: str) -> None:
    """Raise ``Unavailable`` soon if no broker answers: later requests have time-outs of minutes."""
    client = kafka.admin(bootstrap)
    try:
        with translated():
            client.list_topics(timeout=kafka.TIMEOUT_S)
    except Unavailable as failure:
        raise Unavailable(f"{bootstrap}: {failure.message}") from failure


def _fits(place: Prepared, traffic: Traffic | None) -> None:
    """Raise ``Invalid`` if the topics refuse batches of this size. The size of compressed batches is not known in advance."""
    if traffic is None or traffic.compression != "none":
        return
    records = batch_records(traffic) if traffic.keys == "none" else 1
    size, most = records * traffic.payload.record_bytes, place.batch_bytes_max()
    if most is not None and size > most:
        raise Invalid(
            f"batches are {size:,} bytes; maximum of topic {place.names[0]} is {most:,} (max.message.bytes). Send smaller "
            f"records and batches, or raise it: for a new topic with --topic-config max.message.bytes={2 * size}"
        )


def _create(bootstrap: str, names: Sequence[str], topics: Topics) -> None:
    client = kafka.admin(bootstrap)
    new = [
        NewTopic(name, num_partitions=topics.partitions, replication_factor=topics.replication_factor, config=topics.configs)
        for name in names
    ]
    at_once = max(1, _PARTITIONS_PER_REQUEST // topics.partitions)
    for first in range(0, len(new), at_once):
        _all(client.create_topics(new[first : first + at_once], request_timeout=_TIMEOUT_S, operation_timeout=_TIMEOUT_S))


def _delete(bootstrap: str, names: Sequence[str]) -> None:
    # A new client: an old one would ask the controller for minutes if its broker was killed.
    client = kafka.admin(bootstrap)
    try:
        _all(client.delete_topics(list(names), request_timeout=_TIMEOUT_S))
    except NotFound:
        pass  # the client asked twice: the first request was carried out
    except Unavailable as failure:
        # Keep the measurements even if the cluster cannot be cleaned up.
        print(f"topics {', '.join(names)} were not deleted: {failure}", file=sys.stderr)


def _all(futures: Mapping[str, Future[Any]]) -> None:
    for future in futures.values():
        _answer(future)


def _answer(future: Future[_Answer]) -> _Answer:
    """Raises ``Unavailable`` if it takes too long, or what the cluster says."""
    try:
        with translated():
            return future.result(_TIMEOUT_S)
    except TimeoutError as late:
        raise Unavailable(f"the cluster did not answer an administrative request within {_TIMEOUT_S:.0f} s") from late
