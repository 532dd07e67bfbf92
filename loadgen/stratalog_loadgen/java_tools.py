"""Apache Kafka's jars from Maven, and the load tools in them, run against any bootstrap address.

Kafka's own tools measure both systems, so that the client's cost is the same on both sides. Needs ``java`` (17 or newer) and
``mvn``. The jars stay in a cache outside the tree.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KAFKA_VERSION = "4.3.1"
SLF4J_VERSION = "1.7.36"
"""The version of slf4j-api that Kafka depends on."""
_TIMEOUT_S = 600

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>stratalog</groupId><artifactId>kafka-control</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_ARTIFACTS = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-tools", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-storage", KAFKA_VERSION),
    ("org.slf4j", "slf4j-simple", SLF4J_VERSION),
)
SPARK_CONNECTOR_VERSION = "4.2.0"
"""The newest in Maven Central; it runs on Spark 4.3, too."""
_SPARK_CONNECTOR = (("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK_CONNECTOR_VERSION),)


class ToolFailed(Exception):
    """A Java tool failed, or its output cannot be parsed."""


def class_path() -> str:
    """Java class path with Kafka and its tools; fetched by Maven at the first call."""
    return f"{jars('kafka', KAFKA_VERSION, _ARTIFACTS)}/*"


def jars(name: str, version: str, artifacts: Sequence[tuple[str, str, str]]) -> Path:
    """Directory with the jars of ``artifacts`` (group, name, version) and of all that they need, named ``name``/``version``.

    Maven fetches them at the first call.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stratalog" / name / version
    wanted = _POM.format(dependencies="\n".join(_DEPENDENCY.format(*artifact) for artifact in artifacts))
    complete = root / "complete"
    if not complete.exists() or (root / "pom.xml").read_text() != wanted:
        complete.unlink(missing_ok=True)
        _fetch(root, wanted)
        complete.touch()
    return root / "lib"


def spark_connector(spark_jars: Path) -> list[Path]:
    """Jars of Spark's Kafka connector, without those that Spark has itself in ``spark_jars``."""
    own = {_artifact(jar) for jar in spark_jars.glob("*.jar")}
    found = jars("spark-kafka", SPARK_CONNECTOR_VERSION, _SPARK_CONNECTOR)
    return [jar for jar in sorted(found.glob("*.jar")) if _artifact(jar) not in own]


def _artifact(jar: Path) -> str:
    return jar.name.rsplit("-", 1)[0]


def _fetch(root: Path, wanted: str) -> None:
    shutil.rmtree(root / "lib", ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / "pom.xml").write_text(wanted)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={root / 'lib'}"]
    _run(["mvn", "-B", "-q", "-f", str(root / "pom.xml"), *goal])


def java(main_class: str, *arguments: str, heap: str = "512m") -> list[str]:
    """Return the command that runs one of Kafka's classes."""
    log_errors = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    return ["java", f"-Xmx{heap}", log_errors, "-cp", class_path(), main_class, *arguments]


