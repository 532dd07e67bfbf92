"""Draining a broker, undraining it, and stopping another do not affect running clients."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition
from integration.process_cluster import ProcessCluster
from integration.test_crashes import PARTITIONS, TIMEOUT_S, Sender, check

pytestmark = [pytest.mark.alone, pytest.mark.integration]


class _Member:
    """A member of a group, polled by its own thread."""

    def __init__(self, cluster: ProcessCluster, topic: str) -> None:
        self.seen: list[int] = []
        self.assignments = 0
        self.failures: list[str] = []
        self._wanted: int | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": cluster.new_group(),
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 45_000,
                "debug": "cgrp",
            },
            logger=logging.getLogger(__name__),
        )
        self._consumer.subscribe([topic], on_assign=self._assigned)
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def wait_until_reading(self) -> None:
        """Wait for the first record.

        A member that is being assigned while its coordinator moves may read nothing until it is assigned again: librdkafka
        (2.16, an open bug) never repeats an OffsetFetch that was answered with NOT_COORDINATOR. Kafka answers the same.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not self.seen:
            assert time.monotonic() < deadline, "the member reads nothing"
            time.sleep(0.05)

    def finish(self, wanted: int) -> None:
        """Continue until ``wanted`` different records were seen."""
        self._wanted = wanted
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"{len(set(self.seen))} of {wanted} records"

    def close(self) -> None:
        """Leave the group at once."""
        self._wanted = 0
        self._thread.join()
        self._consumer.close()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assignments += 1

    def _poll(self) -> None:
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while (self._wanted is None or len(set(self.seen)) < self._wanted) and time.monotonic() < deadline:
            for message in self._consumer.consume(1000, timeout=0.2):
                failure = message.error()
                if failure is None:
                    self.seen.append(int(message.value() or b"-1"))
                elif not failure.retriable():
                    self.failures.append(failure.str())


def _send_during(sender: Sender, work: Callable[[], object]) -> None:
    """Send while another thread runs ``work``, at least some records, and re-raise its error."""
    raised: list[BaseException] = []

    def safely() -> None:
        try:
            work()
        except BaseException as failure:
            raised.append(failure)

    thread = threading.Thread(target=safely)
    thread.start()
    while thread.is_alive():
        sender.send(50, per_s=500)
    thread.join()
    sender.send(50, per_s=500)
    if raised:
        raise raised[0]


def _owned(cluster: ProcessCluster) -> dict[int, int]:
    """Return the number of partitions of each broker."""
    return {row["broker"]: row["partitions"] for row in cluster.json("broker", "list")["brokers"]}


def test_clients_do_not_notice_a_drain_nor_a_broker_that_is_stopped(cluster: ProcessCluster) -> None:
    sender = Sender(cluster.bootstrap, cluster.new_topic(partitions=PARTITIONS))
    member = _Member(cluster, sender.topic)
    try:
        sender.send(100, per_s=1000)
        member.wait_until_reading()
        try:
            _send_during(sender, lambda: cluster.run("broker", "drain", "1"))
            assert _owned(cluster)[1] == 0
        finally:
            _send_during(sender, lambda: cluster.run("broker", "undrain", "1"))
        # Broker 2 owns everything now: it hands its partitions over to the one that was drained.
        _send_during(sender, lambda: cluster.run("cluster", "stop", "broker-2"))
        owned = _owned(cluster)
        assert owned[1] > 0
        assert not owned.get(2)
        sender.send(100, per_s=500)
        sender.flush()
        member.finish(sender.sent)
    finally:
        member.close()
        cluster.run("cluster", "start")
    assert set(_owned(cluster)) == {1, 2}, "the cluster is started when all of its brokers are registered"
    check(cluster, sender)
    assert not member.failures
    assert set(member.seen) == set(range(sender.sent))
    # A member that is assigned again starts where it last committed; if it never was, it reads nothing twice.
    assert member.assignments > 1 or len(member.seen) == sender.sent
