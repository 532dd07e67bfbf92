"""The same measurements with Apache Kafka's own Java tools as the client (needs ``java`` and, once, ``mvn``)."""

from __future__ import annotations

import resource

from stratalog_core.errors import Invalid
from stratalog_loadgen import java_tools
from stratalog_loadgen.results.result import Result, result
from stratalog_loadgen.settings import Topics, Traffic, as_document
from stratalog_loadgen.topics import prepared

_RECORDS = 500_000
_WARMUP_SHARE = 10


def measure_produce(
    bootstrap: str, topics: Topics, traffic: Traffic, *, records: int = 0, records_per_s: int = -1, transaction_ms: int = 0
) -> Result:
    """``ProducerPerformance``: one producer, ``records``, of which the first tenth is a warm-up. Raises ``Invalid``.

    With ``transaction_ms`` it commits a transaction at this interval. Its payloads are random letters; its latencies count from
    the time of sending.
    """
    _only_what_java_takes(topics, traffic)
    records = records or _RECORDS
    with prepared(bootstrap, topics) as place:
        before = _children_cpu_s()
        sent = java_tools.produce(
            bootstrap,
            place.names[0],
            records=records,
            record_bytes=traffic.payload.record_bytes,
            records_per_s=records_per_s,
            warmup_records=records // _WARMUP_SHARE,
            transaction_ms=transaction_ms,
            properties=java_properties(traffic),
        )
        cpu_s = _children_cpu_s() - before
    # The CPU time includes the tool's start and its warm-up, so the divisor includes the warm-up's records.
    whole_gb = records * traffic.payload.record_bytes / 1e9
    measured = {
        "records": sent.records,
        "record_bytes_in_all": sent.records * traffic.payload.record_bytes,
        "records_per_s": sent.records_per_s,
        "megabytes_per_s": sent.records_per_s * traffic.payload.record_bytes / 1e6,
        "latency_p50_ms": sent.p50_ms,
        "latency_p99_ms": sent.p99_ms,
        "latency_p999_ms": sent.p999_ms,
        "latency_max_ms": sent.max_ms,
        "client_cpu_s_per_gb": cpu_s / whole_gb,
    }
    settings = as_document(topics, traffic, records=records, transaction_ms=transaction_ms or None)
    return result("produce", settings, measured, client=_client("ProducerPerformance"), window=sent.window)


def measure_consume(bootstrap: str, topics: Topics, traffic: Traffic, *, history_bytes: int) -> Result:
    """``ConsumerPerformance`` over an existing topic, or over ``history_bytes`` that are written first."""
    _only_what_java_takes(topics, traffic)
    with prepared(bootstrap, topics) as place:
        if topics.name is None:
            java_tools.produce(
                bootstrap,
                place.names[0],
                records=max(1, history_bytes // traffic.payload.record_bytes),
                record_bytes=traffic.payload.record_bytes,
                properties=java_properties(traffic),
            )
        read = java_tools.consume(bootstrap, place.names[0], records=place.records())
    measured = {
        "records": read.records,
        "records_per_s": read.fetching_records_per_s,
        # The tool's megabytes are 1,048,576 bytes.
        "megabytes_per_s": read.fetching_megabytes_per_s * 1.048576,
        "with_set_up_records_per_s": read.records_per_s,
    }
    settings = as_document(topics, traffic, history_bytes=history_bytes)
    return result("catch-up", settings, measured, client=_client("ConsumerPerformance"))


def java_properties(traffic: Traffic) -> dict[str, str | int]:
    """Return the settings of Java's producer. A ``batch.size`` of 1 makes batches of one record."""
    return {
        "acks": traffic.acks,
        "batch.size": 1 if traffic.batch_records == 1 else traffic.batch_bytes,
        "linger.ms": round(traffic.linger_ms),
        "compression.type": traffic.compression,
        "max.request.size": max(1_048_576, traffic.payload.record_bytes + 1024),
        **{name: str(value) for name, value in traffic.client.items()},
    }


def _only_what_java_takes(topics: Topics, traffic: Traffic) -> None:
    if traffic.producers != 1 or topics.count != 1 or traffic.keys != "none":
        raise Invalid("--client java runs one producer without keys on one topic: leave out --producers, --topics and --keys")


def _client(tool: str) -> str:
    return f"Apache Kafka {java_tools.KAFKA_VERSION} {tool}"


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
