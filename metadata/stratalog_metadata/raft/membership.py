"""Members of the quorum: voters and learners. The only module that knows what a majority is.

Membership changes one node at a time (Ongaro's dissertation, section 4.1): the voters of two consecutive configurations differ
by at most one, so every quorum of one shares a node with every quorum of the other. A new node starts as a learner: it
receives the log and does not count until it has caught up.
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
"""Maximum of terms, indexes and node ids: never reached in practice, and within what the file formats can hold."""


class Member(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One node: number, identity of its disk, address, and whether it votes. The order of fields is permanent."""

    node_id: int
    identity: str = ""
    address: str = ""
    voter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One configuration of the quorum. ``members`` are ordered by node id; all ids are positive."""

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
        """A configuration of voters without identities or addresses: enough for the core."""
        return cls.of(Member(node_id=node_id) for node_id in node_ids)

    def find(self, node_id: int) -> Member | None:
        for member in self.members:
            if member.node_id == node_id:
                return member
        return None

    def others(self, node_id: int) -> list[int]:
        """Node ids of all other members, learners included."""
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
        """Whether these refusals leave no majority."""
        return not self.is_quorum(self.voters - refusals)

    def agreed(self, values: Mapping[int, int]) -> int:
        """Largest value (log index or round) that a majority has reached; a node without a value has 0."""
        reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)
        return reached[majority(len(self.voters)) - 1]

    # --- changes -----------------------------------------------------------------------------------------------------

    def follows(self, before: Membership) -> bool:
        """Whether it may follow ``before``: at most one voter differs."""
        return len(self.voters ^ before.voters) <= 1

    def with_learner(self, member: Member) -> Membership:
        """Raises ``Conflict`` if the number, identity or address is taken."""
        for known in self.members:
            if known.node_id == member.node_id:
                raise Conflict(f"node {known.node_id} is already a member: remove it first, or choose another id")
            if known.address == member.address or (member.identity and known.identity == member.identity):
                raise Conflict(f"node {known.node_id} already has this address or identity: remove it first")
        return Membership.of([*self.members, msgspec.structs.replace(member, voter=False)])

    def with_voter(self, node_id: int) -> Membership:
        """The configuration in which the learner ``node_id`` votes."""
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
    """Raises ``Unavailable`` or ``Invalid`` if a leader must not append ``after`` now. ``heard`` are the nodes that answer.

    A leader that has not committed an entry of its own term may not know a change that another leader committed: the two
    majorities need not overlap (the flaw of single-server changes, raft-dev, July 2015).
    """
    if not term_has_committed:
        raise Unavailable("the leader has not committed an entry of its term yet: retry in a moment")
    if is_pending:
        raise Unavailable("another change of the members is not committed yet: retry when it is")
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
    """Members that another node sent. Raises ``Invalid`` if they are not a configuration."""
    numbers = [member.node_id for member in members]
    in_order = all(earlier < later for earlier, later in pairwise([0, *numbers, NUMBER_MAX + 1]))
    if not in_order or not any(member.voter for member in members):
        raise Invalid(
            f"nodes {numbers[:20]} are not a quorum: their ids must increase within 1..{NUMBER_MAX}, and one must vote"
        )
    return Membership(members=members)
