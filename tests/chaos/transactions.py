"""Unmodified transactional producers and read_committed consumers on their own topic, and the checks of its content.

Each transaction writes one record to every partition. Some are aborted, some are left open by a producer that dies.
A producer knows the outcome of a transaction, or asked for a commit and lost the answer. At the end no aborted record may be
readable, every committed one must be, once and in its order, and a transaction is readable in all partitions or in none.

A fatal error ends a producer's session. It is a problem of the run if it came from a broker and nothing explains it.
"""

from __future__ import annotations

import random
import threading
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from chaos.client import Client
from chaos.consumers import librdkafka_config
from chaos.history import Recorder
from chaos.outcomes import State
from stratalog import kafka

TOPIC: Final = "transactions"
PARTITIONS: Final = 3
CONFIGS: Final = {"min.insync.replicas": "2", "segment.ms": "4000", "segment.bytes": "131072", "local.retention.ms": "0"}
_TIMEOUT_MS: Final = 15_000
_CALL_S: Final = 10.0
_ABORT_CHANCE: Final = 0.25
_CONFIRMED_CHANCE: Final = 0.5
"""The share of aborts that wait for their records first; the others start while the first request is in flight."""
_ABANDON_CHANCE: Final = 0.03
_END_S: Final = 60.0
"""An abandoned transaction is aborted after its timeout; the rest is for a busy machine."""
_SHOWN: Final = 3
_FENCED: Final = (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings of a workload's final reading. ``numbers`` are for the summary."""

    problems: Sequence[str]
    numbers: Mapping[str, int]


class Outcomes:
    """The outcomes of all transactions, by name; a name's records are ``NAME/PARTITION``."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._lock = threading.Lock()

    def set(self, name: str, state: State) -> None:
        with self._lock:
            self._states[name] = state

    def states(self) -> Mapping[str, State]:
        with self._lock:
            return dict(self._states)


class TransactionalClient(Client):
    """librdkafka with a transactional id. A new session fences the one before it, whatever that left open."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, *, per_s: float, seed: int) -> None:
        super().__init__(name, recorder)
        self._interval_s = 1 / per_s
        self.random = random.Random(seed)
        self._is_aborting = self._has_records = self._has_asked = False
        self.fatal_errors = Counter[str]()
        """The fatal errors that ended sessions, by name."""
        self._unexplained: list[str] = []
        self._config = {
            "bootstrap.servers": bootstrap,
            "transactional.id": name,
            "transaction.timeout.ms": _TIMEOUT_MS,
            "delivery.timeout.ms": _TIMEOUT_MS,
            "request.timeout.ms": 10_000,
            "socket.timeout.ms": 10_000,
            "reconnect.backoff.max.ms": 1000,
            "linger.ms": 5,
            "log_level": 0,
            "on_delivery": self.note_delivery,
        }

    def note_delivery(self, failure: KafkaError | None, message: Message) -> None:
        """Note a record's delivery. Subclasses with callbacks of their own call it."""
        self._has_records = self._has_records or failure is None

    def final_problems(self, bootstrap: str) -> Sequence[str]:
        shown = self._unexplained[:_SHOWN]
        return [f"{self.name} ended with a fatal error that nothing explains: {each}" for each in shown]

    def run_session(self) -> None:
        producer = Producer(self._config)
        try:
            self._until_done(lambda: producer.init_transactions(_CALL_S))
            while not self.stopping.is_set() and self._transact(producer):
                self.stopping.wait(self.random.expovariate(1) * self._interval_s)
        except KafkaException as failure:
            self._take(failure.args[0])
            self.stopping.wait(0.5)
        finally:
            producer.purge()

    def _take(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal_errors[error.name()] += 1
            is_ongoing = self._has_records and not self._has_asked
            if not is_explained(error.code(), is_aborting=self._is_aborting, is_ongoing=is_ongoing):
                self._unexplained.append(f"{error.name()}: {error.str()}")

    @abstractmethod
    def write(self, producer: Producer) -> Callable[[State], None]:
        """Produce the records of one transaction, as aborted ones; return what notes its outcome."""

    def _transact(self, producer: Producer) -> bool:
        """Carry out one transaction; return whether the producer goes on."""
        self._is_aborting = self._has_records = self._has_asked = False
        producer.begin_transaction()
        # Until a commit is requested, it can only be aborted.
        note = self.write(producer)
        if self.random.random() < _ABANDON_CHANCE:
            producer.flush(_CALL_S)
            return False
        if self.random.random() >= _ABORT_CHANCE:
            note(State.UNKNOWN)
            self._has_asked = True
            try:
                self._until_done(lambda: producer.commit_transaction(_CALL_S))
            except KafkaException as failure:
                if not failure.args[0].txn_requires_abort():
                    raise
            else:
                note(State.COMMITTED)
                return True
        elif self.random.random() < _CONFIRMED_CHANCE:
            producer.flush(_CALL_S)
        self._is_aborting = True
        self._until_done(lambda: producer.abort_transaction(_CALL_S))
        note(State.ABORTED)
        return True

    @staticmethod
    def _until_done(call: Callable[[], None]) -> None:
        """Repeat a call of the transactional API while its error is retriable. Raises ``KafkaException``."""
        deadline = time.monotonic() + _END_S
        while True:
            try:
                call()
                return
            except KafkaException as failure:
                if not failure.args[0].retriable() or time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)


def is_explained(code: int, *, is_aborting: bool, is_ongoing: bool) -> bool:
    """Return whether a transactional producer may get a fatal error with this code from a broker without a fault of its own.

    librdkafka's errors (negative) and fencing follow from time-outs, of the client or of the transaction. An abort may get
    INVALID_TXN_STATE if the transaction is not ``is_ongoing`` for sure: its commit may be decided, or its first request was
    refused when librdkafka asked for the abort (https://github.com/confluentinc/librdkafka/issues/4849).
    """
    if code < 0 or code in _FENCED:
        return True
    return code == KafkaError.INVALID_TXN_STATE and is_aborting and not is_ongoing


class TransactionalProducer(TransactionalClient):
    """Writes one record to every partition in each transaction."""

    def __init__(self, name: str, recorder: Recorder, outcomes: Outcomes, bootstrap: str, *, per_s: float, seed: int) -> None:
        super().__init__(name, recorder, bootstrap, per_s=per_s, seed=seed)
        self._outcomes = outcomes
        self._number = 0

    def write(self, producer: Producer) -> Callable[[State], None]:
        self._number += 1
        name = f"{self.name}-{self._number}"
        self._outcomes.set(name, State.ABORTED)
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, f"{name}/{partition}".encode() + bytes(self.random.randrange(500)), partition=partition)
        return partial(self._outcomes.set, name)


