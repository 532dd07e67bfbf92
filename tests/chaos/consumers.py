"""Unmodified consumers that record every poll: with random assignments, along the tail, and as members of groups."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as AsyncTopicPartition
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError as AsyncKafkaError
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as PythonTopicPartition
from kafka.errors import KafkaError as PythonKafkaError

from chaos.client import Client
from chaos.history import Pair, Recorder
from chaos.workload import KEYS, TOPICS, decode, key_of, place_of

_POLL_S: Final = 0.5
_BATCH_MAX: Final = 200
_GROUP: Final = "chaos-group"
_BALANCED_GROUP: Final = "chaos-balanced-group"
_CLASSIC_ONLY: Final = ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")
"""Settings of the classic protocol; with the consumer protocol the broker decides."""
_CLOSE_S: Final = 45.0
_MEMBERSHIP_S: Final = 45.0
"""A member leaves and rejoins after this time, times a half to one and a half."""


class Reader:
    """Records one process's polls and assignments in the history."""

    def __init__(self, name: str, recorder: Recorder, group: str = "") -> None:
        self._fields: dict[str, Any] = {"client": name, "group": group}
        self._recorder = recorder
        self._process = recorder.new_process()
        self._pairs: dict[int, list[Pair]] = {}

    def assigned(self, keys: Iterable[int], *, from_beginning: bool = False) -> None:
        """Record that the process reads ``keys`` from now on."""
        fields = {**self._fields, "keys": tuple(sorted(keys)), "from_beginning": from_beginning}
        self._recorder.record(self._process, "invoke", "assign", **fields)
        self._recorder.record(self._process, "ok", "assign", **fields)

    def subscribed(self) -> None:
        self._recorder.record(self._process, "invoke", "subscribe", **self._fields, keys=KEYS)
        self._recorder.record(self._process, "ok", "subscribe", **self._fields, keys=KEYS)

    def rebalanced(self, keys: Iterable[int]) -> None:
        """Record that the group assigned ``keys``."""
        self._recorder.record(self._process, "ok", "rebalance", **self._fields, keys=tuple(sorted(keys)))

    def begin(self) -> None:
        self._pairs = {}
        self._recorder.record(self._process, "invoke", "poll", **self._fields)

    def add(self, topic: str, partition: int, offset: int, content: bytes | None) -> int:
        """Add one record to the poll; return its key."""
        key = key_of(topic, partition)
        self._pairs.setdefault(key, []).append((offset, decode(key, content)))
        return key

    def end(self) -> dict[int, int]:
        """Record the end of the poll; return the next offset of each key in it."""
        self._recorder.record(self._process, "ok", "poll", **self._fields, polled=self._pairs)
        following = {key: pairs[-1][0] + 1 for key, pairs in self._pairs.items()}
        self._pairs = {}
        return following

    def committing(self, offsets: dict[int, int]) -> None:
        self._recorder.record(self._process, "invoke", "commit", **self._fields, committed=offsets)

    def committed(self, offsets: dict[int, int], error: str = "") -> None:
        self._recorder.record(
            self._process, "info" if error else "ok", "commit", **self._fields, committed=offsets, error=error
        )


def librdkafka_config(bootstrap: str, group: str) -> dict[str, Any]:
    """Return the common configuration of all librdkafka consumers."""
    return {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 10_000,
        "heartbeat.interval.ms": 1000,
        "partition.assignment.strategy": "roundrobin",
        "reconnect.backoff.max.ms": 1000,
        "socket.timeout.ms": 10_000,
        "log_level": 0,
    }


