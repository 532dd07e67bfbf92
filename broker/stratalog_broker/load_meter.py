"""What this broker does, measured now and then for the controller, which balances by it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from stratalog_core.ids import TopicPartition
from stratalog_metadata.api import HEAVIEST_MAX, BrokerLoad, PartitionLoad

if TYPE_CHECKING:
    from stratalog_broker.context import BrokerServices

REPORT_S: Final = 5.0


class LoadMeter:
    """``report`` is asked with every renewal of the session, and answers every few seconds."""

    def __init__(self, services: BrokerServices) -> None:
        self._services = services
        self._measured_at = services.clock.monotonic() - REPORT_S
        self._bytes: dict[TopicPartition, tuple[int, int]] = {}

    def report(self) -> BrokerLoad | None:
        """Rates since the last report; None if that was just now."""
        elapsed_s = self._services.clock.monotonic() - self._measured_at
        if elapsed_s < REPORT_S:
            return None
        self._measured_at += elapsed_s
        before = self._bytes
        self._bytes = {log.topic_partition: (log.bytes_in, log.bytes_out) for log in self._services.partitions.all()}
        # A partition that is taken over again begins to count anew: what it has counted since is all there is to tell.
        moved = {one: _since(now, before.get(one, (0, 0))) for one, now in self._bytes.items()}
        rates = {one: int(sum(both) / elapsed_s) for one, both in moved.items()}
        heaviest = heapq.nlargest(HEAVIEST_MAX, rates, key=lambda one: rates[one])
        return BrokerLoad(
            broker_id=self._services.settings.broker_id,
            partitions=len(moved),
            bytes_in_per_s=int(sum(taken for taken, _ in moved.values()) / elapsed_s),
            bytes_out_per_s=int(sum(given for _, given in moved.values()) / elapsed_s),
            heaviest=[PartitionLoad(one.topic_id.bytes, one.partition, rates[one]) for one in heaviest if rates[one]],
        )


def _since(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return (now[0] - before[0], now[1] - before[1]) if now[0] >= before[0] and now[1] >= before[1] else now
