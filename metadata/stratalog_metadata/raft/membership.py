"""Who votes, who only learns. The only place that knows what a quorum is.

Membership changes one node at a time (dissertation, 4.1): the voters of two configurations that follow each other differ
by one at most, so that any quorum of the one meets any quorum of the other. A node that is added learns first: it is sent
everything and counts for nothing until it has caught up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec

from stratalog_core.errors import Conflict, Invalid, NotFound, Unavailable
from stratalog_core.malformed import MALFORMED
from stratalog_core.quorum import majority

NUMBER_MAX: Final = 2**62
"""Of terms, indexes and node ids; far beyond what is ever reached, and far enough below what a file can hold."""


class Member(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One node: its number, the identity that its disk bears, where it is, whether it votes. The fields' order is permanent."""

    node_id: int
    identity: str = ""
    address: str = ""
    voter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One configuration of the quorum. ``members`` are in the order of their node ids, all positive."""

    members: tuple[Member, ...]
    voters: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "voters", frozenset(member.node_id for member in self.members if member.voter))
        assert self.voters, "a quorum has members"
        assert min(member.node_id for member in self.members) > 0, "node ids are positive"
        assert len({member.node_id for member in self.members}) == len(self.members), "a node is in it once"

    @classmethod
    def of(cls, members: Iterable[Member]) -> Membership:
        return cls(members=tuple(sorted(members, key=lambda member: member.node_id)))

    @classmethod
    def of_voters(cls, node_ids: Iterable[int]) -> Membership:
        """Voters of whom nothing but the number is known: enough for the core."""
        return cls.of(Member(node_id=node_id) for node_id in node_ids)

    def find(self, node_id: int) -> Member | None:
        for member in self.members:
            if member.node_id == node_id:
                return member
        return None

    def others(self, node_id: int) -> list[int]:
        """Everyone else, learners included."""
        return [member.node_id for member in self.members if member.node_id != node_id]

    def other_voters(self, node_id: int) -> list[int]:
        return sorted(self.voters - {node_id})

    @property
    def learners(self) -> list[int]:
        return [member.node_id for member in self.members if not member.voter]

    # --- quorums -----------------------------------------------------------------------------------------------------

    def is_quorum(self, nodes: Set[int]) -> bool:
        return len(self.voters & nodes) >= majority(len(self.voters))

    def is_lost(self, refusals: Set[int]) -> bool:
        """Whether so many refusals leave no quorum."""
        return not self.is_quorum(self.voters - refusals)

    def agreed(self, values: Mapping[int, int]) -> int:
        """Largest value that a quorum has reached (a log index, or a round); who is not named has 0."""
        reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)
        return reached[majority(len(self.voters)) - 1]

    # --- changes -----------------------------------------------------------------------------------------------------

    def follows(self, before: Membership) -> bool:
        """Whether it may be the next configuration after ``before``."""
        return len(self.voters ^ before.voters) <= 1

    def with_learner(self, member: Member) -> Membership:
        """Raises ``Conflict`` if the number, identity or address is taken."""
        for known in self.members:
            if known.node_id == member.node_id:
                raise Conflict(f"node {known.node_id} is a member already: remove it first, or choose another number")
            if known.address == member.address or (member.identity and known.identity == member.identity):
                raise Conflict(f"node {known.node_id} has this address or identity already: remove it first")
        return Membership.of([*self.members, msgspec.structs.replace(member, voter=False)])

    def with_voter(self, node_id: int) -> Membership:
        """The learner ``node_id`` votes from now on."""
        return self._replacing(node_id, voter=True)

    def with_address(self, node_id: int, address: str) -> Membership:
        return self._replacing(node_id, address=address)

    def without(self, node_id: int) -> Membership:
        """Raises ``NotFound``, or ``Invalid`` for the last voter."""
        if self.find(node_id) is None:
            raise NotFound(f"node {node_id} is not a member; members are {[member.node_id for member in self.members]}")
        if self.voters == {node_id}:
            raise Invalid(f"node {node_id} is the only voter: add another one and let it catch up first")
        return Membership.of(member for member in self.members if member.node_id != node_id)

    def _replacing(self, node_id: int, **changed: object) -> Membership:
        return Membership.of(
            msgspec.structs.replace(member, **changed) if member.node_id == node_id else member for member in self.members
        )


def check_change(*, before: Membership, after: Membership, term_has_committed: bool, is_pending: bool, heard: Set[int]) -> None:
    """Whether a leader may append ``after`` now; ``heard`` are those that answer.

    Without an entry of its own term committed, a leader may not know a change that another one has committed: the two
    quorums need not meet (the known flaw of single-server changes, raft-dev, July 2015). Raises ``Unavailable`` or ``Invalid``.
    """
    if not term_has_committed:
        raise Unavailable("the leader has not committed an entry of its term yet: ask again in a moment")
    if is_pending:
        raise Unavailable("another change of the members is not committed yet: ask again when it is")
    if not after.follows(before):
        raise Invalid(f"voters {sorted(before.voters)} cannot become {sorted(after.voters)} at once: change one node at a time")
    if not after.is_quorum(heard):
        silent = sorted(after.voters - heard)
        raise Unavailable(f"too few of the remaining voters answer ({silent} do not): nothing could be committed afterwards")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Member, ...])


def encode_members(membership: Membership) -> bytes:
    """The payload of a log entry of kind ``MEMBERS``."""
    return _encoder.encode(membership.members)


def decode_members(payload: bytes) -> Membership:
    """Raises ``Invalid``."""
    try:
        members = _decoder.decode(payload)
    except MALFORMED as malformed:
        raise Invalid(f"malformed members of a quorum: {malformed}") from malformed
    return check_members(members)


def check_members(members: tuple[Member, ...]) -> Membership:
    """What another node says is a configuration. Raises ``Invalid`` if it is none."""
    numbers = [member.node_id for member in members]
    in_order = all(earlier < later for earlier, later in pairwise([0, *numbers, NUMBER_MAX + 1]))
    if not in_order or not any(member.voter for member in members):
        raise Invalid(f"nodes {numbers[:20]} are no quorum: their numbers must rise within 1..{NUMBER_MAX}, and one must vote")
    return Membership(members=members)
