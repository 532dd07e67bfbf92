"""One consumer group of the consumer protocol (KIP-848), as a state machine that does no I/O.

It works in turns: a turn takes all heartbeats that have arrived, changes members, raises the group epoch once if that is
needed, computes a target assignment if one is due, and moves each sender towards its target. Its records are written as one
batch; its answers are sent when that batch is in the log. There is no next turn before that (``turns.py``).

Members may speak the classic protocol (``classic_members.py``). When the last one of the consumer protocol leaves, a turn ends
the group, and the others go on in a classic group (``migration.py``).

Differences from Apache Kafka: one group epoch for all changes of a turn, and regular expressions are resolved at once, not in
the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.classic_members import (
    check_generation,
    check_sync,
    classic_sender_of,
    joined,
    leaving_classically,
    must_join_again,
    owned_partitions,
    subscription_of,
    sync_answer,
)
from stratalog_broker.coordination.groups.core.consumer.embedded_protocol import PROTOCOL_TYPE
from stratalog_broker.coordination.groups.core.consumer.group_requests import GroupRequest, refusal
from stratalog_broker.coordination.groups.core.consumer.member_deadlines import MemberDeadlines
from stratalog_broker.coordination.groups.core.consumer.model import (
    LEAVE_STATIC_EPOCH,
    ConsumerGroupState,
    MemberMetadata,
    MemberState,
    Partitions,
    Topics,
)
from stratalog_broker.coordination.groups.core.consumer.reconciliation import Goal, reconcile
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRefused, HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.senders import Sender, leaving_member, sender_of
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.consumer.subscriptions import Subscriptions
from stratalog_broker.coordination.groups.core.consumer.tracked_state import TrackedState
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    LeaveRequest,
    SyncRequest,
)
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import NEVER_MS, Instant


class ConsumerGroupPhase(StrEnum):
    """Kafka's states of a consumer group."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The outcome of a turn: send the answers once the records are in the log.

    ``postponed`` are requests to handle again after that. ``is_downgrade``: the records remove the group, and the caller adds
    the classic one.
    """

    answers: Sequence[Answer] = ()
    records: Sequence[CoordinatorRecord] = ()
    postponed: Sequence[GroupRequest] = ()
    is_downgrade: bool = False


@dataclass(frozen=True, slots=True)
class _Sender:
    """``owned`` are the partitions that the sender says it owns; None if it did not say."""

    request: HeartbeatRequest | JoinRequest
    member_id: str
    subscription_changed: bool
    owned: Partitions | None


class ConsumerGroup:
    """Not thread-safe; no call blocks. ``TrackedState`` describes ``is_new`` and ``replaces_classic``."""

    def __init__(
        self, group_id: str, stored: ConsumerGroupState, limits: ConsumerLimits, topics: Topics, now: Instant, *,
        is_new: bool = False, replaces_classic: bool = False,
    ) -> None:  # fmt: skip
        self.group_id = group_id
        self.state = TrackedState(group_id, stored, is_new=is_new, replaces_classic=replaces_classic)
        self._limits = limits
        self._subscriptions = Subscriptions(self.state, topics)
        self._is_changed = self.state.is_reset or (is_new and bool(stored.members))
        """Whether members or subscriptions changed since the group epoch was raised."""
        self._has_lost_members = False
        """Whether a member has left in this turn."""
        self._assign_at_ms = NEVER_MS
        self._deadlines = MemberDeadlines()
        for member_id in self.state.members:
            self._extend_session(member_id, now)

    @property
    def wake_at_ms(self) -> int:
        """Never later than the next deadline."""
        return self._deadlines.wake_at_ms

    @property
    def phase(self) -> ConsumerGroupPhase:
        if not self.state.members:
            return ConsumerGroupPhase.EMPTY
        if self.state.epoch > self.state.assignment_epoch:
            return ConsumerGroupPhase.ASSIGNING
        reconciled = all(self.state.is_reconciled(member_id) for member_id in self.state.members)
        return ConsumerGroupPhase.STABLE if reconciled else ConsumerGroupPhase.RECONCILING

    @property
    def assignor(self) -> str:
        """The name of the assignor that most members prefer."""
        return self._subscriptions.preferred_assignor(self._limits.assignors)

    def is_subscribed_to(self, topic: str) -> bool:
        return self._subscriptions.includes(topic)

    def names_of(self, member_id: str) -> dict[UUID, str]:
        """Return the names of the topics to which a member subscribes, by id."""
        return self._subscriptions.names_of(member_id)

    # -- turns

    def turn(self, requests: Sequence[GroupRequest], now: Instant, waiting: Iterable[GroupRequest] = ()) -> Turn:
        """Handle requests and deadlines that have passed. ``waiting`` are requests that a later turn handles."""
        self._has_lost_members = False
        self._end_sessions((*requests, *waiting), now)
        answers, staying, postponed = list[Answer](), list[GroupRequest](), list[GroupRequest]()
        for request in requests:
            if isinstance(request, LeaveRequest):
                answers.append(Answer(ticket=request.ticket, value=self._leave_classically(request)))
            elif isinstance(request, HeartbeatRequest) and request.is_leaving:
                answers.append(self._leave(request))
            elif isinstance(request, JoinRequest) and self._takes_over_from_last(request):
                postponed.append(request)
            else:
                staying.append(request)
        if self._has_lost_members and self._is_classic:
            return Turn(
                answers=answers, records=self.state.tombstones(), postponed=(*postponed, *staying), is_downgrade=True
            )  # fmt: skip
        answers += self._stay(staying, now)
        self._deadlines.plan_wake(self._assign_at_ms)
        return Turn(answers=answers, records=self.state.drain(), postponed=postponed)

    def _stay(self, requests: Sequence[GroupRequest], now: Instant) -> list[Answer]:
        """Handle the requests of members that do not leave."""
        answers, senders, syncs = list[Answer](), list[_Sender](), list[SyncRequest]()
        for request in requests:
            try:
                if isinstance(request, HeartbeatRequest):
                    senders.append(self._admit(request, now))
                elif isinstance(request, JoinRequest):
                    senders.append(self._admit_classic(request, now))
                elif isinstance(request, SyncRequest):
                    syncs.append(request)
            except HeartbeatRefused as refused:
                answers.append(refusal(request, refused.answer.error, refused.answer.message))
        self._raise_epoch([each for each in requests if isinstance(each, HeartbeatRequest)], now)
        self._assign_if_due(now)
        answers += [self._move(sender, now) for sender in senders]
        return answers + [self._sync(request, now) for request in syncs]

    # -- members

    def check_joining(self, request: HeartbeatRequest) -> None:
        """Raise ``HeartbeatRefused`` if a member of the consumer protocol may not join; change nothing."""
        sender = sender_of(self.state, request, self._limits.members_max)
        before = self.state.members.get(sender.replaced_id or sender.member_id)
        self._check_size(before, _updated(before or MemberMetadata(), request))

    def _admit(self, request: HeartbeatRequest, now: Instant) -> _Sender:
        """Add or update the sender. Raises ``HeartbeatRefused``."""
        sender = sender_of(self.state, request, self._limits.members_max)
        before = self.state.members.get(sender.replaced_id or sender.member_id)
        changed = self._update(sender, before, _updated(before or MemberMetadata(), request), now)
        return _Sender(request, sender.member_id, changed, request.owned)

    def _admit_classic(self, request: JoinRequest, now: Instant) -> _Sender:
        """Add or update the sender, which speaks the classic protocol. Raises ``HeartbeatRefused``."""
        sender = classic_sender_of(self.state, request, self._limits.members_max)
        subscription = subscription_of(request)
        before = self.state.members.get(sender.replaced_id or sender.member_id)
        changed = self._update(sender, before, joined(before or MemberMetadata(), request, subscription), now)
        self._deadlines.done(sender.member_id)
        self._deadlines.expect(sender.member_id, now.monotonic_ms + request.rebalance_timeout_ms)  # to send SyncGroup
        owned = owned_partitions(subscription, self._subscriptions.topic_id_of)
        return _Sender(request, sender.member_id, changed, owned)

    def _update(self, sender: Sender, before: MemberMetadata | None, after: MemberMetadata, now: Instant) -> bool:
        """Store a sender's metadata; return whether its subscription has changed. Raises ``HeartbeatRefused``."""
        self._check_size(before, after)
        if sender.replaced_id is not None:
            self.state.replace_member(sender.replaced_id, sender.member_id)
            self._deadlines.forget(sender.replaced_id)
        changed = before is None or (before.topic_names, before.topic_pattern) != (after.topic_names, after.topic_pattern)
        self.state.set_member(sender.member_id, after)
        self._is_changed |= changed
        self._extend_session(sender.member_id, now)
        return changed

    def _check_size(self, before: MemberMetadata | None, after: MemberMetadata) -> None:
        """Raise ``HeartbeatRefused`` if the subscriptions of the group would become too large."""
        added_bytes = after.subscription_bytes - (0 if before is None else before.subscription_bytes)
        if added_bytes > 0 and self.state.subscription_bytes + added_bytes > self._limits.group_bytes_max:
            text = f"The subscriptions of the group's members may have {self._limits.group_bytes_max} bytes."
            raise HeartbeatRefused(ErrorCode.group_max_size_reached, text)

    def _leave(self, request: HeartbeatRequest) -> Answer:
        try:
            member_id = leaving_member(self.state, request)
        except HeartbeatRefused as refused:
            return Answer(ticket=request.ticket, value=refused.answer)
        if request.member_epoch == LEAVE_STATIC_EPOCH:
            current = self.state.current_of(member_id)
            away = replace(current, member_epoch=LEAVE_STATIC_EPOCH, state=MemberState.STABLE, revoking={})
            self.state.set_current(member_id, away)
            self._deadlines.done(member_id)
        else:
            self._remove(member_id)
        left = HeartbeatAnswer(member_id=request.member_id, member_epoch=request.member_epoch)
        return Answer(ticket=request.ticket, value=left)

    def _leave_classically(self, request: LeaveRequest) -> LeaveAnswer:
        errors = []
        for leaving in request.members:
            error, member_id = leaving_classically(self.state, leaving)
            if error is ErrorCode.none:
                self._remove(member_id)
            errors.append(error)
        return LeaveAnswer(errors=tuple(errors))

    def _remove(self, member_id: str) -> None:
        self.state.remove_member(member_id)
        self._deadlines.forget(member_id)
        self._is_changed = self._has_lost_members = True

    # -- downgrade

    @property
    def _is_classic(self) -> bool:
        """Whether the group may go on as a classic one, because all members are of that protocol."""
        count, limits = len(self.state.members), self._limits
        may = limits.migration.downgrades and self.state.subscription_bytes <= limits.migration_bytes_max
        return may and 0 < count <= limits.classic_members_max and self.state.classic.count == count

    def _takes_over_from_last(self, request: JoinRequest) -> bool:
        """Remove the last member of the consumer protocol if it is a static one that joins again with the classic protocol.

        The request has to be handled again once the group is a classic one, or has no members.
        """
        holder = None if request.member_id else self.state.instances.get(request.group_instance_id or "")
        if holder is None or not self._limits.migration.downgrades or self.state.members[holder].classic is not None:
            return False
        if self.state.classic.count < len(self.state.members) - 1 or len(self.state.members) > self._limits.classic_members_max:
            return False
        if request.protocol_type != PROTOCOL_TYPE or not self.state.classic.can_work_with(request.protocols):
            return False
        self._remove(holder)
        return True

    # -- requests of classic members that are no JoinGroup

    def classic_heartbeat(self, member_id: str, instance_id: str | None, generation: int, now: Instant) -> ErrorCode:
        """Extend a classic member's session; return REBALANCE_IN_PROGRESS if it has to join again."""
        error = check_generation(self.state, member_id, instance_id, generation)
        if error is not ErrorCode.none:
            return error
        self._extend_session(member_id, now)
        if not self._subscriptions.is_current(now) and not self._subscriptions.have_patterns:
            self._deadlines.wake_by(now.monotonic_ms)  # the next turn finds the topics that are new
        return self._expect_rejoin(member_id, now) if must_join_again(self.state, member_id) else ErrorCode.none

    def _expect_rejoin(self, member_id: str, now: Instant) -> ErrorCode:
        timeout_ms = max(self.state.members[member_id].rebalance_timeout_ms, 0)
        self._deadlines.expect(member_id, now.monotonic_ms + timeout_ms)
        return ErrorCode.rebalance_in_progress

    def _sync(self, request: SyncRequest, now: Instant) -> Answer:
        error = check_sync(self.state, request)
        if error is ErrorCode.rebalance_in_progress:
            self._expect_rejoin(request.member_id, now)
        if error is not ErrorCode.none:
            return refusal(request, error)
        self._deadlines.done(request.member_id)
        self._extend_session(request.member_id, now)
        return Answer(ticket=request.ticket, value=sync_answer(self.state, request, self.names_of(request.member_id)))

    # -- deadlines

    def _extend_session(self, member_id: str, now: Instant) -> None:
        classic = self.state.members[member_id].classic
        timeout_ms = self._limits.timeouts_of(self.group_id).session_ms if classic is None else classic.session_timeout_ms
        self._deadlines.extend_session(member_id, now.monotonic_ms + timeout_ms)

    def answered(self, member_ids: Iterable[str], now: Instant) -> None:
        """Begin the sessions of members anew, which could send no heartbeats while they waited for the log."""
        for member_id in self.state.members.keys() & set(member_ids):
            self._extend_session(member_id, now)

    def _end_sessions(self, requests: Sequence[GroupRequest], now: Instant) -> None:
        """Remove members that were silent or owe something for too long, except those that have sent these requests."""
        heard = {request.member_id for request in requests if not isinstance(request, LeaveRequest)}
        for member_id in self._deadlines.overdue(now, heard):
            self._remove(member_id)

    # -- epoch and target

    def _raise_epoch(self, requests: Sequence[HeartbeatRequest], now: Instant) -> None:
        """Raise the group epoch if members, subscriptions or subscribed topics have changed.

        Which topics match a pattern depends on permissions, so changes of topics are noticed with a heartbeat (as in Kafka).
        """
        may_refresh = bool(requests) or not self._subscriptions.have_patterns
        if not self._is_changed and (not may_refresh or self._subscriptions.is_current(now)):
            return
        if may_refresh:
            self._subscriptions.refresh(requests[0].may_describe if requests else None, now)
        is_resolved = self._subscriptions.are_resolved(now)
        topics_hash = self._subscriptions.topics_hash() if is_resolved else self.state.topics_hash
        if self._is_changed or topics_hash != self.state.topics_hash:
            self.state.set_epoch(self.state.epoch + 1, topics_hash)
        self._is_changed = False

    def _assign_if_due(self, now: Instant) -> None:
        """Compute the target assignment of the group epoch, unless there is one that is too recent."""
        self._assign_at_ms = NEVER_MS
        if self.state.epoch == self.state.assignment_epoch or not self._subscriptions.are_resolved(now):
            return
        interval_ms = self._limits.timeouts_of(self.group_id).assignment_ms
        wait_ms = min(self.state.assigned_at_ms + interval_ms - now.wall_ms, interval_ms)  # the wall clock may have jumped
        if self.state.has_targets and wait_ms > 0:
            self._assign_at_ms = now.monotonic_ms + wait_ms
        else:
            self.state.set_targets(self._subscriptions.assignment(self._limits.assignors), now.wall_ms)

    # -- reconciliation

    def _move(self, sender: _Sender, now: Instant) -> Answer:
        """Move the sender towards its target; return the answer."""
        member_id, request = sender.member_id, sender.request
        if member_id not in self.state.members:
            text = f"Member {member_id} has been replaced."
            return refusal(request, ErrorCode.unknown_member_id, text)
        before = self.state.current_of(member_id)
        if sender.subscription_changed or not self.state.is_reconciled(member_id):
            goal = Goal(
                epoch=self.state.assignment_epoch, target=self.state.target_of(member_id),
                topic_ids=self._subscriptions.topic_ids_of(member_id), is_free=self.state.is_free,
            )  # fmt: skip
            changed = sender.subscription_changed
            self.state.set_current(member_id, reconcile(before, goal, sender.owned, subscription_changed=changed))
            if isinstance(request, HeartbeatRequest):
                self._expect_revocation(member_id, now)
        after = self.state.current_of(member_id)
        if isinstance(request, JoinRequest):
            joined_as = JoinAnswer(
                generation=after.member_epoch, protocol_type=PROTOCOL_TYPE, protocol_name=request.protocols[0][0],
                member_id=member_id,
            )  # fmt: skip
            return Answer(ticket=request.ticket, value=joined_as)
        needs_assignment = request.is_joining or request.is_full or before.assigned.keys() != after.assigned.keys()
        answer = HeartbeatAnswer(
            member_id=member_id, member_epoch=after.member_epoch,
            heartbeat_interval_ms=self._limits.timeouts_of(self.group_id).heartbeat_ms,
            assignment=frozenset(after.assigned) if needs_assignment else None,
        )  # fmt: skip
        return Answer(ticket=request.ticket, value=answer)

    def _expect_revocation(self, member_id: str, now: Instant) -> None:
        """Set the deadline of a member that has to revoke partitions; one that is set already stays."""
        if self.state.current_of(member_id).state is not MemberState.UNREVOKED_PARTITIONS:
            self._deadlines.done(member_id)
        else:
            self._deadlines.expect(
                member_id, now.monotonic_ms + max(self.state.members[member_id].rebalance_timeout_ms, 0)
            )  # fmt: skip

    def validate_state(self) -> None:
        """Assert the invariants."""
        self.state.validate_state()
        sessions, tasks = self._deadlines.sessions, self._deadlines.tasks
        assert sessions.keys() == self.state.members.keys()
        assert tasks.keys() <= self.state.members.keys()
        assert self.wake_at_ms <= min([NEVER_MS, self._assign_at_ms, *sessions.values(), *tasks.values()])


def _updated(member: MemberMetadata, request: HeartbeatRequest) -> MemberMetadata:
    """Return the member's metadata after a request; fields that are None did not change."""
    names = request.topic_names
    return MemberMetadata(
        client_id=request.client_id, client_host=request.client_host,
        instance_id=member.instance_id if request.instance_id is None else request.instance_id,
        rack_id=member.rack_id if request.rack_id is None else request.rack_id,
        topic_names=member.topic_names if names is None else tuple(sorted(set(names))),
        topic_pattern=member.topic_pattern if request.topic_pattern is None else request.topic_pattern,
        rebalance_timeout_ms=member.rebalance_timeout_ms if request.rebalance_timeout_ms < 0 else request.rebalance_timeout_ms,
        assignor=member.assignor if request.assignor is None else request.assignor,
    )  # fmt: skip
