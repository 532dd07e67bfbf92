"""Consumer throughput: of records as they are written (tail, fan-out, groups), and of records written before (catch-up)."""

from __future__ import annotations

from stratalog_core.errors import Invalid
from stratalog_loadgen.processes.loads import ConsumerLoad, Counted, ProducerLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, behind, failures, latencies, result, throughput, window_of
from stratalog_loadgen.runs.produce import producer_loads
from stratalog_loadgen.runs.readers import consumer_loads, wait_until_assigned
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window, as_document
from stratalog_loadgen.topics import Prepared, prepared

_HISTORY_TIMEOUT_S = 7200.0


def measure_tail(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    readers: Readers,
    window: Window,
    *,
    records_per_s: float = 0.0,
    leave: int = 0,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Run producers (at full speed, or at ``records_per_s``) and consumers: both rates; end-to-end latency at a fixed rate.

    ``leave`` consumers of a group leave together in the middle of the measured time. The rebalance is timed from then to the
    last change of an assignment.
    """
    stamps = records_per_s > 0
    with prepared(bootstrap, topics, traffic) as place:
        loads = producer_loads(place, traffic, window, records_per_s=records_per_s, stamps=stamps)
        with Workers(
            [*loads, *consumer_loads(place, readers, earliest=topics.name is None, stamps=stamps, leavers=leave)], on_progress
        ) as workers:
            workers.begin(ConsumerLoad)
            partitions = place.partitions * len(place.names) * readers.groups
            wait_until_assigned(workers, partitions)
            sent, received = _produce_and_read(workers, window, partitions if leave else 0)
    measured = _both(sent, received, stamps=stamps)
    settings = as_document(topics, traffic, window, wanted_records_per_s=records_per_s, readers=readers)
    return result("tail consumption", settings, measured, window=window_of(received))


def measure_catch_up(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    readers: Readers,
    *,
    history_bytes: int,
    records_per_s: float = 0.0,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Write ``history_bytes`` (or use an existing topic), then read from the start to the end as it was before the read.

    With ``records_per_s``, producers write during the read, and both rates are reported.
    """
    with prepared(bootstrap, topics, traffic) as place:
        if topics.name is None:
            _write_history(place, traffic, history_bytes, on_progress)
        wanted = place.records() * readers.groups
        if not wanted:
            raise Invalid(f"topic {place.names[0]} is empty: write to it first, or leave out --topic")
        endless = Window(warmup_s=0.0, duration_s=_HISTORY_TIMEOUT_S)
        concurrent = producer_loads(place, traffic, endless, records_per_s=records_per_s, whole_batches=True)
        writing = concurrent if records_per_s else []
        with Workers([*writing, *consumer_loads(place, readers)], on_progress) as workers:
            workers.begin(ProducerLoad)
            workers.begin(ConsumerLoad)
            workers.follow_until(lambda: workers.records(ConsumerLoad) >= wanted, _HISTORY_TIMEOUT_S, f"read {wanted} records")
            workers.stop(ConsumerLoad)
            received = workers.finish(ConsumerLoad, 0)
            workers.stop(ProducerLoad)
            sent = workers.finish(ProducerLoad, 0)
    measured = _both(sent, received, stamps=False)
    settings = as_document(
        topics,
        traffic,
        wanted_records_per_s=records_per_s,
        readers=readers,
        history_bytes=history_bytes,
        history_records=wanted,
    )
    return result("catch-up", settings, measured, window=window_of(received))


def _produce_and_read(workers: Workers, window: Window, rebalanced: int) -> tuple[list[Counted], list[Counted]]:
    """Return the producers' and the consumers' counts. ``rebalanced``: partitions to reassign after consumers left halfway."""
    workers.begin(ProducerLoad)
    workers.follow_for(window.warmup_s)
    workers.measure(ConsumerLoad)
    if rebalanced:
        workers.follow_for(window.duration_s / 2)
        workers.leave(ConsumerLoad)
    sent = workers.finish(ProducerLoad, window.whole_s)
    if rebalanced:
        wait_until_assigned(workers, rebalanced, after_leaving=True)
    workers.stop(ConsumerLoad)
    return sent, workers.finish(ConsumerLoad, 0)


def _write_history(place: Prepared, traffic: Traffic, history_bytes: int, on_progress: OnProgress) -> None:
    records = max(1, history_bytes // traffic.payload.record_bytes)
    with Workers(producer_loads(place, traffic, Window(warmup_s=0.0), records=records), on_progress) as workers:
        workers.begin(ProducerLoad)
        workers.finish(ProducerLoad, _HISTORY_TIMEOUT_S)


def _both(sent: list[Counted], received: list[Counted], *, stamps: bool) -> dict[str, object]:
    """Return the measurements; the producers' rates have a prefix."""
    measured: dict[str, object] = throughput(received)
    if sent:
        measured |= {f"produced_{name}": value for name, value in throughput(sent).items()} | failures(sent)
    if stamps:
        measured |= latencies(sent, "latency") | latencies(received, "end_to_end") | behind(sent, "behind")
    measured["settled_s"] = max(count.settled_s for count in received)
    measured["rebalance_s"] = max(count.rebalance_s for count in received) or None
    per_group: dict[str, int] = {}
    for count in received:
        for group, records in count.per_group.items():
            per_group[group] = per_group.get(group, 0) + records
    measured["slowest_group_records"], measured["fastest_group_records"] = min(per_group.values()), max(per_group.values())
    return measured
