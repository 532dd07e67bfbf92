"""Outcomes on this cluster and on Apache Kafka, recorded side by side, and the page of their differences.

``python -m integration.compatibility`` runs ``admin_calls.py``, ``bad_batches.py``, ``described_configs.py``,
``transaction_ends.py`` and ``replica_reads.py`` against both and writes ``compatibility.json``; with ``--page`` it prints
``docs/reference/compatibility.md``, which is made from that record.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from integration import admin_calls, bad_batches, described_configs, replica_reads, transaction_ends
from integration.process_cluster import ProcessCluster

from stratalog_loadgen.java_tools import KAFKA_VERSION

RECORD: Final = Path(__file__).parent / "compatibility.json"
KAFKA, OWN = "kafka", "stratalog"
CALLS, BATCHES, CONFIGS, ENDS, READS = "calls", "batches", "configs", "ends", "reads"
REASONS: Final = {
    CALLS: admin_calls.REASONS, BATCHES: bad_batches.REASONS, CONFIGS: described_configs.REASONS,
    ENDS: transaction_ends.REASONS, READS: replica_reads.REASONS,
}  # fmt: skip
_ABSENT: Final = "absent"
_CONTROL: Final = {
    "default.replication.factor": "2", "offsets.topic.replication.factor": "2", "min.insync.replicas": "1",
    "transaction.state.log.replication.factor": "2", "transaction.state.log.min.isr": "1",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
}  # fmt: skip
_READ_TOPIC: Final = "read-from-replicas"
Outcomes = dict[str, str]


def run_all(bootstrap: str, suffix: str) -> dict[str, Outcomes]:
    """Run everything but reads from replicas against one cluster, on any state of it; return the outcomes by kind."""
    return {
        CALLS: admin_calls.run_calls(bootstrap, suffix),
        BATCHES: bad_batches.run_batches(bootstrap, f"batches-{suffix}"),
        CONFIGS: described_configs.run_describes(bootstrap, suffix),
        ENDS: transaction_ends.run_ends(bootstrap, f"ends-{suffix}"),
    }


def recorded() -> dict[str, dict[str, Outcomes]]:
    """Return the recorded outcomes by cluster and kind."""
    content: dict[str, dict[str, Outcomes]] = json.loads(RECORD.read_text())
    return content


def differences(kind: str) -> dict[str, tuple[str, str]]:
    """Return the outcomes (Kafka's, ours) that differ."""
    kafka, own = recorded()[KAFKA][kind], recorded()[OWN][kind]
    alone = set(_of_one_side(kind, is_kafkas=True)) | set(_of_one_side(kind, is_kafkas=False))
    pairs = {name: (kafka.get(name, _ABSENT), own.get(name, _ABSENT)) for name in sorted({**kafka, **own}) if name not in alone}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _of_one_side(kind: str, *, is_kafkas: bool) -> list[str]:
    """Return the configs that only Kafka has, or only we, and that the page counts instead of listing them."""
    kafka, own = recorded()[KAFKA][kind], recorded()[OWN][kind]
    only = kafka.keys() - own.keys() if is_kafkas else own.keys() - kafka.keys()
    return [name for name in only if kind == CONFIGS and described_configs.is_of_one_side(name, is_kafkas=is_kafkas)]


_HEAD: Final = f"""# Compatibility

Where Stratalog behaves differently from Apache Kafka {KAFKA_VERSION}. The same requests were sent to both; the tables list
those whose outcomes differ. `make compatibility` runs the requests and writes this page."""
_CALLS: Final = """
## Administration

Each method of Java's Admin client was called with valid and invalid arguments: {same} of {all} calls have the same outcome,
down to the class of the error. Not called, because Stratalog does not have them: quotas, SCRAM credentials, delegation tokens,
share groups and streams groups. Calls for ACLs fail at once with UnsupportedVersionException, because ApiVersions does not list
their APIs; Kafka without an authorizer answers SECURITY_DISABLED.

| call | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""
_BATCHES: Final = """
## Bad batches

{same} of {all} batches that a producer must not send (truncated, corrupt, or in another format) get the same error.
A broker always checks a batch's header and CRC. It reads the records only if the topic is compacted, if it sets
`message.timestamp.before.max.ms`, or if its `compression.type` is another codec than the batch has: for 128 records of 1 KB
this would take 14 us more, besides 6 us for the checks.

| batch | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""


_CONFIGS: Final = """
## Configs

DescribeConfigs returns the same type, default, flags, source and synonyms for {same} of {all} configs of a topic, a broker, a
group and a client metrics subscription. Not listed: {kafkas} settings that only Kafka's broker has, and {own}
configs that only Stratalog has ([settings](settings.md), [topic configs](topic-configs.md)).

| config | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""
_ENDS: Final = """
## The end of a transaction

EndTxn was sent in each state of a transactional id, as a commit and as an abort, in version 3 and in version 5, in which each
transaction has an epoch of its own: {same} of {all} answers are the same. While the markers of a decided transaction are being
written, both systems tell the client to retry. With librdkafka, an abort may end with INVALID_TXN_STATE on both
([its issue 4849](https://github.com/confluentinc/librdkafka/issues/4849)).

| request | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""
_READS: Final = """
## Reads from replicas

Fetches were sent to the owner of a partition and to its replica in another rack: {same} of {all} answers are the same.

| fetch | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""
_READS_END: Final = """
Brokers hold no data, so a replica (KIP-392) serves only records that are in the object store and no longer on bookies. For
all others it answers NOT_LEADER_OR_FOLLOWER. A follower of Kafka serves records up to its high watermark, and answers
OFFSET_OUT_OF_RANGE or OFFSET_NOT_AVAILABLE beyond it. On each of these errors, consumers return to the owner. Clients that send
no leader epoch (librdkafka before 2.1) read from the owner only. The high watermark in a replica's response is the end of the
sealed ledgers."""


def page() -> str:
    """Return ``docs/reference/compatibility.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for kind, head in ((CALLS, _CALLS), (BATCHES, _BATCHES), (CONFIGS, _CONFIGS), (ENDS, _ENDS), (READS, _READS)):
        kafkas, ours = _of_one_side(kind, is_kafkas=True), _of_one_side(kind, is_kafkas=False)
        different, names = differences(kind), {*recorded()[KAFKA][kind], *recorded()[OWN][kind]}
        names -= {admin_calls.NOT_CALLED, *kafkas, *ours}
        text = head.format(same=len(names - different.keys()), all=len(names), kafkas=len(kafkas), own=len(ours))
        yield text if different else text.partition("\n\n| ")[0]
        yield from _rows(kind, different)
    yield _READS_END


def _rows(kind: str, different: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield one row for all names that differ in the same way; what Kafka has is left out of configs that Stratalog lacks."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, (kafka, own) in different.items():
        shown = "present" if kind == CONFIGS and own == _ABSENT else kafka
        rows.setdefault((shown, own, REASONS[kind][name]), []).append(name)
    for (kafka, own, reason), names in rows.items():
        yield f"| {'<br>'.join(names)} | {kafka} | {own} | {reason} |"


def _record() -> None:
    from benchmarks.kafka_control import KafkaCluster

    with tempfile.TemporaryDirectory() as directory:
        with KafkaCluster(Path(directory), brokers=2, heap="400m", extra=_CONTROL, has_racks=True) as control:
            kafka = run_all(control.bootstrap, "s")
            replica_reads.create_topic(control.bootstrap, _READ_TOPIC)
            kafka[READS] = replica_reads.run_fetches(control.bootstrap, _READ_TOPIC)
        own_cluster = ProcessCluster(Path(directory) / "own")
        own_cluster.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1")
        try:
            own = run_all(own_cluster.bootstrap, "s")
            replica_reads.create_topic(own_cluster.bootstrap, _READ_TOPIC)
            replica_reads.offload_and_restart(own_cluster, _READ_TOPIC)
            own[READS] = replica_reads.run_fetches(own_cluster.bootstrap, _READ_TOPIC)
        finally:
            own_cluster.run("cluster", "stop")
    RECORD.write_text(json.dumps({KAFKA: kafka, OWN: own}, indent=1) + "\n")


if __name__ == "__main__":
    if "--page" in sys.argv:
        sys.stdout.write(page())
    else:
        _record()
