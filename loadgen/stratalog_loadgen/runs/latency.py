"""Latency at a fixed rate: to the acknowledgement, and to a consumer."""

from __future__ import annotations

from stratalog_loadgen.processes.loads import ConsumerLoad, Counted, ProducerLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, behind, failures, latencies, result, throughput, window_of
from stratalog_loadgen.runs.produce import producer_loads
from stratalog_loadgen.runs.readers import consumer_loads, wait_until_assigned
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window, as_document
from stratalog_loadgen.topics import prepared


def measure_latency(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    window: Window,
    *,
    records_per_s: float,
    end_to_end: bool = True,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Return percentiles at ``records_per_s``, counted from each record's due time, whatever the cluster does."""
    readers = Readers()
    with prepared(bootstrap, topics, traffic) as place:
        loads = producer_loads(place, traffic, window, records_per_s=records_per_s, stamps=end_to_end)
        listening = consumer_loads(place, readers, earliest=topics.name is None, stamps=True) if end_to_end else []
        with Workers([*loads, *listening], on_progress) as workers:
            sent, received = _send_and_read(workers, window, place.partitions * len(place.names) if end_to_end else 0)
    measured = throughput(sent) | latencies(sent, "latency") | behind(sent, "behind") | failures(sent)
    if received:
        measured |= latencies(received, "end_to_end")
    settings = as_document(topics, traffic, window, wanted_records_per_s=records_per_s, end_to_end=end_to_end)
    return result("latency", settings, measured, window=window_of(sent))


def _send_and_read(workers: Workers, window: Window, partitions: int) -> tuple[list[Counted], list[Counted]]:
    """Return the counts of producers and consumers after the warm-up."""
    if partitions:
        workers.begin(ConsumerLoad)
        wait_until_assigned(workers, partitions)
    workers.begin(ProducerLoad)
    workers.follow_for(window.warmup_s)
    workers.measure(ConsumerLoad)
    sent = workers.finish(ProducerLoad, window.whole_s)
    workers.stop(ConsumerLoad)
    return sent, workers.finish(ConsumerLoad, 0)
