"""Producer throughput: of a cluster at full speed, and of the clients alone."""

from __future__ import annotations

from stratalog_core.errors import Corrupt
from stratalog_loadgen.processes.loads import ProducerLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, failures, latencies, result, throughput, window_of
from stratalog_loadgen.settings import (
    Topics,
    Traffic,
    Window,
    as_document,
    batch_records,
    due_batch_options,
    in_flight,
    producer_options,
    validate,
    whole_batch_options,
)
from stratalog_loadgen.topics import Prepared, prepared

_MOCK_BROKERS = 3
_RECORDS_TIMEOUT_S = 3600.0


def measure_produce(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    window: Window,
    *,
    records: int = 0,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Measure records acknowledged per second between warm-up and end, or of ``records`` in total without a warm-up.

    Afterwards the topics must have grown by exactly what was sent. Raises ``Corrupt`` if an idempotent producer's did not.
    """
    with prepared(bootstrap, topics, traffic) as place:
        before = place.records()
        loads = producer_loads(place, traffic, window, records=records)
        with Workers(loads, on_progress) as workers:
            workers.begin(ProducerLoad)
            counts = workers.finish(ProducerLoad, _RECORDS_TIMEOUT_S if records else window.whole_s)
        measured = throughput(counts) | latencies(counts, "latency") | failures(counts)
        grown, sent = place.records() - before, sum(count.sent for count in counts)
        measured |= {"sent_in_all": sent, "in_the_log": grown}
        if traffic.acks == "all" and not measured["failed"] and grown != sent:
            raise Corrupt(
                f"{sent} records were acknowledged, the topics grew by {grown}: records were lost, or others write, too"
            )
        settings = as_document(topics, traffic, window, records=records or None)
        return result("produce", settings, measured, window=window_of(counts))


def measure_client_limit(traffic: Traffic, window: Window, *, on_progress: OnProgress = lambda _: None) -> Result:
    """Run the same load against librdkafka's mock brokers in each load process, to measure the client's maximum.

    The mock keeps nothing and runs in the client's process, so the figure is a lower bound of the client's limit.
    """
    client = {**traffic.client, "test.mock.num.brokers": _MOCK_BROKERS}
    mocked = Traffic(**{name: getattr(traffic, name) for name in traffic.__struct_fields__ if name != "client"}, client=client)
    place = Prepared("mock", ["bench"], 1)
    with Workers(producer_loads(place, mocked, window), on_progress) as workers:
        workers.begin(ProducerLoad)
        counts = workers.finish(ProducerLoad, window.whole_s)
    measured = throughput(counts) | failures(counts)
    return result("client limit", as_document(mocked, window), measured)


def producer_loads(
    place: Prepared,
    traffic: Traffic,
    window: Window,
    *,
    records: int = 0,
    records_per_s: float = 0.0,
    stamps: bool = False,
    whole_batches: bool = False,
) -> list[ProducerLoad]:
    """Return one load per process; producers, records and rate are spread evenly. Raises ``Invalid``."""
    validate(traffic)
    if traffic.keys != "none":
        client = producer_options(place.bootstrap, traffic)
    elif whole_batches or not records_per_s:
        client = whole_batch_options(place.bootstrap, traffic)
    else:
        client = due_batch_options(place.bootstrap, traffic, records_per_s / traffic.producers)
    shares = split(traffic.producers, traffic.processes)
    record_shares = split(records, traffic.processes)
    return [
        ProducerLoad(
            client=client,
            topics=place.names,
            partitions=place.partitions,
            producers=share,
            producers_in_all=traffic.producers,
            batch_records=batch_records(traffic),
            in_flight=in_flight(traffic),
            linger_ms=traffic.linger_ms,
            whole_batches=whole_batches,
            payload=traffic.payload,
            keys=traffic.keys,
            records_per_s=records_per_s * share / traffic.producers,
            records=record_shares[number],
            warmup_s=0.0 if records else window.warmup_s,
            duration_s=window.duration_s,
            stamps=stamps,
            seed=number + 1,
        )
        for number, share in enumerate(shares)
    ]


def split(whole: int, parts: int) -> list[int]:
    """Split ``whole`` into ``parts`` shares that differ by one at most."""
    return [whole // parts + (number < whole % parts) for number in range(parts)]