class Replayer(Client):
    """librdkafka with assigned partitions: reads some thousand records of a few keys, from the beginning or a random offset."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._random = random.Random(seed)

    def run_session(self) -> None:
        reader = Reader(self.name, self.recorder)
        consumer = Consumer(librdkafka_config(self._bootstrap, self.name))
        try:
            for _ in range(5):
                if self.stopping.is_set():
                    return
                self._assign(consumer, reader)
                self._read(consumer, reader, time.monotonic() + self._random.uniform(3, 12))
        finally:
            consumer.close()

    def _assign(self, consumer: Consumer, reader: Reader) -> None:
        keys = self._random.sample(KEYS, self._random.randint(1, 3))
        from_beginning = self._random.random() < 0.4
        places = []
        for key in keys:
            topic, partition = place_of(key)
            places.append(TopicPartition(topic, partition, 0 if from_beginning else self._start(consumer, topic, partition)))
        reader.assigned(keys, from_beginning=from_beginning)
        consumer.assign(places)

    def _start(self, consumer: Consumer, topic: str, partition: int) -> int:
        try:
            _, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=2)
        except KafkaException:
            return 0
        return self._random.randint(0, max(high, 0))

    def _read(self, consumer: Consumer, reader: Reader, until: float) -> None:
        while time.monotonic() < until and not self.stopping.is_set():
            reader.begin()
            for message in consumer.consume(_BATCH_MAX, timeout=_POLL_S):
                add_message(reader, message)
            reader.end()


def add_message(reader: Reader, message: Message) -> None:
    """Record one of librdkafka's messages; errors are not recorded."""
    if message.error() is None:
        reader.add(message.topic() or "", message.partition() or 0, message.offset() or 0, message.value())