class CommittedReader(Client):
    """librdkafka with ``read_committed``: reads every partition from its beginning, and starts again from time to time."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, topic: str, partitions: int, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._random = random.Random(seed)
        self.seen: dict[tuple[int, int], str] = {}
        """Records by partition and offset."""
        self.conflicts: list[str] = []

    def run_session(self) -> None:
        consumer = Consumer({**librdkafka_config(self._bootstrap, self.name), "isolation.level": "read_committed"})
        consumer.assign([TopicPartition(self._topic, partition, 0) for partition in range(self._partitions)])
        until = time.monotonic() + self._random.uniform(10, 40)
        try:
            while time.monotonic() < until and not self.stopping.is_set():
                for message in consumer.consume(200, timeout=0.5):
                    if message.error() is None:
                        self._note(message.partition() or 0, message.offset() or 0, record_name(message.value()))
        finally:
            consumer.close()

    def _note(self, partition: int, offset: int, record: str) -> None:
        known = self.seen.setdefault((partition, offset), record)
        if known != record:
            self.conflicts.append(f"{self._topic}-{partition}@{offset}: {record} after {known}")


def record_name(value: bytes | None) -> str:
    """Return a record's value without its filler."""
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def read_committed(bootstrap: str, topic: str, partitions: int) -> tuple[list[list[tuple[int, str]]], list[str]]:
    """Return all committed records with their offsets, by partition, and the partitions whose end is not stable in time."""
    config = {
        **librdkafka_config(bootstrap, "final-committed"),
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    consumer = Consumer(config)
    records: list[list[tuple[int, str]]] = [[] for _ in range(partitions)]
    latest = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(partitions)}
    ends = {index: end for (_, index), end in kafka.list_offsets(bootstrap, latest, _END_S).items()}
    open_ends = set(range(partitions))
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    deadline = time.monotonic() + _END_S
    try:
        while open_ends and time.monotonic() < deadline:
            for message in consumer.consume(2000, timeout=1):
                failure, partition, offset = message.error(), message.partition() or 0, message.offset() or 0
                if failure is None:
                    records[partition].append((offset, record_name(message.value())))
                elif failure.code() == KafkaError._PARTITION_EOF and offset >= ends[partition]:
                    open_ends.discard(partition)
    finally:
        consumer.close()
    return records, [f"{topic}-{partition} is not stable up to {ends[partition]}" for partition in sorted(open_ends)]


