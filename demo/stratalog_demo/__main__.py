"""``python -m stratalog_demo``: the main job, end to end, on real data. Exits 1 on any mismatch."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException
from pyspark.errors import PySparkException
from rich.console import Console

from stratalog_demo import clients, flights, spark_count, tamper
from stratalog_demo.clients import DemoFailed
from stratalog_demo.cluster import Cluster
from stratalog_demo.digest import Sent
from stratalog_demo.report import Report, Step
from stratalog_pipeline.jobs.session import job_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Segment = dict[str, Any]

TOPIC = "flights"
PARTITIONS = 12
SEEK_TO = datetime(2013, 7, 4, tzinfo=UTC)


def main() -> int:
    arguments = _arguments()
    console = Console()
    data = arguments.data or Path(tempfile.mkdtemp(prefix="stratalog-demo-"))
    cluster = Cluster(data, ["--minio"] if arguments.store == "minio" else [])
    report = Report(console)
    try:
        MainJob(cluster, report).run()
    except (DemoFailed, KafkaException, PySparkException) as failure:
        console.print(f"[bold red]FAILED[/bold red] {failure}", highlight=False)
        console.print(f"Logs and data are kept in {data}", highlight=False)
        return 1
    finally:
        if (data / "cluster.json").exists():
            cluster.attempt("cluster", "stop")
    report.table()
    if arguments.data is None:
        shutil.rmtree(data)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stratalog_demo", description=__doc__)
    parser.add_argument("--store", choices=["file", "minio"], default="file", help="where sealed history goes")
    parser.add_argument("--data", type=Path, help="keep everything here (default: a temporary directory)")
    return parser.parse_args()


class MainJob:
    """The six steps in order; each raises ``DemoFailed`` if a check fails."""

    def __init__(self, cluster: Cluster, report: Report) -> None:
        self._cluster = cluster
        self._report = report
        self._table = flights.load_table()
        self._sent = Sent(flights.events(self._table), PARTITIONS)

    def run(self) -> None:
        self._start()
        self._produce()
        self._offload()
        self._replay()
        with job_session("demo", "local[2]") as session:
            self._count_with_spark(session)
            self._detect_flipped_byte(session)

    def _start(self) -> None:
        with self._report.step("start 3 metadata nodes, 3 bookies, 2 brokers, 1 tiering worker; create a topic") as step:
            self._cluster.start()
            self._cluster.run(
                "topic",
                "create",
                TOPIC,
                "--partitions",
                str(PARTITIONS),
                "--replication-factor",
                "3",
                "--config",
                "retention.ms=-1",
            )
            processes = self._cluster.describe()["processes"]
            step.check(len(processes) >= 9, f"{len(processes)} processes serve at {self._cluster.bootstrap}")
            described = self._cluster.json("topic", "describe", TOPIC)
            step.check(len(described["partitions"]) == PARTITIONS, f"topic {TOPIC} has {PARTITIONS} partitions, RF 3")

    def _produce(self) -> None:
        total = len(self._sent.events)
        victim = self._cluster.names("broker")[-1]

        def kill() -> None:
            self._cluster.run("cluster", "kill", victim)

        with (
            self._report.step(f"produce {total:,} flights; {victim} is killed with -9 half way") as step,
            self._report.bar("producing", total) as progress,
        ):
            clients.send_all(self._cluster.bootstrap, TOPIC, self._sent, kill, progress)
            step.records = total
            step.check(self._sent.unacknowledged() == 0, f"{total:,} events acknowledged without an error")
        self._cluster.run("cluster", "restart", victim)

    def _offload(self) -> None:
        with self._report.step("seal, offload, read back, verify; delete hot copies") as step:
            self._cluster.run("tier", "offload", TOPIC, "--wait", "--delete-hot")
            status = self._cluster.json("tier", "status", TOPIC)["partitions"]
            cold = sum(partition["cold_end_offset"] - partition["cold_start_offset"] for partition in status)
            hot_bytes = sum(partition["hot_bytes"] for partition in status)
            step.records = cold
            step.check(cold == len(self._sent.events), f"{cold:,} records are cold in {len(status)} partitions")
            step.check(hot_bytes == 0, "no hot bytes are left")
            self._cluster.run("tier", "verify", TOPIC)
            step.check(True, "every segment matches its checksums and Merkle root")

    def _replay(self) -> None:
        total = len(self._sent.events)
        with (
            self._report.step("replay everything from the earliest offset, cold; seek by time") as step,
            self._report.bar("replaying", total) as progress,
        ):
            replay = clients.replay_all(self._cluster.bootstrap, TOPIC, PARTITIONS, progress)
            counted = sum(digest.count for digest in replay.digests)
            step.records = counted
            step.check(counted == total, f"{counted:,} records replayed")
            step.check(replay.out_of_sequence == 0, "offsets without gap or duplicate")
            expected = [digest.hexdigest() for digest in self._sent.digests()]
            found = [digest.hexdigest() for digest in replay.digests]
            step.check(found == expected, f"{PARTITIONS} digests of (key, value, timestamp, headers) in order are equal")
            seek_ms = int(SEEK_TO.timestamp() * 1000)
            started = clients.first_from(self._cluster.bootstrap, TOPIC, PARTITIONS, seek_ms)
            step.check(
                started == self._sent.first_not_earlier(seek_ms),
                f"a seek to {SEEK_TO:%Y-%m-%d} starts at the first record not earlier in each partition",
            )

    def _count_with_spark(self, session: SparkSession) -> None:
        with self._report.step("stop all brokers; count flights and mean delay per carrier with Spark") as step:
            self._cluster.run("cluster", "stop", *self._cluster.names("broker"))
            counted = spark_count.delays_by_carrier(session, self._cluster.store, TOPIC)
            step.records = sum(carrier.flights for carrier in counted)
            expected = flights.delays_by_carrier(self._table)
            step.check(flights.same_delays(counted, expected), f"{len(counted)} carriers: counts and means equal the CSV's")

    def _detect_flipped_byte(self, session: SparkSession) -> None:
        with self._report.step("flip one byte of one segment; verify and reads must fail; put it back") as step:
            segment = self._cluster.json("tier", "show", TOPIC)["segments"][0]
            with tamper.flipped_byte(self._cluster.store, segment["key"], segment["bytes"] // 3):
                self._check_detected(step, segment, session)
            self._cluster.run("tier", "verify", TOPIC)
            step.check(True, "after the byte is restored, everything verifies again")

    def _check_detected(self, step: Step, segment: Segment, session: SparkSession) -> None:
        verified = self._cluster.attempt("tier", "verify", TOPIC, "--json")
        step.check(verified.returncode != 0, f"`tier verify` ends with {verified.returncode}")
        finding = json.loads(verified.stdout)["findings"][0]
        offsets = f"{finding['base_offset']}..{finding['last_offset']}"
        step.check(finding["segment"] == segment["key"], f"it names the segment, block {finding['block']}, offsets {offsets}")
        try:
            spark_count.count_records(session, self._cluster.store, TOPIC)
        except PySparkException as refused:
            step.check(segment["key"] in str(refused), "Spark refuses to read it and names the segment")
        else:
            raise DemoFailed("Spark read a damaged segment without an error")
        self._check_broker_refuses(step, segment["partition"], finding["base_offset"])

    def _check_broker_refuses(self, step: Step, partition: int, offset: int) -> None:
        self._cluster.run("cluster", "restart", *self._cluster.names("broker"))
        try:
            clients.read_at(self._cluster.bootstrap, TOPIC, partition, offset)
        except KafkaException as refused:
            step.check(True, f"a consumer gets an error, not the bytes: {refused.args[0].str()}")
        else:
            raise DemoFailed(f"a broker returned the damaged record at {TOPIC}-{partition}@{offset}")


if __name__ == "__main__":
    sys.exit(main())
