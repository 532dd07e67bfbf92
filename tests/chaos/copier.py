"""Kafka's own ``TransactionalMessageCopier``: Java's client of ``transaction.version`` 2 (KIP-890), killed repeatedly.

It reads one partition and writes each record to another one, with its own offset in the same transaction; it aborts every
third transaction on purpose, and is killed with ``kill -9`` in the middle of others. At the end readers of committed records
must find the input in the output: each record once, in order.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaError, Message, Producer

from chaos.client import Client
from chaos.history import Recorder
from chaos.stalls import processor_waits_s
from chaos.tether import tether_environment, tethered
from chaos.transactions import CommittedReader, Findings, read_committed, wrong_reads
from stratalog_loadgen.java_tools import java

INPUT: Final = "copier-input"
OUTPUT: Final = "copier-output"
CONFIGS: Final = {"min.insync.replicas": "2", "segment.ms": "4000", "segment.bytes": "131072", "local.retention.ms": "0"}
_ID: Final = "copier"
_TRANSACTION_TIMEOUT_MS: Final = 5000
"""A killed copier's offsets are readable again only after its transaction has been aborted."""
_RECORDS_PER_TRANSACTION: Final = 5
_RECORDS_UNTIL_KILL: Final = (10, 120)
_BACKLOG: Final = 1000
_STUCK_S: Final = 60.0
_STOP_S: Final = 30.0
_DRAIN_S: Final = 180.0
_RECENT_LINES: Final = 200
"""Lines of the client's log that are kept for a copier without progress."""
_SHOWN: Final = 3
_LOGGED: Final = "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.NetworkClient=debug"
SERVED: Final = re.compile(
    rb"Received (PRODUCE|END_TXN|ADD_PARTITIONS_TO_TXN|TXN_OFFSET_COMMIT) response .*?apiVersion=(\d+).*?errorCode=0\b"
)
"""The client's own log of a response without an error."""
_VERSIONS: Final = {"PRODUCE": 12, "END_TXN": 5, "TXN_OFFSET_COMMIT": 5}
"""By API, the first version of ``transaction.version`` 2."""


class CopierInput(Client):
    """Writes numbered records, idempotently, and stays ahead of the copier by a bounded number."""

    def __init__(self, name: str, recorder: Recorder, copier: Copier, bootstrap: str) -> None:
        super().__init__(name, recorder)
        self._copier = copier
        self._sent = 0
        self.acknowledged: set[str] = set()
        self._config = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "delivery.timeout.ms": 300_000,
            "socket.timeout.ms": 10_000,
            "reconnect.backoff.max.ms": 1000,
            "log_level": 0,
        }

    def run_session(self) -> None:
        producer = Producer(self._config)
        while not self.stopping.is_set():
            # The last transaction that a copier committed before it was killed may not be counted as copied.
            uncounted = self._copier.killed * _RECORDS_PER_TRANSACTION
            for _ in range(min(20, _BACKLOG + uncounted + self._copier.copied - self._sent)):
                producer.produce(INPUT, str(self._sent), partition=0, on_delivery=self._delivered)
                self._sent += 1
            producer.poll(0.1)
        producer.flush(_STOP_S)
        producer.purge()

    def _delivered(self, failure: KafkaError | None, message: Message) -> None:
        if failure is None:
            self.acknowledged.add((message.value() or b"").decode())


class Copier(Client):
    """Runs the tool. One session is one process, which is killed after some records."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, directory: Path, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._log = directory / f"{name}.log"
        self._random = random.Random(seed)
        self._progressed_s = 0.0
        self.copied = 0
        """Records in committed transactions that the tool reported before it was killed."""
        self.copied_by_killed = 0
        self._recent = deque[bytes](maxlen=_RECENT_LINES)
        self.killed = 0
        self.served: Counter[tuple[str, int]] = Counter()
        """Responses without an error, by API and version."""

    def run_session(self) -> None:
        until = self._random.randint(*_RECORDS_UNTIL_KILL)
        self._run_tool(until, _RECORDS_PER_TRANSACTION, "--enable-random-aborts")
        self.stopping.wait(0.5)

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        """Copy the rest of the input; return a problem if that takes too long."""
        self.copied_by_killed = self.copied
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            if self._run_tool(None, 100 * _RECORDS_PER_TRANSACTION) == 0:
                return ()
        return [f"{self.name} did not copy the rest within {_DRAIN_S:.0f} s: see {self._log}"]

    def _run_tool(self, kill_after: int | None, records_per_transaction: int, *options: str) -> int:
        """Run one process and return its exit code. It is killed after ``kill_after`` records, unless that is None."""
        program, *arguments = java(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", self._bootstrap, "--input-topic", INPUT, "--input-partition", "0", "--output-topic", OUTPUT),
            *("--transactional-id", _ID, "--consumer-group", _ID, "--use-group-metadata"),
            *("--transaction-size", str(records_per_transaction), "--transaction-timeout", str(_TRANSACTION_TIMEOUT_MS)),
            *options,
            heap="128m",
        )
        command = tethered([program, _LOGGED, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *arguments])
        began_s = self._progressed_s = time.monotonic()
        before, copied = self.copied, 0
        with subprocess.Popen(command, env=tether_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            watcher = threading.Thread(target=self._watch, args=(process, kill_after is not None), daemon=True)
            watcher.start()
            assert process.stdout is not None
            for line in process.stdout:
                copied = max(copied, self._take(line))
                if before + copied > self.copied:
                    self.copied, self._progressed_s = before + copied, time.monotonic()
                if kill_after is not None and copied >= kill_after and process.poll() is None:
                    # At any time of a transaction.
                    time.sleep(self._random.uniform(0, 0.1))
                    self._kill(process)
        watcher.join()
        seconds = time.monotonic() - began_s
        self._write(b"copied %d records in %.1f s and ended with %d\n" % (copied, seconds, process.returncode))
        return process.returncode

    def _watch(self, process: subprocess.Popen[bytes], ends_with_the_run: bool) -> None:
        """Kill the process at the end of the run, or if it makes no progress."""
        while process.poll() is None:
            if ends_with_the_run and self.stopping.is_set():
                self._kill(process)
            elif self._is_stuck(process.pid):
                self.sessions_given_up += 1
                self._write(b"".join(self._recent))
                # Java prints its threads.
                process.send_signal(signal.SIGQUIT)
                time.sleep(1)
                self._kill(process)
            time.sleep(0.1)

    def _is_stuck(self, pid: int) -> bool:
        """Return whether the process made no progress for too long, without its waits for a processor."""
        idle_s = time.monotonic() - self._progressed_s
        return idle_s > _STUCK_S and idle_s - sum(processor_waits_s([pid]).values()) > _STUCK_S

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self.killed += 1

    def _take(self, line: bytes) -> int:
        """Process a line of the tool's output; return the number of copied records that it reports, else 0."""
        if line.startswith(b"{"):
            try:
                return int(json.loads(line).get("totalProcessed", 0))
            except ValueError:
                # The last line of a process that was killed.
                return 0
        self._recent.append(line)
        served = SERVED.search(line)
        if served:
            self.served[served[1].decode(), int(served[2])] += 1
        elif b"DEBUG" not in line:
            self._write(line)
        return 0

    def _write(self, line: bytes) -> None:
        with self._log.open("ab") as log:
            log.write(line)


