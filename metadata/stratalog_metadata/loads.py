"""What brokers say about their loads, kept by the leader for a while and nowhere else. Sans-IO.

A report names a broker's heaviest partitions and sums up the rest, so that it stays small however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stratalog_metadata.api import BrokerLoad
from stratalog_metadata.records import Partition

FRESH_S: Final = 30.0
"""Reports come about every five seconds; an older one says nothing any more."""
BYTES_PER_S_MIN: Final = 1024 * 1024
"""Below so much traffic in the whole cluster partitions are merely counted."""


class LoadBook:
    """The last report of each broker."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[float, BrokerLoad]] = {}

    def reported(self, load: BrokerLoad, now: float) -> None:
        self._reports[load.broker_id] = (now, load)

    def forget(self, broker_id: int) -> None:
        self._reports.pop(broker_id, None)

    def fresh(self, now: float) -> dict[int, BrokerLoad]:
        """Reports that still say something, by broker."""
        return {broker_id: load for broker_id, (at, load) in self._reports.items() if now - at < FRESH_S}

    def weights(self, partitions: Sequence[Partition], now: float) -> list[float]:
        """Each partition's share of the cluster's load, 1 being the mean: half by number, half by bytes in and out.

        Only by number as long as a broker has not reported, or there is little traffic.
        """
        reports = self.fresh(now)
        if not {partition.owner for partition in partitions} <= reports.keys():
            return [1.0] * len(partitions)
        rates = _rates(partitions, reports.values())
        total = sum(rates)
        if total < BYTES_PER_S_MIN:
            return [1.0] * len(partitions)
        return [0.5 + 0.5 * rate * len(partitions) / total for rate in rates]


def _rates(partitions: Sequence[Partition], reports: Iterable[BrokerLoad]) -> list[float]:
    """Bytes per second of each partition: as reported, or an equal share of what its owner's other partitions have."""
    heavy: dict[tuple[bytes, int], float] = {}
    rest: dict[int, float] = {}
    for report in reports:
        named = {(one.topic_id, one.index): float(one.bytes_per_s) for one in report.heaviest}
        heavy |= named
        others = max(report.partitions - len(named), 1)
        rest[report.broker_id] = max(report.bytes_in_per_s + report.bytes_out_per_s - sum(named.values()), 0.0) / others
    return [heavy.get((one.topic_id.bytes, one.index), rest[one.owner]) for one in partitions]
