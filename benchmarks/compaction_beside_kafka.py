"""Measures Apache Kafka's log cleaner and our compaction in turns, on the same batches: MB of records per second of a core.

One Kafka broker with one cleaner thread. Each turn produces a topic that is not cleaned, then lets the cleaner have it, and
reads what the cleaner thread used from ``/proc``: garbage collection and compilation, in threads of their own, are in the
figure of the whole process. Ours is ``compaction.py``: map, filter and check, without a store; the verification of blocks by
SHA-256, which Kafka's logs do not have, is in a column of its own. Each one's first turn warms it up. Run it with
``make bench-compaction``; it takes about three minutes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from benchmarks.compaction import Measured, history, measured
from benchmarks.kafka_control import KafkaCluster
from stratalog_core.batches.batch import read_header
from stratalog_core.batches.compression import NAMES
from stratalog_core.batches.records import iterate_records
from stratalog_loadgen.java_tools import KAFKA_VERSION

_TURNS: Final = 3
_TIMEOUT_S: Final = 120.0
_STEP_S: Final = 0.05
_CLEANER: Final = "kafka-log-clean"
"""Name of the cleaner's thread, as far as the kernel keeps it."""
_BROKER: Final = {
    "default.replication.factor": "1", "min.insync.replicas": "1", "offsets.topic.replication.factor": "1",
    "log.cleaner.threads": "1", "log.cleaner.backoff.ms": "100", "log.cleaner.dedupe.buffer.size": str(256 * 1024 * 1024),
}  # fmt: skip
_LAZY: Final = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "min.compaction.lag.ms": "0"}


class _Used(NamedTuple):
    thread_s: float
    process_s: float


class _Cleaner:
    """The log cleaner of a broker."""

    def __init__(self, cluster: KafkaCluster, data: Path) -> None:
        self._cluster = cluster
        self._data = data
        self._admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        self._process = psutil.Process(cluster.pids()[0])

    def clean(self, topic: str, value_bytes: int, codec: int) -> _Used:
        """Produce the history to a new topic, clean it, and return the processor time of that."""
        self._admin.create_topics([NewTopic(topic, 1, 1, config=_LAZY)])[topic].result()
        end = self._produce(topic, value_bytes, codec)
        before = self._used()
        self._alter(topic, "min.cleanable.dirty.ratio", "0")
        deadline = time.monotonic() + _TIMEOUT_S
        while self._cleaned(topic) < end:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} was cleaned up to offset {self._cleaned(topic)} of {end}")
            time.sleep(_STEP_S)
        after = self._used()
        self._admin.delete_topics([topic])[topic].result()
        return _Used(after.thread_s - before.thread_s, after.process_s - before.process_s)

    def _produce(self, topic: str, value_bytes: int, codec: int) -> int:
        """Append the history and one record more, in a segment of its own; return the history's end."""
        name = next(name for name, number in NAMES.items() if number == codec)
        producer = Producer(
            {"bootstrap.servers": self._cluster.bootstrap, "compression.type": name, "batch.size": 65_536, "linger.ms": 50}
        )
        count = 0
        for batch in history(value_bytes, codec):
            for record in iterate_records(batch, read_header(batch)):
                producer.produce(topic, key=record.key, value=record.value, partition=0)
                count += 1
            producer.poll(0)
            if len(producer) > 50_000:
                producer.flush()
        producer.flush()
        self._alter(topic, "segment.ms", "1")
        time.sleep(0.5)
        producer.produce(topic, key=b"last", value=b"", partition=0)
        producer.flush()
        return count

    def _alter(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self._admin.incremental_alter_configs([resource])[resource].result()

    def _cleaned(self, topic: str) -> int:
        """The offset up to which the topic is clean, from the cleaner's checkpoint."""
        found = list(self._data.rglob("cleaner-offset-checkpoint"))
        lines = [line.split() for path in found for line in path.read_text().splitlines()]
        return max((int(line[2]) for line in lines if line[:2] == [topic, "0"]), default=0)

    def _used(self) -> _Used:
        tasks = Path(f"/proc/{self._process.pid}/task")
        cleaners = {int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().startswith(_CLEANER)}
        if not cleaners:
            raise LookupError(f"no thread of process {self._process.pid} is called {_CLEANER}")
        thread_s = sum(each.user_time + each.system_time for each in self._process.threads() if each.id in cleaners)
        times = self._process.cpu_times()
        return _Used(thread_s, times.user + times.system)


def _compare(cleaner: _Cleaner, value_bytes: int, codec_name: str) -> str:
    codec = NAMES[codec_name]
    theirs, ours = list[_Used](), list[Measured]()
    for turn in range(_TURNS):
        theirs.append(cleaner.clean(f"clean-{value_bytes}-{codec_name}-{turn}", value_bytes, codec))
        ours.append(measured(value_bytes, codec))
    thread_s, process_s = min(each.thread_s for each in theirs), min(each.process_s for each in theirs)
    ours_s, with_segments_s = min(each.total_s for each in ours), min(each.total_s + each.segments_s for each in ours)
    rates = [ours[0].plain_bytes / seconds / 1e6 for seconds in (ours_s, with_segments_s, thread_s, process_s)]
    ratios = [rates[0] / rates[2], rates[1] / rates[2], rates[0] / rates[3]]
    cells = (value_bytes, codec_name, *(f"{rate:.0f}" for rate in rates), *(f"{ratio:.2f}" for ratio in ratios))
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, KafkaCluster(Path(directory), brokers=1, extra=_BROKER) as cluster:
        cleaner = _Cleaner(cluster, Path(directory))
        print(f"MB of records/s of a core, best of {_TURNS} turns; Apache Kafka {KAFKA_VERSION}\n")
        ours = "Stratalog | with segments"
        ratios = "ratio to the thread | with segments | to the process"
        print(f"| value bytes | codec | {ours} | Kafka, cleaner's thread | Kafka, process | {ratios} |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for value_size in (100, 1_000, 10_000):
            for name in ("none", "zstd"):
                print(_compare(cleaner, value_size, name), flush=True)
