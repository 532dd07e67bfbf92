"""A copier: reads committed records, writes them to another topic, and commits both in one transaction (KIP-447)."""

from __future__ import annotations

import time
from typing import cast

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from stratalog_loadgen.processes.control import MEASURE, Control, cpu_s, resident_bytes
from stratalog_loadgen.processes.loads import CopierLoad, Counted

_BATCH_RECORDS = 1000
_WAIT_S = 0.05
_TIMEOUT_S = 60.0


def run_copier(load: CopierLoad, control: Control) -> Counted:
    """Copy until the stop signal, then commit what was read."""
    copier = _Copier(load)
    control.wait_for_go()
    copier.begin()
    while control.running(copier.records, copier.assigned) and control.elapsed_s() < load.duration_s:
        if control.received(MEASURE):
            copier.count_anew()
        copier.turn()
    return copier.finish()


class _Copier:
    def __init__(self, load: CopierLoad) -> None:
        self._load = load
        self._producer = Producer({**load.client, "transactional.id": load.group})
        self._producer.init_transactions(_TIMEOUT_S)
        self._consumer = Consumer(
            {
                **load.consumer,
                "group.id": load.group,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        self._commit_at: float | None = None
        """When the open transaction is committed; None without one."""
        self.assigned = 0
        self.count_anew()

    def count_anew(self) -> None:
        self.records = self._record_bytes = self._transactions = 0
        self._began_at, self._cpu_s = time.monotonic(), cpu_s()

    def begin(self) -> None:
        self._consumer.subscribe([self._load.source], on_assign=self._note_assigned)

    def _note_assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned += len(partitions)

    def turn(self) -> None:
        """Copy what has arrived; commit when it is time."""
        now = time.monotonic()
        wait_s = _WAIT_S if self._commit_at is None else min(_WAIT_S, max(0.0, self._commit_at - now))
        first = self._consumer.poll(wait_s)
        if first is not None:
            self._copy([first, *self._consumer.consume(_BATCH_RECORDS, 0)])
        if self._commit_at is not None and time.monotonic() >= self._commit_at:
            self._commit()

    def _copy(self, messages: list[Message]) -> None:
        if self._commit_at is None:
            self._producer.begin_transaction()
            self._commit_at = time.monotonic() + self._load.commit_ms / 1000
        for message in messages:
            if message.error() is not None:
                continue
            value = cast(bytes, message.value())
            self._produce(value, cast(int, message.partition()))
            self.records += 1
            self._record_bytes += len(value)

    def _produce(self, value: bytes, partition: int) -> None:
        while True:
            try:
                self._producer.produce(self._load.target, value, partition=partition)
                return
            except BufferError:
                self._producer.poll(_WAIT_S)

    def _commit(self) -> None:
        positions = [each for each in self._consumer.position(self._consumer.assignment()) if each.offset >= 0]
        self._producer.send_offsets_to_transaction(positions, self._consumer.consumer_group_metadata(), _TIMEOUT_S)
        self._producer.commit_transaction(_TIMEOUT_S)
        self._commit_at = None
        self._transactions += 1

    def finish(self) -> Counted:
        if self._commit_at is not None:
            self._commit()
        self._consumer.close()
        return Counted(
            records=self.records,
            record_bytes=self._record_bytes,
            began_at=self._began_at,
            ended_at=time.monotonic(),
            sent=self._transactions,
            cpu_s=cpu_s() - self._cpu_s,
            resident_bytes=resident_bytes(),
        )
