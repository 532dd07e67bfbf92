"""The cost of a topic in a month at given prices, now and with another retention. No I/O.

A month has 730 hours. Storage is what is stored now, as if it stayed for the month. Requests are those of the observed time,
as if it repeated itself all month. A what-if by retention assumes the observed intake for the whole of that retention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from stratalog.cost.prices import GB, ObjectPrices, Prices
from stratalog.cost.usage import SWEEP_DAYS, Departure, Requests, Sizes, TopicUsage, total_bytes

MONTH_S: Final = 730 * 3600
DAY_S: Final = 86_400
MONTH_DAYS: Final = MONTH_S / DAY_S
SHORTEST_S: Final = 3600
"""A shorter observed time counts as this long: a first test of a topic does not represent its month."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Reads of the whole history from the store: how often in a month, and which share of the bytes leaves its network."""

    per_month: float = 0.0
    egress_share: float = 1.0


NO_REPLAYS: Final = Replays()


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthlyCost:
    """One topic at one price file. ``retention_days`` None: as it is stored now. Amounts are in ``currency``, for a month.

    ``hot`` is None if the hot bytes are unknown; ``total`` is without them then. ``early_deletion`` is what a class with a
    minimum duration bills for segments that were deleted before it.
    """

    topic: str
    prices: str
    currency: str
    retention_days: float | None
    hot_bytes: int | None
    cold_bytes: int
    put_requests: int
    get_requests: int
    hot: float | None
    storage: float
    early_deletion: float
    requests: float
    retrieval: float
    egress: float

    @property
    def total(self) -> float:
        return (self.hot or 0.0) + self.storage + self.early_deletion + self.requests + self.retrieval + self.egress


def monthly_cost(
    usage: TopicUsage, prices: Prices, replays: Replays = NO_REPLAYS, retention_days: float | None = None
) -> MonthlyCost:
    """The cost of a topic in a month: as it is, or in the long run with a retention of ``retention_days``."""
    observed_s = max(SHORTEST_S, usage.activity.seconds)
    months_observed = observed_s / MONTH_S
    live_bytes: float = usage.live_bytes
    billed_live = _billed_bytes(usage.live, prices.segments)
    departures = usage.activity.merged_away + usage.activity.expired
    if retention_days is not None:
        billed_per_byte = billed_live / live_bytes if live_bytes else 1.0
        daily_bytes = usage.activity.offloaded_bytes / observed_s * DAY_S
        live_bytes = daily_bytes * retention_days
        billed_live = daily_bytes * max(retention_days, prices.segments.minimum_days) * billed_per_byte
        departures = usage.activity.merged_away
    segment_bytes = billed_live + _billed_bytes(usage.removed, prices.segments)
    storage = _storage(segment_bytes, prices.segments) + _storage(_billed_bytes(usage.others, prices.others), prices.others)
    share = live_bytes / usage.live_bytes if usage.live_bytes else 0.0
    puts, gets, request_cost = _requests(usage, prices, 1 / months_observed, replays.per_month * share)
    replayed_gb = live_bytes * replays.per_month / GB
    return MonthlyCost(
        topic=usage.topic,
        prices=prices.name,
        currency=prices.currency,
        retention_days=retention_days,
        hot_bytes=usage.hot_bytes,
        cold_bytes=round(live_bytes) + total_bytes(usage.removed) + total_bytes(usage.others),
        put_requests=puts,
        get_requests=gets,
        hot=None if usage.hot_bytes is None else usage.hot_bytes / GB * prices.hot.disk_per_gb_month,
        storage=storage,
        early_deletion=_early_deletion(departures, prices.segments) / months_observed,
        requests=request_cost,
        retrieval=replayed_gb * prices.segments.retrieval_per_gb + _worker_retrieval(usage, prices) / months_observed,
        egress=replayed_gb * replays.egress_share * prices.transfer.egress_per_gb,
    )


def _billed_bytes(sizes: Sizes, prices: ObjectPrices) -> float:
    return sum(max(size, prices.minimum_object_bytes) * count for size, count in sizes.items())


def _storage(billed_bytes: float, prices: ObjectPrices) -> float:
    return billed_bytes / GB * prices.storage_per_gb_month


def _early_deletion(departures: Counter[Departure], prices: ObjectPrices) -> float:
    """Return the charge for the days by which deleted objects fall short of the minimum duration."""
    billed = 0.0
    for each, count in departures.items():
        missing_days = max(0, prices.minimum_days - each.age_days)
        billed += max(each.size_bytes, prices.minimum_object_bytes) * count * missing_days
    return _storage(billed / MONTH_DAYS, prices)


def _requests(usage: TopicUsage, prices: Prices, scale: float, replays: float) -> tuple[int, int, float]:
    """Requests of PUT class and of GET class in a month, and what they cost.

    ``scale`` is a month divided by the observed time, ``replays`` the number of replays of the present history.
    """
    seen, replay = usage.activity.requests, usage.replay_requests
    monthly = Requests(
        segment_puts=round(seen.segment_puts * scale),
        segment_gets=round(seen.segment_gets * scale + replay.segment_gets * replays),
        other_puts=round(seen.other_puts * scale + usage.sweep_listings * MONTH_DAYS / SWEEP_DAYS),
        other_gets=round(seen.other_gets * scale + replay.other_gets * replays),
    )
    in_segments, in_others = prices.segments, prices.others
    cost = monthly.segment_puts * in_segments.put_per_1000 + monthly.segment_gets * in_segments.get_per_1000
    cost += monthly.other_puts * in_others.put_per_1000 + monthly.other_gets * in_others.get_per_1000
    return monthly.puts, monthly.gets, cost / 1000


def _worker_retrieval(usage: TopicUsage, prices: Prices) -> float:
    """Return the charge for the workers' reads in the observed time: each new segment once, and the sources of merges."""
    merged_bytes = sum(each.size_bytes * count for each, count in usage.activity.merged_away.items())
    # A merged segment is as large as its sources.
    return (usage.activity.offloaded_bytes + 2 * merged_bytes) / GB * prices.segments.retrieval_per_gb
