"""Outcomes on this cluster and on Apache Kafka, recorded side by side, and the page of their differences.

``python -m integration.compatibility`` runs ``admin_calls.py`` and ``bad_batches.py`` against both and writes
``compatibility.json``; with ``--page`` it prints ``docs/reference/compatibility.md``, which is made from that record.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from integration import admin_calls, bad_batches
from integration.process_cluster import ProcessCluster

from stratalog_loadgen.java_tools import KAFKA_VERSION

RECORD: Final = Path(__file__).parent / "compatibility.json"
KAFKA, OWN = "kafka", "stratalog"
CALLS, BATCHES = "calls", "batches"
REASONS: Final = {CALLS: admin_calls.REASONS, BATCHES: bad_batches.REASONS}
_CONTROL: Final = {
    "default.replication.factor": "2", "offsets.topic.replication.factor": "2", "min.insync.replicas": "1",
    "transaction.state.log.replication.factor": "2", "transaction.state.log.min.isr": "1",
}  # fmt: skip
Outcomes = dict[str, str]


def run_all(bootstrap: str, suffix: str) -> dict[str, Outcomes]:
    """Run everything against one cluster; return the outcomes by kind."""
    return {
        CALLS: admin_calls.run_calls(bootstrap, suffix),
        BATCHES: bad_batches.run_batches(bootstrap, f"batches-{suffix}"),
    }


def recorded() -> dict[str, dict[str, Outcomes]]:
    """Return the recorded outcomes by cluster and kind."""
    content: dict[str, dict[str, Outcomes]] = json.loads(RECORD.read_text())
    return content


def differences(kind: str) -> dict[str, tuple[str, str]]:
    """Return the outcomes (Kafka's, ours) that differ."""
    kafka, own = recorded()[KAFKA][kind], recorded()[OWN][kind]
    return {name: (kafka[name], own[name]) for name in kafka if own[name] != kafka[name]}


_HEAD: Final = f"""# Compatibility

What is done by hand and by Java's Admin client has the same outcome here as on Apache Kafka {KAFKA_VERSION}, except where a
table says so. `make compatibility` runs both and writes this page."""
_CALLS: Final = """
## Administration

Java's Admin client calls each of its methods, with good and bad arguments: {same} of {all} calls have the same outcome, down to
the class of the error. ACLs, quotas, SCRAM credentials, delegation tokens, share groups and streams groups are not served and
not called.

| call | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""
_BATCHES: Final = """
## Bad batches

{same} of {all} batches that a producer may not send, cut short, corrupt or of another format, get the same error.

| batch | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""


_READS: Final = """
## Reads from replicas

Brokers hold no data, so a replica (KIP-392) serves only what is in the object store and no longer on bookies. Elsewhere it
answers NOT_LEADER_OR_FOLLOWER; a follower of Kafka serves up to its high watermark and answers OFFSET_OUT_OF_RANGE or
OFFSET_NOT_AVAILABLE beyond. Consumers return to the owner for each of these. Clients that send no leader epoch, as librdkafka
before 2.1, read from the owner only. The high watermark in a replica's response is the end of the sealed ledgers."""


def page() -> str:
    """Return ``docs/reference/compatibility.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for kind, head in ((CALLS, _CALLS), (BATCHES, _BATCHES)):
        different, names = differences(kind), recorded()[KAFKA][kind].keys() - {admin_calls.NOT_CALLED}
        yield head.format(same=len(names - different.keys()), all=len(names))
        for name, (kafka, own) in different.items():
            yield f"| {name} | {kafka} | {own} | {REASONS[kind][name]} |"
    yield _READS


def _record() -> None:
    from benchmarks.kafka_control import KafkaCluster

    with tempfile.TemporaryDirectory() as directory:
        with KafkaCluster(Path(directory), brokers=2, heap="400m", extra=_CONTROL) as control:
            kafka = run_all(control.bootstrap, "s")
        own_cluster = ProcessCluster(Path(directory) / "own")
        own_cluster.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1")
        try:
            own = run_all(own_cluster.bootstrap, "s")
        finally:
            own_cluster.run("cluster", "stop")
    RECORD.write_text(json.dumps({KAFKA: kafka, OWN: own}, indent=1) + "\n")


if __name__ == "__main__":
    if "--page" in sys.argv:
        sys.stdout.write(page())
    else:
        _record()