def wrong_records(states: Mapping[str, State], partitions: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """Return what is wrong with the committed records: aborted, missing, repeated, out of order, torn."""
    found = defaultdict[str, set[int]](set)
    problems = []
    for index, records in enumerate(partitions):
        last = defaultdict[str, int](int)
        for offset, record in records:
            name, _, place = record.rpartition("/")
            producer, _, number = name.rpartition("-")
            if name not in states or place != str(index):
                problems.append(f"{record!r} at {index}@{offset} was never sent there")
                continue
            if int(number) <= last[producer]:
                problems.append(f"{record} at {index}@{offset} comes after {producer}-{last[producer]}")
            last[producer] = max(last[producer], int(number))
            found[name].add(index)
    whole = set(range(PARTITIONS))
    for name, state in states.items():
        if state is State.ABORTED and found[name]:
            problems.append(f"aborted {name} is readable in {sorted(found[name])}")
        elif state is State.COMMITTED and found[name] != whole:
            problems.append(f"committed {name} lacks {sorted(whole - found[name])}")
        elif state is State.UNKNOWN and found[name] not in (set(), whole):
            problems.append(f"{name} is torn: only in {sorted(found[name])}")
    return problems


def wrong_reads(reader: CommittedReader, partitions: Sequence[Sequence[tuple[int, str]]]) -> list[str]:
    """Return the records that a reader saw and that are not there at the end."""
    there = {(index, offset): record for index, records in enumerate(partitions) for offset, record in records}
    gone = [
        f"{record} at {place} was read as committed and is missing at the end"
        for place, record in reader.seen.items()
        if there.get(place) != record
    ]
    return reader.conflicts + gone


class TransactionChecks:
    """The clients of a run's transactions, and what is wrong with what they read and wrote."""

    def __init__(self, recorder: Recorder, bootstrap: str, *, seed: int) -> None:
        self.outcomes = Outcomes()
        self._bootstrap = bootstrap
        self._readers = [
            CommittedReader(f"committed-{each}", recorder, bootstrap, TOPIC, PARTITIONS, seed=seed + each) for each in range(2)
        ]
        producers = [
            TransactionalProducer(f"transactional{each}", recorder, self.outcomes, bootstrap, per_s=4, seed=seed + 10 + each)
            for each in range(2)
        ]
        self._producers = producers
        self.clients: Sequence[Client] = (*producers, *self._readers)

    def find(self) -> Findings:
        """Read everything that is committed; return what is wrong. Call after the clients have stopped."""
        records, unstable = read_committed(self._bootstrap, TOPIC, PARTITIONS)
        wrong = wrong_records(self.outcomes.states(), records)
        reads = [problem for reader in self._readers for problem in wrong_reads(reader, records)]
        shown = [*unstable, *wrong[:_SHOWN], *reads[:_SHOWN]]
        fatal = sum((producer.fatal_errors for producer in self._producers), Counter[str]())
        numbers = {
            "records of committed transactions": sum(map(len, records)),
            **{f"transactional sessions that ended with {error}": count for error, count in fatal.items()},
        }
        return Findings(problems=shown, numbers=numbers)
