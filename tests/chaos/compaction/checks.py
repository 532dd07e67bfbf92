"""The workload of compacted topics in a run: its clients, whether compaction ran, and the reads after the faults."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import OffsetSpec

from chaos.client import Client
from chaos.compaction.clients import CompactedReader, KeyedProducer, KeyedTransactionalProducer
from chaos.compaction.readings import Gap, Readings, Scan
from chaos.compaction.sends import DELETE_RETENTION_MS, PLACES, Place, Sends
from chaos.compaction.verdict import Passed, wrong_identities, wrong_last_records
from chaos.consumers import librdkafka_config
from chaos.history import Recorder
from chaos.outcomes import State
from chaos.transactions import Findings
from stratalog import kafka

_READ_S: Final = 120.0
_ATTEMPTS: Final = 4
_SHOWN: Final = 3


class CompactionChecks:
    """Create it before the clients start; ``find`` may be called after they have stopped."""

    def __init__(self, recorder: Recorder, bootstrap: str, directory: Path, *, seed: int) -> None:
        self._bootstrap = bootstrap
        self._directory = directory
        self._sends = Sends()
        self._readings = Readings()
        self.clients: Sequence[Client] = (
            KeyedProducer("keyed", recorder, self._sends, bootstrap, per_s=60, seed=seed),
            KeyedTransactionalProducer("keyed-transactional", recorder, self._sends, bootstrap, per_s=4, seed=seed + 1),
            CompactedReader("compacted", recorder, self._readings, bootstrap, seed=seed + 2),
        )

    def compacted(self) -> Counter[Place]:
        """Return by place how many superseded records readers did not find any more."""
        return Passed(self._sends.all()).compacted(self._readings.gaps())

    def uncompacted(self) -> Sequence[Place]:
        """Return the places whose readers have found every record so far."""
        compacted = self.compacted()
        return [place for place in PLACES if not compacted[place]]

    def find(self, *, is_compacted: bool) -> Findings:
        """Read everything; return what is wrong. ``is_compacted``: everything was compacted before."""
        for _ in range(_ATTEMPTS):
            began_s = time.monotonic()
            scan, unread = self._read()
            is_quick = time.monotonic() - began_s < DELETE_RETENTION_MS / 1000
            if is_quick:
                break
        sends = self._sends.all()
        starts = self._starts()
        passed, gaps = Passed(sends), self._readings.gaps()
        kinds = (
            self._readings.problems(),
            unread,
            wrong_identities(sends, self._readings.records()),
            wrong_last_records(sends, scan.records, starts, is_compacted=is_compacted, is_quick=is_quick),
            passed.wrong(gaps, starts),
        )
        acknowledged = [send for send in sends if send.state is State.COMMITTED]
        numbers = {
            "keyed records acknowledged": len(acknowledged),
            "keyed records unknown": sum(send.state is State.UNKNOWN for send in sends),
            "tombstones acknowledged": sum(send.is_tombstone for send in acknowledged),
            "keyed records left": sum(map(len, scan.records.values())),
            "keyed records that readers found compacted away": passed.compacted(gaps).total(),
        }
        self._write(scan)
        nothing = [] if acknowledged else ["no keyed record was acknowledged"]
        return Findings(problems=[*nothing, *(problem for kind in kinds for problem in islice(kind, _SHOWN))], numbers=numbers)

    def _read(self) -> tuple[Scan, Sequence[str]]:
        """Read every partition to its end; return the partitions whose end did not come, too."""
        config = {
            **librdkafka_config(self._bootstrap, "final-compacted"),
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        ends = self._offsets(OffsetSpec.latest())
        scan, consumer, open_ends = self._readings.begin(), Consumer(config), set(PLACES)
        consumer.assign([TopicPartition(*place, 0) for place in PLACES])
        deadline = time.monotonic() + _READ_S
        try:
            while open_ends and time.monotonic() < deadline:
                for message in consumer.consume(2000, timeout=1):
                    failure, place = message.error(), (message.topic() or "", message.partition() or 0)
                    if failure is None:
                        scan.add(message)
                    elif failure.code() == KafkaError._PARTITION_EOF and (message.offset() or 0) >= ends[place]:
                        open_ends.discard(place)
        finally:
            consumer.close()
        # A reader that passes over the last records of all passes over everything up to the end.
        for place in PLACES:
            last = scan.records[place][-1].offset if scan.records.get(place) else -1
            if place not in open_ends and last + 1 < ends[place]:
                self._readings.note_gap(Gap(place=place, before=last, after=ends[place], moment_s=time.monotonic()))
        return scan, [f"{topic}-{partition} was not read to its end" for topic, partition in sorted(open_ends)]

    def _write(self, scan: Scan) -> None:
        """Write sent and remaining records to the results directory, to debug a problem."""
        left = {(place, seen.offset) for place, records in scan.records.items() for seen in records}
        with (self._directory / "keyed.jsonl").open("wb") as stream:
            for send in self._sends.all():
                line = {**asdict(send), "state": send.state.value, "is_left": (send.place, send.offset) in left}
                stream.write(msgspec.json.encode(line) + b"\n")

    def _starts(self) -> dict[Place, int]:
        return self._offsets(OffsetSpec.earliest())

    def _offsets(self, spec: OffsetSpec) -> dict[Place, int]:
        return kafka.list_offsets(self._bootstrap, {TopicPartition(*place): spec for place in PLACES}, _READ_S)