def run_tool(main_class: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a tool and return its output. Raises ``ToolFailed`` with it if the tool failed."""
    return _run(java(main_class, *arguments), timeout_s)


def _run(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise ToolFailed(f"{command[0]} … {command[-1]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerResult:
    """The last line of ``ProducerPerformance``; latencies from send to acknowledgement.

    ``ended_at`` is when it was printed, in seconds of the machine's monotonic clock.
    """

    records: int
    records_per_s: float
    megabytes_per_s: float
    average_ms: float
    max_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    ended_at: float = 0.0

    @property
    def window(self) -> tuple[float, float]:
        """The time in which the counted records were sent."""
        return self.ended_at - self.records / self.records_per_s, self.ended_at


_PRODUCER_LINE = re.compile(
    r"(?P<records>\d+) (?:steady state )?records sent, (?P<records_per_s>[\d.]+) records/sec "
    r"\((?P<megabytes_per_s>[\d.]+) MB/sec\), "
    r"(?P<average_ms>[\d.]+) ms avg latency, (?P<max_ms>[\d.]+) ms max latency, "
    r"(?P<p50_ms>\d+) ms 50th, (?P<p95_ms>\d+) ms 95th, (?P<p99_ms>\d+) ms 99th, (?P<p999_ms>\d+) ms 99.9th"
)


def produce(
    bootstrap: str,
    topic: str,
    *,
    records: int,
    record_bytes: int,
    records_per_s: int = -1,
    warmup_records: int = 0,
    transaction_ms: int = 0,
    properties: Mapping[str, str | int],
) -> ProducerResult:
    """Run ``ProducerPerformance``; ``records_per_s`` -1: no limit. The first ``warmup_records`` do not count.

    With ``transaction_ms`` the records are sent in transactions, each committed after that time.
    """
    command = java(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", str(records), "--record-size", str(record_bytes)),
        *("--throughput", str(records_per_s), "--bootstrap-server", bootstrap, "--warmup-records", str(warmup_records)),
        *(("--transaction-duration-ms", str(transaction_ms)) if transaction_ms else ()),
        *_properties(properties),
    )
    output, ended_at = _followed(command)
    return dataclasses.replace(parse_producer(output), ended_at=ended_at)


def _followed(command: Sequence[str]) -> tuple[str, float]:
    """Run the tool; return its output and the time of its last line. Raises ``ToolFailed``."""
    printed, last_at = "", time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        overdue = threading.Timer(_TIMEOUT_S, process.kill)
        overdue.start()
        try:
            for line in process.stdout or ():
                printed, last_at = printed + line, time.monotonic()
        finally:
            overdue.cancel()
    if process.returncode != 0:
        raise ToolFailed(f"{command[0]} … {command[-1]} ended with {process.returncode}:\n{printed[-4000:]}")
    return printed, last_at


def parse_producer(output: str) -> ProducerResult:
    """Raises ``ToolFailed`` if the summary is missing."""
    found = list(_PRODUCER_LINE.finditer(output))
    if not found:
        raise ToolFailed(f"ProducerPerformance printed no summary:\n{output[-4000:]}")
    texts = found[-1].groupdict()
    return ProducerResult(records=int(texts.pop("records")), **{name: float(text) for name, text in texts.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerResult:
    """``ConsumerPerformance``: with set-up, and while fetching only."""

    records: int
    megabytes_per_s: float
    records_per_s: float
    fetching_megabytes_per_s: float
    fetching_records_per_s: float


def consume(bootstrap: str, topic: str, *, records: int, timeout_ms: int = 60_000) -> ConsumerResult:
    """Run ``ConsumerPerformance`` from the earliest offset."""
    output = run_tool(
        "org.apache.kafka.tools.ConsumerPerformance",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)),
        *("--timeout", str(timeout_ms), "--hide-header"),
    )
    return parse_consumer(output)


def parse_consumer(output: str) -> ConsumerResult:
    """Columns: start, end, MB, MB/s, records, records/s, rebalance ms, fetch ms, fetch MB/s, fetch records/s."""
    rows = [line.split(", ") for line in output.splitlines() if line.count(", ") == 9]
    if not rows:
        raise ToolFailed(f"ConsumerPerformance printed no result:\n{output[-4000:]}")
    row = rows[-1]
    return ConsumerResult(
        records=int(row[4]),
        megabytes_per_s=float(row[3]),
        records_per_s=float(row[5]),
        fetching_megabytes_per_s=float(row[8]),
        fetching_records_per_s=float(row[9]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEndResult:
    """``EndToEndLatency``: from send to receipt by a consumer, one record at a time."""

    average_ms: float
    p50_ms: float
    p99_ms: float
    p999_ms: float


_END_TO_END_AVERAGE = re.compile(r"Avg latency: ([\d.]+) ms")
_END_TO_END_PERCENTILES = re.compile(r"Percentiles: 50th = (\d+), 99th = (\d+), 99\.9th = (\d+)")


def end_to_end(bootstrap: str, topic: str, *, records: int, record_bytes: int, acks: str = "all") -> EndToEndResult:
    """Run ``EndToEndLatency``."""
    output = run_tool(
        "org.apache.kafka.tools.EndToEndLatency",
        *(bootstrap, topic, str(records), acks, str(record_bytes)),
    )
    return parse_end_to_end(output)


def parse_end_to_end(output: str) -> EndToEndResult:
    """Raises ``ToolFailed`` if the summary is missing."""
    average, percentiles = _END_TO_END_AVERAGE.search(output), _END_TO_END_PERCENTILES.search(output)
    if average is None or percentiles is None:
        raise ToolFailed(f"EndToEndLatency printed no result:\n{output[-4000:]}")
    p50, p99, p999 = map(float, percentiles.groups())
    return EndToEndResult(average_ms=float(average[1]), p50_ms=p50, p99_ms=p99, p999_ms=p999)


def _properties(properties: Mapping[str, str | int]) -> list[str]:
    """One ``--command-property`` option with all."""
    return ["--command-property", *(f"{name}={value}" for name, value in properties.items())] if properties else []
