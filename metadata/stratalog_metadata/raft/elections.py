"""Terms, votes and leadership: the half of Raft that does not touch the log.

Always: a node votes at most once per term; the term never falls; a candidate's own vote counts once it is durable, as others'
votes do.

Pre-vote checks first whether an election could be won, so that a node that was away does not disturb the quorum. A voter that
hears its leader helps no candidate (Ongaro's dissertation, sections 4.2.3 and 9.6). A node that does not vote in the
configuration it knows starts no election, but answers those of others, because they may know a later configuration (section
4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from stratalog_core.ports import Random
from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.messages import Message, VoteReply, VoteRequest
from stratalog_metadata.raft.ready import HardState
from stratalog_metadata.raft.settings import RaftSettings


class Role(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Elections:
    """Arguments named ``last`` are (term, index) of the node's last entry. Requests and replies are appended to ``out``.

    Every message in ``out`` promises something and must wait until the hard state is durable.
    """

    def __init__(
        self, settings: RaftSettings, membership: Membership, hard_state: HardState, random: Random, now: float
    ) -> None:
        self.role = Role.FOLLOWER
        self.term = hard_state.term
        self.voted_for = hard_state.voted_for
        self.leader = 0
        self.own_vote_term = 0
        self._settings = settings
        self.membership = membership
        self._random = random
        self._now = now
        self._heard_at = now
        # It may have heard a leader before a restart, and the leader's lease relies on its silence (``Raft.has_lease``).
        self._silent_until = now + settings.election_timeout_s if hard_state.term else now
        self._granted: set[int] = set()
        self._refused: set[int] = set()
        self.due_at = now if self._is_alone else now + self._first_timeout()

    @property
    def in_touch(self) -> bool:
        """Whether this node leads, or has heard from the leader within an election timeout."""
        if self.role is Role.LEADER:
            return True
        return self.leader != 0 and self._now < self._heard_at + self._settings.election_timeout_s

    @property
    def _is_alone(self) -> bool:
        return self.membership.voters == {self._settings.node_id}

    def _first_timeout(self) -> float:
        """The first election timeout. It may be shorter: a live leader is heard within a heartbeat, and pre-vote makes
        haste harmless.
        """
        return self._settings.heartbeat_s * 2 + self._settings.election_timeout_s * self._random.random()

    def _restart_timer(self) -> None:
        self.due_at = self._now + self._settings.election_timeout_s * (1.0 + self._random.random())

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float, last: tuple[int, int], out: list[Message], *, may_campaign: Callable[[], bool]) -> None:
        """Start an election if the leader has been silent for too long."""
        self._now = now
        if self.role is Role.LEADER or now < self.due_at:
            return
        if may_campaign():
            self.campaign(last, out, pre=not self._is_alone)
        else:
            self._restart_timer()

    def follow(self, term: int, leader: int) -> None:
        """Follow ``leader`` (0: not known yet) in ``term``."""
        assert term >= self.term
        if term > self.term:
            self.term = term
            self.voted_for = 0
        self._become(Role.FOLLOWER, leader)
        self._restart_timer()

    def heard_from_leader(self, leader: int) -> None:
        assert self.role is not Role.LEADER, "two leaders in one term"
        self._become(Role.FOLLOWER, leader)
        self._heard_at = self._now
        # Also in a later term, which another node's reply may bring: the leader does not know of that.
        self._silent_until = self._now + self._settings.election_timeout_s
        self._restart_timer()

    def ignores(self, request: VoteRequest) -> bool:
        """Whether the candidate gets no vote, because the leader's lease relies on that. A request of a later term changes
        nothing then.
        """
        return (self.role is Role.LEADER or self._now < self._silent_until) and not request.transfer

    def campaign(self, last: tuple[int, int], out: list[Message], *, pre: bool, transfer: bool = False) -> None:
        """Request votes in a new term, or (``pre``) ask whether the election could be won."""
        self._become(Role.PRE_CANDIDATE if pre else Role.CANDIDATE, 0)
        self._restart_timer()
        if pre:
            self._granted.add(self._settings.node_id)
        else:
            self.term += 1
            self.voted_for = self._settings.node_id
            self.own_vote_term = self.term
        out.extend(self._request(other, last, pre, transfer) for other in self.membership.other_voters(self._settings.node_id))

    def on_request(self, request: VoteRequest, last: tuple[int, int], out: list[Message]) -> None:
        """Grant the vote to the first candidate of a term whose log is at least as complete as this node's (Raft paper,
        5.4.1).
        """
        free = self.voted_for == request.sender or (self.voted_for == 0 and self.leader == 0)
        free = free or (request.pre and request.term > self.term)
        granted = free and (request.last_term, request.last_index) >= last and not self.ignores(request)
        if granted and not request.pre:
            self.voted_for = request.sender
            self._restart_timer()
        self.reply(request, request.term if granted else self.term, granted, out)

    def reply(self, request: VoteRequest, term: int, granted: bool, out: list[Message]) -> None:
        out.append(
            VoteReply(sender=self._settings.node_id, receiver=request.sender, term=term, granted=granted, pre=request.pre)
        )

    def on_reply(self, reply: VoteReply, last: tuple[int, int], out: list[Message]) -> None:
        expected = Role.PRE_CANDIDATE if reply.pre else Role.CANDIDATE
        if self.role is not expected or (reply.pre and reply.granted and reply.term != self.term + 1):
            return
        self._count(reply.sender, reply.granted)
        self._conclude(last, out)

    def own_vote_is_durable(self, term: int) -> None:
        if term == self.term and self.role is Role.CANDIDATE:
            self._count(self._settings.node_id, True)
            self._conclude((0, 0), [])

    def take_own_vote(self) -> int:
        """The term of this node's vote for itself that is being written; 0 if there is none."""
        vote_term, self.own_vote_term = self.own_vote_term, 0
        return vote_term

    # --- steps -------------------------------------------------------------------------------------------------------

    def _become(self, role: Role, leader: int) -> None:
        self.role = role
        self.leader = leader
        self._granted.clear()
        self._refused.clear()

    def _request(self, receiver: int, last: tuple[int, int], pre: bool, transfer: bool) -> VoteRequest:
        return VoteRequest(
            sender=self._settings.node_id,
            receiver=receiver,
            term=self.term + 1 if pre else self.term,
            last_term=last[0],
            last_index=last[1],
            pre=pre,
            transfer=transfer,
        )

    def _count(self, voter: int, granted: bool) -> None:
        """Count a voter's first answer."""
        if voter not in self._granted | self._refused:
            (self._granted if granted else self._refused).add(voter)

    def _conclude(self, last: tuple[int, int], out: list[Message]) -> None:
        if self.membership.is_quorum(self._granted):
            if self.role is Role.PRE_CANDIDATE:
                self.campaign(last, out, pre=False)
            else:
                self._become(Role.LEADER, self._settings.node_id)
        elif self.membership.is_lost(self._refused):
            self.follow(self.term, 0)

    def validate_state(self) -> None:
        node_id = self._settings.node_id
        assert not (self._granted or self._refused) or self.role in (Role.CANDIDATE, Role.PRE_CANDIDATE)
        assert self.role is not Role.LEADER or self.leader == self.voted_for == node_id
        assert self.role is Role.LEADER or self.leader != node_id
