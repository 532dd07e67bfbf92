"""Members of the consumer protocol as clients implement it (KIP-848), and a coordinator whose log a test controls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.known_topics import KnownTopics

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup
from stratalog_broker.coordination.groups.core.consumer.model import Partition
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits, Timeouts
from stratalog_broker.coordination.groups.core.coordinator import GroupCoordinator, Work, Write
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant

GROUP = "group"
REBALANCE_MS = 20_000
DAY_MS = 86_400_000
FENCED = frozenset({ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id})


@dataclass(slots=True)
class Member:
    """What a client knows. ``owned`` are the partitions it may read; it revokes those that leave its assignment at once."""

    member_id: str
    topics: tuple[str, ...] = ("t",)
    pattern: str | None = None
    instance_id: str | None = None
    assignor: str | None = None
    epoch: int = 0
    owned: set[Partition] = field(default_factory=set)
    assignment: frozenset[Partition] = frozenset()
    must_repeat: bool = False
    """After an error or without an answer the client does not know what the coordinator knows."""

    def request(self, ticket: int, *, full: bool = False) -> HeartbeatRequest:
        """Return the next heartbeat: a full one to join or after an error."""
        request = HeartbeatRequest(
            ticket=ticket, member_id=self.member_id, member_epoch=self.epoch, owned=frozenset(self.owned),
            instance_id=self.instance_id,
        )  # fmt: skip
        if self.epoch and not full and not self.must_repeat:
            return request
        return replace(
            request, rebalance_timeout_ms=REBALANCE_MS, topic_names=self.topics, topic_pattern=self.pattern,
            assignor=self.assignor,
        )  # fmt: skip

    def hear(self, answer: HeartbeatAnswer) -> None:
        """Do what an answer says: move to its epoch and assignment, or give up everything and join again."""
        self.must_repeat = answer.error is not ErrorCode.none
        if answer.error in FENCED:
            self.epoch, self.assignment = 0, frozenset()
            self.owned.clear()
        elif answer.error is ErrorCode.none:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                self.assignment = answer.assignment
                self.owned &= answer.assignment
                self.owned |= answer.assignment


class Log:
    """A coordinator, the records that are being written, and those that are in the log."""

    def __init__(self, topics: KnownTopics, *, assignment_ms: int = 1_000, **limits: Any) -> None:
        self.topics = topics
        timeouts = Timeouts(assignment_ms=assignment_ms)
        self.limits = CoordinatorLimits(consumer=ConsumerLimits(timeouts_of=lambda _: timeouts, **limits))
        self.now = Instant(1_000, 100 * DAY_MS)
        self.records: list[CoordinatorRecord] = []
        self.writing: list[Write] = []
        self.uncertain: list[Write] = []
        """Writes that failed with an unknown outcome: their records may be in the log before those of a later write."""
        self.answers: dict[int, Any] = {}
        self.tickets = 0
        self.fail_over()

    def fail_over(self) -> None:
        """Replay the log, as the next coordinator does; what is not in it yet is lost."""
        self.writing.clear()
        self.uncertain.clear()
        self.store = replayed(self.records)
        self.core = GroupCoordinator(self.limits, self.store, self.topics, self.now)

    @property
    def group(self) -> ConsumerGroup:
        found = self.core.table.consumers.find(GROUP)
        assert found is not None
        return found

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def send(self, request: HeartbeatRequest) -> None:
        self.do(self.core.consumer_heartbeat(GROUP, request, self.now))

    def ask(self, request: HeartbeatRequest) -> HeartbeatAnswer:
        """Send a heartbeat and confirm all writes; return the answer."""
        self.send(request)
        self.confirm_all()
        answer = self.answers.pop(request.ticket)
        assert isinstance(answer, HeartbeatAnswer)
        return answer

    def beat(self, *members: Member, full: bool = False) -> list[HeartbeatAnswer]:
        """Each member sends a heartbeat and hears the answer, one after the other."""
        answers = []
        for member in members:
            answers.append(self.ask(member.request(self.ticket(), full=full)))
            member.hear(answers[-1])
        return answers

    def do(self, work: Iterable[Work]) -> None:
        for item in work:
            if isinstance(item, Write):
                self.writing.append(item)
            else:
                assert item.ticket not in self.answers, "a ticket is answered once"
                self.answers[item.ticket] = item.value

    def confirm(self, *, arrived: bool = False) -> None:
        """The oldest write succeeds; ``arrived``: uncertain ones before it had succeeded, too."""
        write = self.writing.pop(0)
        earlier = self.uncertain if arrived else []
        self.append(record for each in (*earlier, write) for record in each.records)
        self.uncertain.clear()
        self.do(self.core.on_written(write.group_id, write.token, ErrorCode.none, self.now))

    def fail(self) -> None:
        """The outcome of the oldest write is unknown."""
        write = self.writing.pop(0)
        self.uncertain.append(write)
        self.do(self.core.on_written(write.group_id, write.token, ErrorCode.coordinator_not_available, self.now))

    def confirm_all(self) -> None:
        while self.writing:
            self.confirm()

    def wait(self, delay_ms: int) -> None:
        self.now = Instant(self.now.monotonic_ms + delay_ms, self.now.wall_ms + delay_ms)
        self.do(self.core.tick(self.now))

    def expire(self) -> None:
        """Offsets expire, and the group if nothing is left of it."""
        for _, records in self.core.removals.plan_expiry(self.now):
            self.append(records)

    def append(self, records: Iterable[CoordinatorRecord]) -> None:
        apply = self.store.begin_batch()
        for record in records:
            self.records.append(record)
            apply(record.key, record.value, ())


def replayed(records: Iterable[CoordinatorRecord]) -> GroupStore:
    store = GroupStore()
    for record in records:
        store.begin_batch()(record.key, record.value, ())
    return store
