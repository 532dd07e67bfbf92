"""What this broker does, measured now and then for the controller, which balances by it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from stratalog_broker.metrics import TrafficMeter
from stratalog_metadata.protocol.broker_loads import HEAVIEST_MAX, BrokerLoad, PartitionLoad

if TYPE_CHECKING:
    from stratalog_broker.partitions.log import PartitionLog
    from stratalog_broker.requests.context import BrokerServices

REPORT_S: Final = 5.0


class LoadMeter:
    """``report`` is asked with every renewal of the session, and answers every few seconds.

    What was told stands with each partition's counters: no table of partitions is built for a report.
    """

    def __init__(self, services: BrokerServices) -> None:
        self._services = services
        self.traffic = TrafficMeter()
        self._measured_at = services.clock.monotonic() - REPORT_S

    def report(self) -> BrokerLoad | None:
        """Rates since the last report; None if that was just now."""
        elapsed_s = self._services.clock.monotonic() - self._measured_at
        if elapsed_s < REPORT_S:
            return None
        self._measured_at += elapsed_s
        partitions = taken = given = 0
        busy: list[tuple[int, PartitionLog]] = []
        for log in self._services.partitions.all():
            partitions += 1
            came, went = log.bytes_in - log.bytes_in_reported, log.bytes_out - log.bytes_out_reported
            if came or went:
                log.bytes_in_reported, log.bytes_out_reported = log.bytes_in, log.bytes_out
                taken, given = taken + came, given + went
                self.traffic.count(log.topic.name, came, went)
                busy.append((int((came + went) / elapsed_s), log))
        heaviest = heapq.nlargest(HEAVIEST_MAX, busy, key=lambda one: one[0])
        return BrokerLoad(
            broker_id=self._services.settings.broker_id,
            partitions=partitions,
            bytes_in_per_s=int(taken / elapsed_s),
            bytes_out_per_s=int(given / elapsed_s),
            heaviest=[_loaded(rate, log) for rate, log in heaviest if rate],
            unreadable_records=self._services.groups.unreadable_records,
        )


def _loaded(rate: int, log: PartitionLog) -> PartitionLoad:
    identity = log.topic_partition
    return PartitionLoad(identity.topic_id.bytes, identity.partition, rate)
