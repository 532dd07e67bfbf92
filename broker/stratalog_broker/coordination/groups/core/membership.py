"""The members of a group by id and by instance id, the leader, and the vote for a protocol.

Knows neither the group's state nor the time. Invariants: the leader, if any, is a member; there is a leader exactly when
there are members; each instance id belongs to one member; ``supporters`` counts the members that support each protocol.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.messages import NO_MEMBER, MemberImage, Protocols


@dataclass(slots=True, kw_only=True)
class Member:
    """One member. ``join_ticket`` and ``sync_ticket`` identify its unanswered requests."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    join_ticket: int | None = None
    sync_ticket: int | None = None
    is_new: bool = False
    session_deadline_ms: int = 0

    @property
    def is_static(self) -> bool:
        return self.group_instance_id is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a request is unanswered. A waiting member cannot send heartbeats, so its session is extended."""
        return self.join_ticket is not None or self.sync_ticket is not None

    def metadata_for(self, protocol_name: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol_name), b"")

    def vote(self, candidates: set[str]) -> str:
        """Return the candidate that this member prefers."""
        return next(name for name, _ in self.protocols if name in candidates)

    def image(self, protocol_name: str | None) -> MemberImage:
        """Return the member as it is stored in a generation that uses this protocol."""
        return MemberImage(
            member_id=self.member_id, group_instance_id=self.group_instance_id, client_id=self.client_id,
            client_host=self.client_host, rebalance_timeout_ms=self.rebalance_timeout_ms,
            session_timeout_ms=self.session_timeout_ms, subscription=self.metadata_for(protocol_name),
            assignment=self.assignment,
        )  # fmt: skip

    @classmethod
    def from_image(cls, stored: MemberImage, protocol_name: str | None) -> Member:
        return cls(
            member_id=stored.member_id, group_instance_id=stored.group_instance_id, client_id=stored.client_id,
            client_host=stored.client_host, session_timeout_ms=stored.session_timeout_ms,
            rebalance_timeout_ms=stored.rebalance_timeout_ms, assignment=stored.assignment,
            protocols=((protocol_name or "", stored.subscription),),
        )  # fmt: skip


class Membership:
    """The members of one group in join order."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.instances: dict[str, str] = {}
        self.supporters: Counter[str] = Counter()
        self.leader: str | None = None
        self.joining = 0

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: Member, join_ticket: int | None = None) -> None:
        """Add a member; the first one becomes leader."""
        self.members[member.member_id] = member
        if member.group_instance_id is not None:
            self.instances[member.group_instance_id] = member.member_id
        self._count(member, 1)
        self.leader = self.leader or member.member_id
        self.set_join_ticket(member, join_ticket)

    def remove(self, member_id: str) -> Member:
        """Remove and return a member. The caller answers its tickets."""
        member = self.members.pop(member_id)
        self._count(member, -1)
        if member.join_ticket is not None:
            self.joining -= 1
        if member.group_instance_id is not None and self.instances.get(member.group_instance_id) == member_id:
            del self.instances[member.group_instance_id]
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        return member

    def rename(self, member: Member, member_id: str) -> None:
        """Change the id of a returning static member, which keeps its position, assignment and leadership."""
        old_id = member.member_id
        member.member_id = member_id
        self.members = {member_id if key == old_id else key: value for key, value in self.members.items()}
        if member.group_instance_id is not None:
            self.instances[member.group_instance_id] = member_id
        if self.leader == old_id:
            self.leader = member_id

    def set_protocols(self, member: Member, protocols: Protocols) -> None:
        self._count(member, -1)
        member.protocols = protocols
        self._count(member, 1)

    def set_join_ticket(self, member: Member, ticket: int | None) -> None:
        self.joining += (ticket is not None) - (member.join_ticket is not None)
        member.join_ticket = ticket

    def elect_joined_leader(self) -> bool:
        """Replace the leader if it has not rejoined; return False if no member has."""
        if self.leader is not None and self.members[self.leader].join_ticket is not None:
            return True
        joined = next((member.member_id for member in self.members.values() if member.join_ticket is not None), None)
        self.leader = joined or self.leader
        return joined is not None

    def supported_by_all(self) -> set[str]:
        return {name for name, count in self.supporters.items() if count == len(self.members)}

    def can_work_with(self, protocols: Protocols) -> bool:
        """Return whether every current member supports one of these protocols."""
        count = len(self.members)
        return any(self.supporters[name] == count for name, _ in protocols)

    def choose_protocol(self) -> str:
        """Return the protocol with the most votes among those that all support; ties go to the earliest members' choice."""
        candidates = self.supported_by_all()
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return votes.most_common(1)[0][0]

    def validate(self, member_id: str, group_instance_id: str | None) -> ErrorCode:
        """Check a sender's identity; an instance id that belongs to another member id is fenced (KIP-345)."""
        if group_instance_id is not None:
            current = self.instances.get(group_instance_id)
            if current is None:
                return ErrorCode.unknown_member_id
            return ErrorCode.none if current == member_id else ErrorCode.fenced_instance_id
        return ErrorCode.none if member_id in self.members else ErrorCode.unknown_member_id

    def find(self, member_id: str, group_instance_id: str | None) -> str | None:
        """Return the member id of a leave request; a static member may be identified by its instance id alone."""
        if member_id == NO_MEMBER and group_instance_id is not None:
            return self.instances.get(group_instance_id)
        return member_id

    def validate_state(self) -> None:
        """Assert the invariants."""
        assert (self.leader is None) == (not self.members)
        assert self.leader is None or self.leader in self.members
        assert all(self.members[member_id].group_instance_id == name for name, member_id in self.instances.items())
        assert self.joining == sum(member.join_ticket is not None for member in self.members.values())
        expected = Counter(name for member in self.members.values() for name, _ in member.protocols)
        assert +self.supporters == expected
        assert not self.members or self.supported_by_all(), "members without a common protocol"

    def _count(self, member: Member, change: int) -> None:
        for name, _ in member.protocols:
            self.supporters[name] += change
            if not self.supporters[name]:
                del self.supporters[name]
