"""Calls of each method of Java's Admin client against a cluster, and what came of them (``java/AdminCalls.java``)."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stratalog_loadgen.java_tools import class_path

SOURCE: Final = Path(__file__).parent / "java" / "AdminCalls.java"
NOT_CALLED: Final = "not called"
"""The name of the outcome that lists the methods without a call."""
_TIMEOUT_S: Final = 240.0

OTHER_ISSUES: Final = ("Quota", "Scram", "DelegationToken", "Share", "Streams")
"""Words in the names of the calls of quotas, SCRAM, tokens, share groups and streams groups, which are not called."""

_NO_ACLS: Final = "there are no ACLs, and ApiVersions does not list their APIs; Kafka lists them, and needs an authorizer"
REASONS: Final[Mapping[str, str]] = {
    "describeAcls": _NO_ACLS,
    "createAcls": _NO_ACLS,
    "deleteAcls": _NO_ACLS,
    "alterReplicaLogDirs": "brokers hold no data, so there is no directory to move a partition to",
    "clientInstanceId": "telemetry works without a plugin; Kafka without one assigns no id",
}
"""Why a call differs from Apache Kafka, by its name."""


def run_calls(bootstrap: str, suffix: str) -> dict[str, str]:
    """Run all calls; return the outcomes by call. ``suffix`` makes the names of topics and groups unique."""
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"]
    command = ["java", *options, "-cp", class_path(), str(SOURCE), bootstrap, suffix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = (line.partition("\t") for line in done.stdout.splitlines() if "\t" in line)
    return {call: outcome for call, _, outcome in rows}
