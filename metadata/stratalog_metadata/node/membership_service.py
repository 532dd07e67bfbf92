"""The node's membership requests: HELLO, and an operator's changes of members.

The rules are the core's (``raft/membership.py``). This service asks a new node for its identity, so that only an empty node
with an identity of its own is added; it corrects addresses that have changed, and refuses messages of removed nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from stratalog_core.errors import Conflict, Fenced, Invalid, Overloaded, Retriable, StratalogError, Unavailable
from stratalog_core.ports import Clock, Request, Transport
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.node.pending_proposals import OnAnswers
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import (
    ChangeAnswer,
    ChangeRequest,
    CommandAnswer,
    HelloAnswer,
    HelloRequest,
    MemberStatus,
    RaftEnvelope,
    raised_error,
)
from stratalog_metadata.raft import Member, Membership, Raft
from stratalog_metadata.storage.identity import REPLACE, Identity

HELLO_TIMEOUT_S: Final = 2.0
ASKED_MAX: Final = 16
AppendMembers = Callable[[Membership, OnAnswers], None]
"""Appends a configuration and reports its outcome. Raises the core's refusal."""


class MembershipService:
    def __init__(
        self, core: Raft, peers: Peers, own: Identity, transport: Transport, clock: Clock, append: AppendMembers
    ) -> None:
        self._core = core
        self._own = own
        self._peers = peers
        self._transport = transport
        self._clock = clock
        self._append = append
        self._asking = 0
        self._followed: Membership | None = None
        self.follow()

    def follow(self) -> None:
        """Give the peers the addresses of the configuration in force."""
        if self._followed is not self._core.membership:
            self._followed = self._core.membership
            self._peers.follow(self._followed)

    def check_sender(self, envelope: RaftEnvelope) -> None:
        """Raises ``Fenced`` if this node certainly leads and the sender is not a member."""
        core = self._core
        member = core.membership.find(envelope.node_id)
        if member is not None and member.identity == envelope.identity:
            return
        if core.has_lease and core.membership_index <= core.commit:
            raise Fenced(
                f"node {envelope.node_id} with the identity {envelope.identity!r} is not, or no longer, a member of the quorum;"
                f" a removed node can join again only with an empty data_dir: {REPLACE}"
            )

    def hello(self, request: Request) -> None:
        asked = messages.decode(request.body, HelloRequest)
        core = self._core
        member = core.membership.find(asked.node_id)
        if member is not None and member.identity == asked.identity:
            self._peers.heard(asked.node_id, asked.identity, asked.address)
        # A newcomer begins with these. If a new leader did not know them, it could be added only with an empty directory again.
        index, committed = core.configurations.found_at(core.commit)
        answer = HelloAnswer(
            node_id=core.node_id,
            identity=core.settings.identity,
            cluster_id=self._peers.cluster_id,
            peers=sorted(member.node_id for member in core.membership.members),
            members=committed.members,
            members_index=index or self._own.members_index,
            leads=core.has_lease,
        )
        request.reply(messages.encode(answer))

    # --- changes -----------------------------------------------------------------------------------------------------

    def change(self, request: Request) -> None:
        """Process a CHANGE_MEMBERS request; it is answered when the change is committed or fails. Raises what prevents it."""
        wanted = messages.decode(request.body, ChangeRequest)
        if wanted.address:
            self._ask_newcomer(request, wanted)
        else:
            self._propose(request, self._core.membership.without(wanted.node_id))

    def _ask_newcomer(self, request: Request, wanted: ChangeRequest) -> None:
        if self._asking >= ASKED_MAX:
            raise Overloaded(f"{ASKED_MAX} membership changes are in progress, which is the maximum: retry later")
        channel = self._transport.channel(wanted.address)

        def answered(body: memoryview | StratalogError) -> None:
            self._asking -= 1
            try:
                self._add(request, wanted, body)
            except StratalogError as refused:
                request.fail(refused)

        self._asking += 1
        channel.send(messages.HELLO, (messages.encode(HelloRequest()),), answered, HELLO_TIMEOUT_S)

    def _add(self, request: Request, wanted: ChangeRequest, body: memoryview | StratalogError) -> None:
        if isinstance(body, StratalogError):
            raise Unavailable(f"node {wanted.node_id} does not answer at {wanted.address}: start it first ({body.message})")
        answer = messages.decode(body, HelloAnswer)
        if answer.node_id != wanted.node_id:
            raise Invalid(f"at {wanted.address} is node {answer.node_id}, not {wanted.node_id}")
        known = self._core.membership.find(wanted.node_id)
        if known is not None and known.identity == answer.identity:
            self._move(request, known, wanted.address)
            return
        if answer.members:
            raise Invalid(f"node {wanted.node_id} has the data of a quorum: start it with an empty data_dir")
        member = Member(node_id=wanted.node_id, identity=answer.identity, address=wanted.address, voter=False)
        self._propose(request, self._core.membership.with_learner(member))

    def _move(self, request: Request, known: Member, address: str) -> None:
        """Record the new address of a member that still has its own disk."""
        membership = self._core.membership
        if known.address == address:
            # A repeated request, or the node has reported the address itself.
            request.reply(messages.encode(ChangeAnswer(index=self._core.membership_index)))
            return
        taken = next((member.node_id for member in membership.members if member.address == address), 0)
        if taken:
            raise Conflict(f"node {taken} of the quorum already has the address {address}: move or remove it first")
        self._propose(request, membership.with_address(known.node_id, address))

    def _propose(self, request: Request, membership: Membership) -> None:
        def decided(answers: Sequence[CommandAnswer]) -> None:
            error = answers[0].error
            if error is not None:
                request.fail(raised_error(error))
            else:
                request.reply(messages.encode(ChangeAnswer(index=answers[0].index)))

        self._append(membership, decided)

    def tend(self, *, is_recorded: bool) -> None:
        """On the leader: append the members if no entry has them yet, and correct addresses that have changed."""
        core = self._core
        if core.membership_index > core.commit:
            return
        moved = self._peers.moved()
        wanted = core.membership.with_address(*moved) if moved is not None else None if is_recorded else core.membership
        if wanted is not None:
            with suppress(Retriable):
                self._append(wanted, lambda _: None)

    # --- status ------------------------------------------------------------------------------------------------------

    def status(self) -> list[MemberStatus]:
        now = self._clock.monotonic()
        return [self._member_status(member, now) for member in self._core.membership.members]

    def _member_status(self, member: Member, now: float) -> MemberStatus:
        match_index = contact_ms = -1
        if member.node_id == self._core.node_id:
            match_index, contact_ms = self._core.stable, 0
        elif (known := self._core.followers().get(member.node_id)) is not None:
            match_index = known.match
            contact_ms = -1 if known.heard_at is None else round((now - known.heard_at) * 1000)
        return MemberStatus(
            node_id=member.node_id,
            identity=member.identity,
            address=member.address,
            voter=member.voter,
            match_index=match_index,
            contact_ms=contact_ms,
        )
