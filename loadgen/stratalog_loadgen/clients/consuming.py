"""Consumer loads: members of groups that read at full speed. Measures rates, end-to-end latency and time to assignment."""

from __future__ import annotations

import time
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from stratalog_loadgen.clients.assignment_timer import AssignmentTimer
from stratalog_loadgen.clients.received_records import ReceivedRecords
from stratalog_loadgen.processes.control import LEAVE, LEFT, MEASURE, Control
from stratalog_loadgen.processes.loads import ConsumerLoad, Counted

_BATCH_RECORDS = 1000
_WAIT_S = 0.05
_IDLE_WAIT_S = 0.002


def run_consumers(load: ConsumerLoad, control: Control) -> Counted:
    """Subscribe at the start signal; return at the end of the load."""
    members = [_Member(load, group) for group in load.groups for _ in range(load.consumers)]
    shares = load.assigned or [[] for _ in members]
    control.wait_for_go()
    try:
        return _Reading(load, control, members, shares).run()
    finally:
        for member in members:
            member.close()


class _Member:
    def __init__(self, load: ConsumerLoad, group: str) -> None:
        self.group = group
        self.assigned = 0
        self.changed_at = 0.0
        self.closed = False
        self._consumer = Consumer({**load.client, "group.id": group} | ({"enable.partition.eof": True} if load.repeat else {}))

    def subscribe(self, topics: list[str]) -> None:
        self._consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    def assign(self, topics: list[str], partitions: list[int]) -> None:
        """Read these partitions of each topic from their beginning, without a group."""
        wanted = [TopicPartition(topic, partition, OFFSET_BEGINNING) for topic in topics for partition in partitions]
        self._consumer.assign(wanted)
        self.assigned, self.changed_at = len(wanted), time.monotonic()

    def read(self, wait_s: float) -> list[Message]:
        """Return arrived records, waiting up to ``wait_s`` for the first: ``consume`` alone would wait for a whole batch."""
        first = self._consumer.poll(wait_s) if wait_s else None
        rest: list[Message] = self._consumer.consume(_BATCH_RECORDS, 0) if first is not None or not wait_s else []
        return ([first] if first is not None else []) + rest

    def begin_again(self, messages: list[Message]) -> None:
        """Read the partitions whose ends are among ``messages`` from their beginning."""
        for message in messages:
            failure = message.error()
            if failure is not None and failure.code() == KafkaError._PARTITION_EOF:
                self._consumer.seek(
                    TopicPartition(cast(str, message.topic()), cast(int, message.partition()), OFFSET_BEGINNING)
                )

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._consumer.close()

    # An eager assignment follows a revocation of all partitions; a cooperative one adds some. The sum is right for both.
    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned += len(partitions)
        self.changed_at = time.monotonic()

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned -= len(partitions)
        self.changed_at = time.monotonic()


class _Reading:
    def __init__(self, load: ConsumerLoad, control: Control, members: list[_Member], shares: list[list[int]]) -> None:
        self._load = load
        self._control = control
        self._members = members
        self._shares = shares
        self._received = ReceivedRecords(load)
        self._assignment_timer = AssignmentTimer(control, self._changed_at)

    def run(self) -> Counted:
        for member, partitions in zip(self._members, self._shares, strict=True):
            if partitions:
                member.assign(self._load.topics, partitions)
            else:
                member.subscribe(self._load.topics)
        while self._running():
            self._turn()
        self._received.end()
        self._assignment_timer.note_assignments()
        return self._counted()

    def _running(self) -> bool:
        assigned = sum(member.assigned for member in self._members if not member.closed)
        return (
            self._control.running(self._received.all_records, assigned, rebalanced=self._assignment_timer.is_rebalanced)
            and self._control.elapsed_s() < self._load.duration_s
        )

    def _turn(self) -> None:
        if self._control.received(MEASURE):
            self._received.count_anew()
        if self._control.received(LEAVE):
            self._assignment_timer.note_leaving()
            for member in self._members[: self._load.leavers]:
                member.close()
        if self._control.received(LEFT):
            self._assignment_timer.note_leaving()
        alone = len(self._members) == 1
        got = False
        for member in self._members:
            messages = [] if member.closed else member.read(_WAIT_S if alone else 0)
            got = got or bool(messages)
            if messages:
                self._take(member.group, messages)
            if messages and self._load.repeat:
                member.begin_again(messages)
        if not got and not alone:
            time.sleep(_IDLE_WAIT_S)

    def _take(self, group: str, messages: list[Message]) -> None:
        good = [message for message in messages if message.error() is None]
        if len(good) < len(messages):
            self._note_failures(messages)
        values = [cast(bytes, message.value()) or b"" for message in good] if self._load.stamps else ()
        self._received.take(group, len(good), sum(map(len, good)), values)

    def _note_failures(self, messages: list[Message]) -> None:
        for message in messages:
            failure = message.error()
            if failure is not None and failure.code() != KafkaError._PARTITION_EOF:
                self._received.failure = failure.str()

    def _changed_at(self) -> float:
        return max((member.changed_at for member in self._members if not member.closed), default=0.0)

    def _counted(self) -> Counted:
        assigned = dict.fromkeys(self._load.groups, 0)
        for member in self._members:
            assigned[member.group] += 0 if member.closed else member.assigned
        return self._received.counted(assigned, self._assignment_timer.settled_s, self._assignment_timer.rebalance_s)
