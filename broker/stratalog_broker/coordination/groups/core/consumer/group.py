"""One consumer group of the consumer protocol (KIP-848), as a state machine that does no I/O.

It works in turns: a turn takes all heartbeats that have arrived, changes members, raises the group epoch once if that is
needed, computes a target assignment if one is due, and moves each sender towards its target. Its records are written as one
batch; its answers are sent when that batch is in the log. There is no next turn before that (``turns.py``).

Differences from Apache Kafka: one group epoch for all changes of a turn, and regular expressions are resolved at once, not in
the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.model import (
    LEAVE_STATIC_EPOCH,
    ConsumerGroupState,
    MemberMetadata,
    MemberState,
    Topics,
)
from stratalog_broker.coordination.groups.core.consumer.reconciliation import Goal, reconcile
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer, HeartbeatRefused, HeartbeatRequest
from stratalog_broker.coordination.groups.core.consumer.senders import leaving_member, sender_of
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.consumer.subscriptions import Subscriptions
from stratalog_broker.coordination.groups.core.consumer.tracked_state import TrackedState
from stratalog_broker.coordination.groups.core.messages import Answer
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
    """The outcome of a turn: send the answers once the records are in the log."""

    answers: Sequence[Answer]
    records: Sequence[CoordinatorRecord]


@dataclass(frozen=True, slots=True)
class _Sender:
    request: HeartbeatRequest
    member_id: str
    subscription_changed: bool


class ConsumerGroup:
    """Not thread-safe; no call blocks."""

    def __init__(self, group_id: str, stored: ConsumerGroupState, limits: ConsumerLimits, topics: Topics, now: Instant) -> None:
        self.group_id = group_id
        self.state = TrackedState(group_id, stored)
        self._limits = limits
        self._subscriptions = Subscriptions(self.state, topics)
        self._is_changed = self.state.is_reset
        """Whether members or subscriptions changed since the group epoch was raised."""
        self._assign_at_ms = NEVER_MS
        self._sessions: dict[str, int] = {}
        """When each member's session ends, on the monotonic clock."""
        self._revocations: dict[str, int] = {}
        """When each member that has to revoke partitions must have done so."""
        self.wake_at_ms = NEVER_MS
        """Never later than the next deadline."""
        self._wake_is_due = False
        for member_id in self.state.members:
            self._extend_session(member_id, now)

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

    # -- turns

    def turn(self, requests: Sequence[HeartbeatRequest], now: Instant) -> Turn:
        """Handle heartbeats and deadlines that have passed."""
        self._end_sessions(now, {request.member_id for request in requests})
        answers, senders = list[Answer](), list[_Sender]()
        for request in requests:
            try:
                if request.is_leaving:
                    answers.append(Answer(ticket=request.ticket, value=self._leave(request)))
                else:
                    senders.append(self._admit(request, now))
            except HeartbeatRefused as refused:
                answers.append(Answer(ticket=request.ticket, value=refused.answer))
        self._raise_epoch(requests, now)
        self._assign_if_due(now)
        answers += [Answer(ticket=sender.request.ticket, value=self._move(sender, now)) for sender in senders]
        self._plan_wake()
        return Turn(answers=answers, records=self.state.drain())

    # -- members

    def _admit(self, request: HeartbeatRequest, now: Instant) -> _Sender:
        """Add or update the sender. Raises ``HeartbeatRefused``."""
        sender = sender_of(self.state, request, self._limits.members_max)
        before = self.state.members.get(sender.replaced_id or sender.member_id)
        after = _updated(before or MemberMetadata(), request)
        self._check_size(before, after)
        if sender.replaced_id is not None:
            self.state.replace_member(sender.replaced_id, sender.member_id)
            self._forget(sender.replaced_id)
        changed = before is None or (before.topic_names, before.topic_pattern) != (after.topic_names, after.topic_pattern)
        self.state.set_member(sender.member_id, after)
        self._is_changed |= changed
        self._extend_session(sender.member_id, now)
        return _Sender(request, sender.member_id, changed)

    def _check_size(self, before: MemberMetadata | None, after: MemberMetadata) -> None:
        """Raise ``HeartbeatRefused`` if the subscriptions of the group would become too large."""
        added_bytes = after.subscription_bytes - (0 if before is None else before.subscription_bytes)
        if added_bytes > 0 and self.state.subscription_bytes + added_bytes > self._limits.group_bytes_max:
            text = f"The subscriptions of the group's members may have {self._limits.group_bytes_max} bytes."
            raise HeartbeatRefused(ErrorCode.group_max_size_reached, text)

    def _leave(self, request: HeartbeatRequest) -> HeartbeatAnswer:
        member_id = leaving_member(self.state, request)
        if request.member_epoch == LEAVE_STATIC_EPOCH:
            current = self.state.current_of(member_id)
            away = replace(current, member_epoch=LEAVE_STATIC_EPOCH, state=MemberState.STABLE, revoking={})
            self.state.set_current(member_id, away)
            self._revocations.pop(member_id, None)
        else:
            self._remove(member_id)
        return HeartbeatAnswer(member_id=request.member_id, member_epoch=request.member_epoch)

    def _remove(self, member_id: str) -> None:
        self.state.remove_member(member_id)
        self._forget(member_id)
        self._is_changed = True

    def _forget(self, member_id: str) -> None:
        self._sessions.pop(member_id, None)
        self._revocations.pop(member_id, None)

    # -- deadlines

    def _extend_session(self, member_id: str, now: Instant) -> None:
        self._sessions[member_id] = now.monotonic_ms + self._limits.timeouts_of(self.group_id).session_ms
        self.wake_at_ms = min(self.wake_at_ms, self._sessions[member_id])

    def _end_sessions(self, now: Instant, heard: Iterable[str]) -> None:
        """Remove members that were silent or held partitions for too long, except those that are heard in this turn."""
        if self.wake_at_ms > now.monotonic_ms:
            return
        for deadlines in (self._sessions, self._revocations):
            overdue = [member_id for member_id, at_ms in deadlines.items() if at_ms <= now.monotonic_ms]
            for member_id in overdue:
                if member_id not in heard:
                    self._remove(member_id)
        self._wake_is_due = True

    def _plan_wake(self) -> None:
        if self._wake_is_due:  # O(members), seldom: sessions end much later than their members' next heartbeats
            self._wake_is_due = False
            self.wake_at_ms = min([NEVER_MS, *self._sessions.values(), *self._revocations.values()])
        self.wake_at_ms = min(self.wake_at_ms, self._assign_at_ms)

    # -- epoch and target

    def _raise_epoch(self, requests: Sequence[HeartbeatRequest], now: Instant) -> None:
        """Raise the group epoch if members, subscriptions or subscribed topics have changed.

        Which topics match a pattern depends on permissions, so changes of topics are noticed with a heartbeat (as in Kafka).
        """
        if not self._is_changed and (not requests or self._subscriptions.is_current(now)):
            return
        if requests:
            self._subscriptions.refresh(requests[0].may_describe, now)
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
        interval_ms = self._limits.assignment_interval_ms
        wait_ms = min(self.state.assigned_at_ms + interval_ms - now.wall_ms, interval_ms)  # the wall clock may have jumped
        if self.state.has_targets and wait_ms > 0:
            self._assign_at_ms = now.monotonic_ms + wait_ms
        else:
            self.state.set_targets(self._subscriptions.assignment(self._limits.assignors), now.wall_ms)

    # -- reconciliation

    def _move(self, sender: _Sender, now: Instant) -> HeartbeatAnswer:
        """Move the sender towards its target; return the answer."""
        member_id, request = sender.member_id, sender.request
        if member_id not in self.state.members:
            return HeartbeatAnswer(error=ErrorCode.unknown_member_id, message=f"Member {member_id} has left the group.")
        before = self.state.current_of(member_id)
        if sender.subscription_changed or not self.state.is_reconciled(member_id):
            goal = Goal(
                epoch=self.state.assignment_epoch, target=self.state.target_of(member_id),
                topic_ids=self._subscriptions.topic_ids_of(member_id), is_free=self.state.is_free,
            )  # fmt: skip
            changed = sender.subscription_changed
            self.state.set_current(member_id, reconcile(before, goal, request.owned, subscription_changed=changed))
            self._expect_revocation(member_id, now)
        after = self.state.current_of(member_id)
        needs_assignment = request.is_joining or request.is_full or before.assigned.keys() != after.assigned.keys()
        return HeartbeatAnswer(
            member_id=member_id, member_epoch=after.member_epoch,
            heartbeat_interval_ms=self._limits.timeouts_of(self.group_id).heartbeat_ms,
            assignment=frozenset(after.assigned) if needs_assignment else None,
        )  # fmt: skip

    def _expect_revocation(self, member_id: str, now: Instant) -> None:
        """Set the deadline of a member that has to revoke partitions; one that is set already stays."""
        if self.state.current_of(member_id).state is not MemberState.UNREVOKED_PARTITIONS:
            self._revocations.pop(member_id, None)
        elif member_id not in self._revocations:
            at_ms = now.monotonic_ms + max(self.state.members[member_id].rebalance_timeout_ms, 0)
            self._revocations[member_id] = at_ms
            self.wake_at_ms = min(self.wake_at_ms, at_ms)

    def validate_state(self) -> None:
        """Assert the invariants."""
        self.state.validate_state()
        assert self._sessions.keys() == self.state.members.keys()
        assert self._revocations.keys() <= self.state.members.keys()
        assert self.wake_at_ms <= min([NEVER_MS, self._assign_at_ms, *self._sessions.values(), *self._revocations.values()])


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
