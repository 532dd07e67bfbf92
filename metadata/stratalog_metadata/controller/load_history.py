"""Brokers' load reports of the last minute, and the rates of partitions that follow from them. No I/O, not stored.

A report names a broker's heaviest partitions and sums up the rest, so its size does not depend on the number of partitions.
Brokers report at different moments, and a report in which a load starts or ends covers only part of it. Rates are therefore
given for several windows of time with several reports each.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stratalog_metadata.controller.balance import IDLE, WINDOWS, Rates
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.records import Partition

FRESH_S: Final = 30.0
"""A broker that has not reported for this long is unknown; reports arrive about every five seconds."""
WINDOW_S: Final = 20.0
"""A window has at least three reports, so a load shorter than 15 s is not in three windows."""
REPORTS_MAX: Final = 16
"""Reports kept per broker: those of all windows and a few more."""
BYTES_PER_S_MIN: Final = 1024 * 1024
"""If the whole cluster carries less, partitions are only counted."""
IDLE_SHARE: Final = 0.05
"""The lightest partitions that together carry at most this share of the mean broker's traffic count as idle."""

Key = tuple[bytes, int]
Kind = tuple[int, Key | None]
"""Partitions with equal rates: those of an owner that no report names, or one that some report names."""


class LoadHistory:
    """The last reports of each broker."""

    def __init__(self) -> None:
        self._reports: dict[int, deque[tuple[float, BrokerLoad]]] = {}

    def reported(self, load: BrokerLoad, now: float) -> None:
        if load.broker_id not in self._reports:
            silent = self._reports.keys() - self.fresh(now).keys()
            for broker_id in silent:
                del self._reports[broker_id]
            self._reports[load.broker_id] = deque(maxlen=REPORTS_MAX)
        self._reports[load.broker_id].append((now, load))

    def forget(self, broker_id: int) -> None:
        self._reports.pop(broker_id, None)

    def fresh(self, now: float) -> dict[int, BrokerLoad]:
        """The last report of each broker that still reports, by broker id."""
        last = {broker_id: reports[-1] for broker_id, reports in self._reports.items()}
        return {broker_id: load for broker_id, (at, load) in last.items() if now - at < FRESH_S}

    def rates(self, partitions: Sequence[Partition], now: float) -> list[Rates]:
        """Bytes per second in and out of each partition, by window, the oldest first. Negligible rates are 0.

        All are 0 while an owner has not reported, and in a window with little traffic in the whole cluster.
        """
        if not {partition.owner for partition in partitions} <= self.fresh(now).keys():
            return [IDLE] * len(partitions)
        windows = [_Window(self._between(now, back)) for back in reversed(range(WINDOWS))]
        named = frozenset[Key]().union(*(window.beyond for window in windows))
        kinds = [
            (partition.owner, key if (key := (partition.topic_id.bytes, partition.index)) in named else None)
            for partition in partitions
        ]
        counts = Counter(kinds)
        by_kind = dict(zip(counts, zip(*(window.rates(counts) for window in windows), strict=True), strict=True))
        return [by_kind[kind] for kind in kinds]

    def _between(self, now: float, back: int) -> dict[int, list[BrokerLoad]]:
        """Reports in the window that ended ``back`` windows ago, by broker."""
        found = {
            broker_id: [load for at, load in reports if back * WINDOW_S <= now - at < (back + 1) * WINDOW_S]
            for broker_id, reports in self._reports.items()
        }
        return {broker_id: loads for broker_id, loads in found.items() if loads}


class _Window:
    """The reports of all brokers in one window.

    A partition's rate is the mean rate of its owner's unnamed partitions plus what the reports that name it add, so the rate
    moves with the partition.
    """

    def __init__(self, reports: dict[int, list[BrokerLoad]]) -> None:
        self.unnamed = dict.fromkeys(reports, 0.0)
        self.beyond: dict[Key, float] = {}
        for loads in reports.values():
            for load in loads:
                self._add(load, 1 / len(loads))

    def _add(self, load: BrokerLoad, share: float) -> None:
        named = sum(one.bytes_per_s for one in load.heaviest)
        unnamed = max(load.bytes_in_per_s + load.bytes_out_per_s - named, 0) / max(load.partitions - len(load.heaviest), 1)
        self.unnamed[load.broker_id] += unnamed * share
        for one in load.heaviest:
            key = (one.topic_id, one.index)
            self.beyond[key] = self.beyond.get(key, 0.0) + (one.bytes_per_s - unnamed) * share

    def rates(self, counts: Mapping[Kind, int]) -> list[float]:
        """Rates of these kinds of partitions; ``counts`` says how many there are of each."""
        rates = [
            max(self.unnamed.get(owner, 0.0) + (self.beyond.get(key, 0.0) if key is not None else 0.0), 0.0)
            for owner, key in counts
        ]
        total = sum(rate * number for rate, number in zip(rates, counts.values(), strict=True))
        if total < BYTES_PER_S_MIN:
            return [0.0] * len(rates)
        limit = _idle_limit(rates, counts.values(), IDLE_SHARE * total / len(self.unnamed))
        return [rate if rate > limit else 0.0 for rate in rates]


def _idle_limit(rates: Iterable[float], numbers: Iterable[int], together_max: float) -> float:
    """The highest rate such that all partitions up to it carry at most ``together_max``."""
    carried: Counter[float] = Counter()
    for rate, number in zip(rates, numbers, strict=True):
        carried[rate] += number
    limit = 0.0
    for rate in sorted(carried):
        together_max -= rate * carried[rate]
        if together_max < 0:
            break
        limit = rate
    return limit
