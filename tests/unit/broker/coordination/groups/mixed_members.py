"""A group whose members speak the classic or the consumer protocol, as clients implement them. Nobody sends two things at once.

At any time a partition has at most one reader: ``MixedGroup.check`` asserts it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.consumer_members import GROUP, Log, Member

from stratalog_broker.coordination.groups.core.consumer.embedded_protocol import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from stratalog_broker.coordination.groups.core.messages import (
    JoinAnswer,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.record_reader import encode_string

SESSION_MS: Final = 10_000
REBALANCE_MS: Final = 8_000
ROUND_MS: Final = 1_000
Place = tuple[str, int]
"""Topic name and partition index."""
GONE: Final = frozenset({ErrorCode.unknown_member_id, ErrorCode.illegal_generation, ErrorCode.fenced_instance_id})
REPEATED: Final = frozenset(
    {ErrorCode.rebalance_in_progress, ErrorCode.coordinator_not_available, ErrorCode.group_id_not_found}
)


def subscription(topics: tuple[str, ...], owned: set[Place]) -> bytes:
    """Return a ``ConsumerProtocolSubscription`` of version 3."""
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(owned):
        by_topic.setdefault(topic, []).append(index)
    names = len(topics).to_bytes(4, "big") + b"".join(map(encode_string, topics))
    rows = encode_assignment(by_topic, 0)[2:-4]
    return b"\x00\x03" + names + b"\xff\xff\xff\xff" + rows + b"\xff\xff\xff\xff" + encode_string(None)


@dataclass(slots=True)
class ClassicMember:
    """What a client of the classic protocol knows. ``cooperative``: it keeps its partitions while it joins.

    ``both``: it supports the other kind of protocol, too, as in a rolling change of the assignor.
    """

    name: str
    cooperative: bool = False
    both: bool = False
    topics: tuple[str, ...] = ("t",)
    instance_id: str | None = None
    member_id: str = ""
    generation: int = -1
    owned: set[Place] = field(default_factory=set)
    step: str = "join"
    asked: str = ""
    ticket: int = 0
    joined: JoinAnswer = field(default_factory=JoinAnswer)

    @property
    def protocol(self) -> str:
        return "cooperative-sticky" if self.cooperative else "range"

    def act(self, log: Log) -> None:
        """Hear the answer that has come, else do the next thing unless one is awaited."""
        if self.ticket:
            if self.ticket in log.answers:
                self._hear(log.answers.pop(self.ticket))
            return
        if self.step == "join":
            self._join(log)
        elif self.step == "sync":
            self._sync(log)
        else:
            self._obey(log.core.heartbeat(GROUP, self.member_id, self.instance_id, self.generation, log.now))
            log.do(log.core.tick(log.now))

    def _join(self, log: Log) -> None:
        if not self.cooperative:
            self.owned.clear()
        self.ticket = log.ticket()
        request = JoinRequest(
            ticket=self.ticket, member_id=self.member_id, fresh_member_id=f"{self.name}-{self.ticket}",
            group_instance_id=self.instance_id, client_id=self.name, client_host="/host", protocol_type="consumer",
            protocols=self._protocols(), session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
        )  # fmt: skip
        log.do(log.core.join(GROUP, request, log.now))

    def _protocols(self) -> tuple[tuple[str, bytes], ...]:
        metadata = subscription(self.topics, self.owned)
        other = "range" if self.cooperative else "cooperative-sticky"
        return (self.protocol, metadata), *([(other, metadata)] if self.both else [])

    def _sync(self, log: Log) -> None:
        self.ticket = log.ticket()
        request = SyncRequest(
            ticket=self.ticket, member_id=self.member_id, group_instance_id=self.instance_id, generation=self.generation,
            protocol_type="consumer", protocol_name=self.joined.protocol_name, assignments=self._deal(log),
        )  # fmt: skip
        log.do(log.core.sync(GROUP, request, log.now))

    def _deal(self, log: Log) -> tuple[tuple[str, bytes], ...]:
        """As leader of a classic group, assign the partitions in turn; those that another member keeps only in the next one."""
        told = {each.member_id: decode_subscription(each.metadata) for each in self.joined.members}
        places = sorted((topic, index) for topic in self.topics for index in range(partition_count(log, topic)))
        kept = {(topic, index): member for member, each in told.items() for topic, rows in each.owned.items() for index in rows}
        dealt: dict[str, dict[str, list[int]]] = {member: {} for member in told}
        for number, (topic, index) in enumerate(places if told else ()):
            member = sorted(told)[number % len(told)]
            if kept.get((topic, index), member) == member:
                dealt[member].setdefault(topic, []).append(index)
        return tuple((member, encode_assignment(rows, 3)) for member, rows in dealt.items())

    def _hear(self, answer: Any) -> None:
        self.ticket = 0
        if answer.error is not ErrorCode.none:
            if answer.error is ErrorCode.member_id_required:
                self.member_id = answer.member_id
            else:
                self._obey(answer.error)
        elif isinstance(answer, JoinAnswer):
            self.joined, self.step = answer, "sync"
            self.member_id, self.generation = answer.member_id, answer.generation
        else:
            assert isinstance(answer, SyncAnswer)
            assigned = {(topic, at) for topic, rows in decode_assignment(answer.assignment).partitions.items() for at in rows}
            self.step = "join" if self.owned - assigned else "read"
            self.owned = assigned

    def _obey(self, error: ErrorCode) -> None:
        assert error in GONE | REPEATED | {ErrorCode.none}, f"{self.name} was told {error}"
        if error in GONE:
            self.owned.clear()
            self.member_id = self.member_id if error is ErrorCode.illegal_generation else ""
            self.generation = -1
        if error is not ErrorCode.none:
            self.step = "join"


def partition_count(log: Log, topic: str) -> int:
    found = log.topics.find(topic)
    return 0 if found is None else found.partition_count


class MixedGroup(Log):
    """Members by name; the others have left, or are dead and do not count."""

    def __init__(self, **limits: Any) -> None:
        self.members: dict[str, Member | ClassicMember] = {}
        self.asking: dict[str, int] = {}
        super().__init__(**limits)

    def fail_over(self) -> None:
        """The next coordinator takes over; requests that are not answered are lost, and clients send them again."""
        super().fail_over()
        self.asking.clear()
        for member in self.members.values():
            if isinstance(member, ClassicMember) and member.ticket:
                member.ticket, member.step = 0, "join"
            elif isinstance(member, Member):
                member.must_repeat = True

    def start(self, member: Member | ClassicMember) -> None:
        self.members[member.name if isinstance(member, ClassicMember) else member.member_id] = member

    def act(self, name: str) -> None:
        member = self.members[name]
        if isinstance(member, ClassicMember):
            member.act(self)
        elif name in self.asking:
            if self.asking[name] in self.answers:
                answer = self.answers.pop(self.asking.pop(name))
                member.hear(answer)
                if answer.error is ErrorCode.group_id_not_found and member.epoch:
                    member.epoch, member.assignment = 0, frozenset()
                    member.owned.clear()
        else:
            request = member.request(self.ticket())
            self.asking[name] = request.ticket
            self.send(request)

    def leave(self, name: str) -> None:
        member = self.members.pop(name)
        self.asking.pop(name, None)
        if isinstance(member, ClassicMember):
            leaving = LeavingMember(member_id=member.member_id, group_instance_id=member.instance_id)
            self.do(self.core.leave_consumer_group(GROUP, LeaveRequest(ticket=self.ticket(), members=(leaving,)), self.now))
        else:
            member.epoch, member.owned = -1, set()
            self.send(member.request(self.ticket()))

    def rounds(self, count: int) -> None:
        """All members do what they have to, and all writes succeed."""
        for _ in range(count):
            self.wait(ROUND_MS)
            for _ in range(4):
                for name in list(self.members):
                    self.act(name)
                    self.confirm_all()
                    self.check()

    def check(self) -> None:
        readers = Counter(place for name in self.members for place in self.read_by(name))
        assert not [place for place, count in readers.items() if count > 1], readers

    def read_by(self, name: str) -> set[Place]:
        member = self.members[name]
        if isinstance(member, ClassicMember):
            return set(member.owned)
        names = {topic.topic_id: topic.name for topic in map(self.topics.find, "tu") if topic is not None}
        return {(names[topic_id], index) for topic_id, index in member.owned}

    def shares(self) -> list[int]:
        """Return how many partitions each member reads; all of topic ``t`` are read."""
        read = {place for name in self.members for place in self.read_by(name)}
        assert read >= {("t", index) for index in range(partition_count(self, "t"))}, f"only {sorted(read)} are read"
        return sorted(len(self.read_by(name)) for name in self.members)

    @property
    def is_consumer_group(self) -> bool:
        return GROUP in self.core.table.consumers
