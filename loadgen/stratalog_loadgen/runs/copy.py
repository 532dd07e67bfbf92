"""Latency of consume-transform-produce: from a record's due time to a read_committed consumer of its copy."""

from __future__ import annotations

import secrets

import msgspec

from stratalog_loadgen.processes.loads import ConsumerLoad, CopierLoad, ProducerLoad
from stratalog_loadgen.processes.workers import OnProgress, Workers
from stratalog_loadgen.results.result import Result, behind, failures, latencies, result, throughput, window_of
from stratalog_loadgen.runs.produce import producer_loads
from stratalog_loadgen.runs.readers import ASSIGN_TIMEOUT_S, consumer_loads, wait_until_assigned
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window, as_document, consumer_options, producer_options
from stratalog_loadgen.topics import Prepared, prepared


def measure_copy(
    bootstrap: str,
    topics: Topics,
    traffic: Traffic,
    window: Window,
    *,
    records_per_s: float,
    commit_ms: float,
    on_progress: OnProgress = lambda _: None,
) -> Result:
    """Percentiles at ``records_per_s`` through a copier that commits ``commit_ms`` after the first record of a transaction."""
    with prepared(bootstrap, msgspec.structs.replace(topics, count=2), traffic) as place:
        source, target = (Prepared(bootstrap, [name], place.partitions) for name in place.names)
        loads = producer_loads(source, traffic, window, records_per_s=records_per_s, stamps=True)
        listening = consumer_loads(target, Readers(), stamps=True)
        copier = CopierLoad(
            client=producer_options(bootstrap, traffic),
            consumer=consumer_options(bootstrap, Readers(), earliest=True),
            source=source.names[0],
            target=target.names[0],
            group=f"bench-{secrets.token_hex(4)}",
            commit_ms=commit_ms,
        )
        with Workers([*loads, *listening, copier], on_progress) as workers:
            workers.begin(ConsumerLoad)
            workers.begin(CopierLoad)
            wait_until_assigned(workers, place.partitions)
            workers.follow_until(
                lambda: workers.assigned(CopierLoad) == place.partitions,
                ASSIGN_TIMEOUT_S,
                "get the copier's partitions assigned",
            )
            workers.begin(ProducerLoad)
            workers.follow_for(window.warmup_s)
            workers.measure(ConsumerLoad)
            workers.measure(CopierLoad)
            sent = workers.finish(ProducerLoad, window.whole_s)
            workers.stop(CopierLoad)
            copied = workers.finish(CopierLoad, 0)
            workers.stop(ConsumerLoad)
            received = workers.finish(ConsumerLoad, 0)
    measured = throughput(sent) | latencies(received, "end_to_end") | behind(sent, "behind") | failures(sent)
    measured |= {
        "copied_records": sum(each.records for each in copied),
        "transactions_per_s": sum(each.sent / each.elapsed_s for each in copied),
    }
    settings = as_document(topics, traffic, window, wanted_records_per_s=records_per_s, commit_ms=commit_ms)
    return result("copy", settings, measured, window=window_of(sent))
