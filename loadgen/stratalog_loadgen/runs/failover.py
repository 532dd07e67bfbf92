"""How long writes stop when a broker dies: a steady rate to every partition, and the gaps between acknowledgements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from stratalog_core.errors import Unavailable
from stratalog_loadgen.processes.loads import Counted, Gap, ProducerLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, behind, failures, latencies, result
from stratalog_loadgen.runs.produce import split
from stratalog_loadgen.settings import Topics, Traffic, as_document, producer_options, validate
from stratalog_loadgen.topics import Prepared, prepared

_DELIVERY_TIMEOUT_MS = 150_000
_STEADY_TIMEOUT_S = 180.0
_STEADY_POLL_S = 0.2
_LONGEST_S = 7200.0
_LATE_SHARE_MAX = 0.1
"""Maximum share of partitions whose first acknowledgement comes after the kill; their gaps are not meaningful."""


def measure_failover(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    *,
    kill: Callable[[], int | None],
    before_s: float = 10.0,
    after_s: float = 30.0,
    records_per_partition_per_s: float = 2.0,
    partition_step: int = 1,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Produce to every ``partition_step``-th partition and call ``kill``; measure the longest gap of each that the broker led.

    ``before_s`` starts when every partition has acknowledged a record within a second, so that the start-up of thousands of
    new partitions is not measured. Earlier records do not count. Raises ``Unavailable`` if that takes too long.
    ``kill`` ends a broker and returns its id, or ``None`` if it does not know: then partitions count whose leader changed.
    """
    with prepared(bootstrap, topics, traffic) as place:
        loads = _loads(place, traffic, records_per_partition_per_s, partition_step)
        wanted = sum(len(load.topics) * -(-load.partitions // partition_step) for load in loads)
        with Workers(loads, on_progress) as workers:
            workers.begin(ProducerLoad)
            began = time.monotonic()
            _wait_until_steady(workers, wanted)
            steady_after_s = time.monotonic() - began
            workers.measure(ProducerLoad)
            workers.follow_for(before_s)
            leaders = place.leaders()
            killed_at = time.monotonic()
            victim = kill()
            workers.follow_for(after_s)
            workers.stop(ProducerLoad)
            counts = workers.finish(ProducerLoad, 0)
        lost = _lost(leaders, place.leaders(), victim)
    settings = as_document(
        topics,
        traffic,
        before_s=before_s,
        after_s=after_s,
        records_per_partition_per_s=records_per_partition_per_s,
        partition_step=partition_step,
    )
    measured = gaps_of(counts, lost, killed_at) | {"steady_after_s": steady_after_s}
    return result("failover", settings, measured | latencies(counts, "latency") | behind(counts, "behind") | failures(counts))


def _wait_until_steady(workers: Workers, partitions: int) -> None:
    """Wait until all partitions are steady. Raises ``Unavailable`` with the number that are."""
    deadline = time.monotonic() + _STEADY_TIMEOUT_S
    while workers.steady_partitions(ProducerLoad) < partitions:
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"after {_STEADY_TIMEOUT_S:.0f} s only {workers.steady_partitions(ProducerLoad)} of {partitions} partitions"
                " acknowledge records within a second: the cluster does not keep up; lower --rate"
            )
        workers.follow_for(_STEADY_POLL_S)


def _loads(place: Prepared, traffic: Traffic, rate: float, step: int) -> list[ProducerLoad]:
    """Return the loads. Each process has its own topics, so that it sees every acknowledgement of their partitions."""
    validate(traffic)
    options = {"linger.ms": 0, "delivery.timeout.ms": _DELIVERY_TIMEOUT_MS}
    client = producer_options(place.bootstrap, traffic) | options | traffic.client
    processes = min(traffic.processes, len(place.names))
    shares = split(len(place.names), processes)
    names = [place.names[sum(shares[:number]) : sum(shares[: number + 1])] for number in range(processes)]
    return [
        ProducerLoad(
            client=client,
            topics=mine,
            partitions=place.partitions,
            payload=traffic.payload,
            records_per_s=rate * -(-place.partitions // step) * len(mine),
            partition_step=step,
            duration_s=_LONGEST_S,
            each_partition=True,
        )
        for mine in names
    ]


def _lost(before: dict[tuple[str, int], int], after: dict[tuple[str, int], int], victim: int | None) -> set[tuple[str, int]]:
    if victim is not None:
        return {place for place, leader in before.items() if leader == victim}
    return {place for place, leader in before.items() if after.get(place) != leader}


def gaps_of(counts: Sequence[Counted], lost: set[tuple[str, int]], killed_at: float) -> dict[str, object]:
    """Return the measured gaps. Raises ``Unavailable`` if there are none, or too many partitions started after the kill."""
    found: list[Gap] = [gap for count in counts for gap in count.gaps]
    if not found:
        raise Unavailable("no partition acknowledged two records: raise --after")
    hit = sorted(gap.longest_s for gap in found if (gap.topic, gap.partition) in lost)
    spared = [gap.longest_s for gap in found if (gap.topic, gap.partition) not in lost]
    late = sum(gap.first_at >= killed_at for gap in found if (gap.topic, gap.partition) in lost)
    if late > len(hit) * _LATE_SHARE_MAX:
        raise Unavailable(f"{late} of {len(hit)} partitions had acknowledged nothing before the kill: raise --before")
    if not hit:
        raise Unavailable("no partition changed its leader: kill a broker that leads partitions")
    return {
        "partitions_moved": len(hit),
        "gap_median_s": statistics.median(hit),
        "gap_p99_s": hit[min(len(hit) - 1, len(hit) * 99 // 100)],
        "gap_max_s": hit[-1],
        "other_partitions_gap_max_s": max(spared, default=0.0),
    }
