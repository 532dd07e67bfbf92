"""Calls of Java's Admin client against this cluster and against Apache Kafka: what came of each, recorded and compared.

``python -m integration.admin_calls`` runs ``java/AdminCalls.java`` against both and writes ``admin_calls.json``;
``python -m integration.admin_calls --page`` prints ``docs/reference/compatibility.md``, which is made from that record.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from integration.process_cluster import ProcessCluster

from stratalog_loadgen.java_tools import KAFKA_VERSION, class_path

SOURCE: Final = Path(__file__).parent / "java" / "AdminCalls.java"
RECORD: Final = Path(__file__).parent / "admin_calls.json"
NOT_CALLED: Final = "not called"
_TIMEOUT_S: Final = 240.0
_CONTROL: Final = {
    "default.replication.factor": "2", "offsets.topic.replication.factor": "2", "min.insync.replicas": "1",
    "transaction.state.log.replication.factor": "2", "transaction.state.log.min.isr": "1",
}  # fmt: skip

OTHER_ISSUES: Final = ("Acl", "Quota", "Scram", "DelegationToken", "Share", "Streams")
"""Words in the names of the calls of ACLs, quotas, SCRAM, tokens, share groups and streams groups, which are not called."""

_TRANSACTIONS: Final = "transactions and KIP-848 groups are not served yet"
REASONS: Final[Mapping[str, str]] = {
    "alterReplicaLogDirs": "brokers hold no data, so there is no directory to move a partition to",
    "clientInstanceId": "telemetry needs no plugin here; Kafka without one gives clients no id",
    "describeFeatures": _TRANSACTIONS,
    "describeProducers": _TRANSACTIONS,
    "describeTransactions, unknown": _TRANSACTIONS,
    "listTransactions": _TRANSACTIONS,
    "abortTransaction, unknown producer": _TRANSACTIONS,
}
"""Why a call differs from Apache Kafka, by its name."""


def run_calls(bootstrap: str, suffix: str) -> dict[str, str]:
    """Run all calls; return the outcomes by call."""
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"]
    command = ["java", *options, "-cp", class_path(), str(SOURCE), bootstrap, suffix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (line.partition("\t") for line in done.stdout.splitlines() if "\t" in line)
    return {call: outcome for call, _, outcome in rows}


def recorded() -> dict[str, dict[str, str]]:
    """Return the recorded outcomes by cluster (``kafka``, ``stratalog``) and call."""
    content: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return content


def differences() -> dict[str, tuple[str, str]]:
    """Return the outcomes (Kafka's, ours) of the calls that differ."""
    record = recorded()
    kafka, own = record["kafka"], record["stratalog"]
    return {call: (kafka[call], own[call]) for call in kafka if own[call] != kafka[call]}


_HEAD = f"""# Compatibility

Java's Admin client calls each of its methods with good and bad arguments, against Stratalog and against Apache Kafka
{KAFKA_VERSION}: {{same}} of {{all}} calls have the same outcome, down to the class of the error. `make compatibility` runs both
and writes this page. ACLs, quotas, SCRAM credentials, delegation tokens, share groups and streams groups are not served and not
called.

| call | Apache Kafka | Stratalog | why |
| --- | --- | --- | --- |"""


def page() -> str:
    """Return ``docs/reference/compatibility.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    different, calls = differences(), recorded()["kafka"].keys() - {NOT_CALLED}
    yield _HEAD.format(same=len(calls - different.keys()), all=len(calls))
    for call, (kafka, own) in different.items():
        yield f"| `{call}` | {kafka} | {own} | {REASONS[call]} |"


def _record() -> None:
    from benchmarks.kafka_control import KafkaCluster

    with tempfile.TemporaryDirectory() as directory:
        with KafkaCluster(Path(directory), brokers=2, heap="400m", extra=_CONTROL) as control:
            kafka = run_calls(control.bootstrap, "s")
        own_cluster = ProcessCluster(Path(directory) / "own")
        own_cluster.run("cluster", "start", "--metadata", "3", "--bookies", "3", "--brokers", "2", "--tiering", "1")
        try:
            own = run_calls(own_cluster.bootstrap, "s")
        finally:
            own_cluster.run("cluster", "stop")
    RECORD.write_text(json.dumps({"kafka": kafka, "stratalog": own}, indent=1) + "\n")


if __name__ == "__main__":
    if "--page" in sys.argv:
        sys.stdout.write(page())
    else:
        _record()
