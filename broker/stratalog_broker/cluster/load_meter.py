"""Measures this broker's load for the controller, which balances partitions by it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Final, Protocol

from stratalog_broker.metrics import TrafficMeter
from stratalog_core.ports import Clock
from stratalog_metadata.protocol.broker_loads import HEAVIEST_MAX, BrokerLoad, PartitionLoad
from stratalog_metadata.records import Topic, TopicPartition

REPORT_S: Final = 5.0


class MeteredPartition(Protocol):
    """A partition that counts its bytes and keeps the last reported counts."""

    topic: Topic
    topic_partition: TopicPartition
    bytes_in: int
    bytes_out: int
    bytes_in_reported: int
    bytes_out_reported: int


class LoadMeter:
    """``report`` is called with every renewal of the session and returns a report every ``REPORT_S``.

    Each partition keeps its last reported counts, so that a report builds no table of partitions.
    """

    def __init__(
        self,
        broker_id: int,
        clock: Clock,
        partitions: Callable[[], Collection[MeteredPartition]],
        unreadable_records: Callable[[], int],
    ) -> None:
        self.traffic = TrafficMeter()
        self._broker_id = broker_id
        self._clock = clock
        self._partitions = partitions
        self._unreadable_records = unreadable_records
        self._measured_at = clock.monotonic() - REPORT_S

    def report(self) -> BrokerLoad | None:
        """Return the rates since the last report; None if that was less than ``REPORT_S`` ago."""
        elapsed_s = self._clock.monotonic() - self._measured_at
        if elapsed_s < REPORT_S:
            return None
        self._measured_at += elapsed_s
        partitions = taken = given = 0
        busy: list[tuple[int, MeteredPartition]] = []
        for log in self._partitions():
            partitions += 1
            came, went = log.bytes_in - log.bytes_in_reported, log.bytes_out - log.bytes_out_reported
            if came or went:
                log.bytes_in_reported, log.bytes_out_reported = log.bytes_in, log.bytes_out
                taken, given = taken + came, given + went
                self.traffic.count(log.topic.name, came, went)
                busy.append((int((came + went) / elapsed_s), log))
        heaviest = heapq.nlargest(HEAVIEST_MAX, busy, key=lambda one: one[0])
        return BrokerLoad(
            broker_id=self._broker_id,
            partitions=partitions,
            bytes_in_per_s=int(taken / elapsed_s),
            bytes_out_per_s=int(given / elapsed_s),
            heaviest=[_loaded(rate, log) for rate, log in heaviest if rate],
            unreadable_records=self._unreadable_records(),
        )


def _loaded(rate: int, log: MeteredPartition) -> PartitionLoad:
    identity = log.topic_partition
    return PartitionLoad(identity.topic_id.bytes, identity.partition, rate)