def wrong_copies(source: Sequence[str], copies: Sequence[str], acknowledged: set[str]) -> list[str]:
    """Return the problems of the copies: each record of the source must be there exactly once, in order."""
    sent, copied = Counter(source), Counter(copies)
    lost, missing, repeated = sorted(acknowledged - sent.keys()), sent - copied, copied - sent
    problems = [
        *([f"the copier's input lacks {len(lost)} acknowledged records: {lost[:_SHOWN]}"] if lost else []),
        *([f"{missing.total()} records were not copied: {sorted(missing)[:_SHOWN]}"] if missing else []),
        *([f"{repeated.total()} copies are duplicates: {sorted(repeated)[:_SHOWN]}"] if repeated else []),
    ]
    if not (missing or repeated) and source != copies:
        place = next(index for index, (each, copy) in enumerate(zip(source, copies, strict=True)) if each != copy)
        problems.append(f"copy {place} is {copies[place]} and should be {source[place]}")
    return problems


def wrong_versions(served: Counter[tuple[str, int]]) -> list[str]:
    """Return a problem for each sign that the client did not use ``transaction.version`` 2."""
    apis = {api for api, _ in served}
    return [
        *(
            f"no {api} of version {version} was served"
            for api, version in _VERSIONS.items()
            if not _count(served, api, version)
        ),
        *(["partitions were added to transactions by version 1 of the protocol"] if "ADD_PARTITIONS_TO_TXN" in apis else []),
    ]


def _count(served: Counter[tuple[str, int]], api: str, version_min: int) -> int:
    return sum(count for (name, version), count in served.items() if name == api and version >= version_min)


class CopierChecks:
    """The copier, its input, a reader of its output, and the checks."""

    def __init__(self, recorder: Recorder, bootstrap: str, directory: Path, *, seed: int) -> None:
        self._bootstrap = bootstrap
        self._copier = Copier("copier", recorder, bootstrap, directory, seed=seed)
        self._input = CopierInput("copier-input", recorder, self._copier, bootstrap)
        self._reader = CommittedReader("copies", recorder, bootstrap, OUTPUT, 1, seed=seed + 1)
        self.clients: Sequence[Client] = (self._input, self._copier, self._reader)

    def has_copied(self) -> bool:
        """Return whether copiers have copied anything; each of them is killed, at the latest when the clients stop."""
        return self._copier.copied > 0

    def find(self) -> Findings:
        """Read input and output; return what is wrong. Call after the clients have stopped and the rest is copied."""
        (source,), input_problems = read_committed(self._bootstrap, INPUT, 1)
        (copies,), output_problems = read_committed(self._bootstrap, OUTPUT, 1)
        served, killed = self._copier.served, self._copier.killed
        problems = [
            *input_problems,
            *output_problems,
            *wrong_copies([record for _, record in source], [record for _, record in copies], self._input.acknowledged),
            *wrong_reads(self._reader, [copies])[:_SHOWN],
            *wrong_versions(served),
            *([] if self._copier.copied_by_killed else ["nothing was copied before the end"]),
        ]
        numbers = {
            "records copied": len(copies),
            "records copied by copiers that were killed": self._copier.copied_by_killed,
            "copiers killed": killed,
            **{
                f"responses of {api} of version {least} or higher": _count(served, api, least)
                for api, least in _VERSIONS.items()
            },
        }
        return Findings(problems=problems, numbers=numbers)