class TailReader(Client):
    """kafka-python with assigned partitions: one consumer that reads everything in order, from the beginning on."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap

    def run_session(self) -> None:
        try:
            consumer = KafkaConsumer(
                bootstrap_servers=self._bootstrap.split(","),
                client_id=self.name,
                group_id=None,
                auto_offset_reset="earliest",
                max_poll_records=_BATCH_MAX,
                reconnect_backoff_max_ms=1000,
                request_timeout_ms=10_000,
            )
        except PythonKafkaError:
            self.stopping.wait(1)
            return
        reader = Reader(self.name, self.recorder)
        reader.assigned(KEYS, from_beginning=True)
        consumer.assign([PythonTopicPartition(*place_of(key)) for key in KEYS])
        try:
            while not self.stopping.is_set():
                self._poll(consumer, reader)
        finally:
            consumer.close()

    def _poll(self, consumer: KafkaConsumer, reader: Reader) -> None:
        reader.begin()
        try:
            found = consumer.poll(timeout_ms=int(_POLL_S * 1000))
        except PythonKafkaError:
            found = {}
        for place, records in found.items():
            for record in records:
                reader.add(place.topic, place.partition, record.offset, record.value)
        reader.end()


def _closed(consumer: Consumer) -> bool:
    """Leave the group; return whether the close ended in time.

    librdkafka's close waits without a limit for commits that found no coordinator (its issue 3740). Such a consumer is left
    running in its thread: the broker removes the member, and the run continues with another one.
    """

    def close() -> None:
        consumer.unsubscribe()
        consumer.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)
    return not closing.is_alive()


class GroupMember(Client):
    """librdkafka as a member of a group: commits after each poll, leaves and rejoins from time to time.

    ``is_balanced``: the group uses the consumer protocol (KIP-848), which moves partitions one by one.
    """

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, *, seed: int, is_balanced: bool = False) -> None:
        super().__init__(name, recorder)
        self._group = _BALANCED_GROUP if is_balanced else _GROUP
        self._config = librdkafka_config(bootstrap, self._group)
        if is_balanced:
            self._config = {key: value for key, value in self._config.items() if key not in _CLASSIC_ONLY}
            self._config["group.protocol"] = "consumer"
        self._random = random.Random(seed)

    def run_session(self) -> None:
        reader = Reader(self.name, self.recorder, self._group)
        held: set[int] = set()

        def committed(failure: KafkaError | None, places: list[TopicPartition]) -> None:
            errors = [failure.name()] if failure else [place.error.name() for place in places if place.error]
            reader.committed({key_of(place.topic, place.partition): place.offset for place in places}, ",".join(errors))

        consumer = Consumer({**self._config, "on_commit": committed})
        reader.subscribed()
        reader.begin()

        def rebalanced() -> None:
            # Records polled so far belong before the rebalance.
            reader.end()
            reader.rebalanced(held)
            reader.begin()

        def assigned(_: Consumer, places: list[TopicPartition]) -> None:
            held.update(key_of(place.topic, place.partition) for place in places)
            rebalanced()

        def revoked(_: Consumer, places: list[TopicPartition]) -> None:
            held.difference_update(key_of(place.topic, place.partition) for place in places)
            rebalanced()

        consumer.subscribe(list(TOPICS), on_assign=assigned, on_revoke=revoked, on_lost=revoked)
        until = time.monotonic() + _MEMBERSHIP_S * self._random.uniform(0.5, 1.5)
        try:
            while time.monotonic() < until and not self.stopping.is_set():
                self._poll(consumer, reader)
        finally:
            reader.end()
            if not _closed(consumer):
                self.sessions_given_up += 1

    def _poll(self, consumer: Consumer, reader: Reader) -> None:
        deadline = time.monotonic() + _POLL_S
        for _ in range(_BATCH_MAX):
            # One at a time, so that a rebalance comes between two messages, never within a batch.
            message = consumer.poll(max(0.0, deadline - time.monotonic()))
            if message is None:
                break
            add_message(reader, message)
        self._commit(consumer, reader, reader.end())
        reader.begin()

    def _commit(self, consumer: Consumer, reader: Reader, offsets: dict[int, int]) -> None:
        if not offsets:
            return
        reader.committing(offsets)
        try:
            # A synchronous commit of librdkafka has been seen to wait forever, through restarts of all brokers.
            consumer.commit(offsets=[TopicPartition(*place_of(key), offset) for key, offset in offsets.items()])
        except KafkaException as failure:
            reader.committed(offsets, failure.args[0].name())


class AsyncGroupMember(Client):
    """aiokafka as a member of the same group."""

    def __init__(self, name: str, recorder: Recorder, bootstrap: str, *, seed: int) -> None:
        super().__init__(name, recorder)
        self._bootstrap = bootstrap
        self._random = random.Random(seed)

    def run_session(self) -> None:
        asyncio.run(self._belong())

    async def _belong(self) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            client_id=self.name,
            group_id=_GROUP,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1000,
            request_timeout_ms=12_000,
            partition_assignment_strategy=(RoundRobinPartitionAssignor,),
        )
        reader = Reader(self.name, self.recorder, _GROUP)
        consumer.subscribe(list(TOPICS), listener=_Rebalances(reader))
        reader.subscribed()
        try:
            await consumer.start()
            until = time.monotonic() + _MEMBERSHIP_S * self._random.uniform(0.5, 1.5)
            while time.monotonic() < until and not self.stopping.is_set():
                await self._poll(consumer, reader)
        except AsyncKafkaError:
            await asyncio.sleep(0.5)
        finally:
            # stop() raises the cancellation of one of its own fetches that was about to be retried.
            with suppress(asyncio.CancelledError):
                await consumer.stop()

    async def _poll(self, consumer: AIOKafkaConsumer, reader: Reader) -> None:
        reader.begin()
        found = await consumer.getmany(timeout_ms=int(_POLL_S * 1000), max_records=_BATCH_MAX)
        for place, records in found.items():
            for record in records:
                reader.add(place.topic, place.partition, record.offset, record.value)
        offsets = reader.end()
        if not offsets:
            return
        reader.committing(offsets)
        try:
            await consumer.commit({self._place(key): offset for key, offset in offsets.items()})
        except AsyncKafkaError as failure:
            reader.committed(offsets, type(failure).__name__)
        else:
            reader.committed(offsets)

    @staticmethod
    def _place(key: int) -> Any:
        return AsyncTopicPartition(*place_of(key))


class _Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka reports rebalances from its own task during a poll: the poll continues with the new assignment."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def on_partitions_revoked(self, revoked: Any) -> None:
        self._reader.rebalanced(())

    async def on_partitions_assigned(self, assigned: Any) -> None:
        self._reader.rebalanced(key_of(place.topic, place.partition) for place in assigned)
