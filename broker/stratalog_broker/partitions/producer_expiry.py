"""Forgets idempotent producers that were silent for ``producer_id_expiration_ms``, Kafka's ``producer.id.expiration.ms``.

Time is counted in periods, so that an append reads no clock: a producer is forgotten one to two periods after its time at the
latest.
Producers with an open transaction stay. Guards of producers whose first batch of a transaction was refused go in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stratalog_broker.partitions.core import PartitionCore

PERIOD_MS_MAX: Final = 600_000
"""Kafka's ``producer.id.expiration.check.interval.ms``."""


class ProducerExpiry:
    """One instance per broker. ``now_ms`` is monotonic."""

    def __init__(self, expiration_ms: int) -> None:
        self._period_ms = min(PERIOD_MS_MAX, expiration_ms)
        self._periods = -(-expiration_ms // self._period_ms)
        self._period_ends_ms: int | None = None

    def run(self, cores: Iterable[PartitionCore], now_ms: int) -> None:
        """End the period, if its time has come, in all partitions."""
        if self._period_ends_ms is None:
            self._period_ends_ms = now_ms + self._period_ms
        elif now_ms >= self._period_ends_ms:
            self._period_ends_ms = now_ms + self._period_ms
            for core in cores:
                core.producers.end_period(self._periods)
                core.appended_transactions.end_period(self._periods)
