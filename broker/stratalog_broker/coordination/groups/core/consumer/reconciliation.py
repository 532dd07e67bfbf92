"""Moves one member from its current assignment to its target, step by step (KIP-848, "Reconciliation"). Does no I/O.

A member first revokes the partitions that are not in its target, and stays in its epoch until it has. Then it reaches the
assignment epoch and gets those partitions of its target that no other member owns. It gets the rest when their owners have
revoked them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.model import CurrentAssignment, MemberState, Partition, Partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The state to reach. ``topic_ids`` are those of the member's subscription; partitions of other topics do not count."""

    epoch: int
    target: Partitions
    topic_ids: frozenset[UUID]
    is_free: Callable[[Partition], bool]
    """Returns whether no member owns the partition."""


def reconcile(
    current: CurrentAssignment, goal: Goal, reported: Partitions | None, *, subscription_changed: bool
) -> CurrentAssignment:
    """Return the member's next assignment; the same object if nothing can change.

    ``reported`` are the partitions that the member says it owns; None if it did not say.
    """
    if current.state is MemberState.UNREVOKED_PARTITIONS and _still_owns(current.revoking, reported):
        return _without_unsubscribed(current, goal, reported) if subscription_changed else current
    if current.state is MemberState.STABLE and current.member_epoch == goal.epoch:
        return _without_unsubscribed(current, goal, reported) if subscription_changed else current
    return _next(current, goal, reported)


def _still_owns(revoking: Mapping[Partition, int], reported: Partitions | None) -> bool:
    return bool(revoking) and (reported is None or not reported.isdisjoint(revoking))


def _without_unsubscribed(current: CurrentAssignment, goal: Goal, reported: Partitions | None) -> CurrentAssignment:
    """Take the partitions of topics to which the member no longer subscribes."""
    gone = {partition: epoch for partition, epoch in current.assigned.items() if partition[0] not in goal.topic_ids}
    if not gone:
        return current
    assigned = {partition: epoch for partition, epoch in current.assigned.items() if partition not in gone}
    revoking = {**current.revoking, **gone}
    if _still_owns(revoking, reported):
        return replace(current, state=MemberState.UNREVOKED_PARTITIONS, assigned=assigned, revoking=revoking)
    return replace(current, assigned=assigned)


def _next(current: CurrentAssignment, goal: Goal, reported: Partitions | None) -> CurrentAssignment:
    target = {partition for partition in goal.target if partition[0] in goal.topic_ids}
    assigned = {partition: epoch for partition, epoch in current.assigned.items() if partition in target}
    revoking = {partition: epoch for partition, epoch in current.assigned.items() if partition not in target}
    if _still_owns(revoking, reported):
        return replace(current, state=MemberState.UNREVOKED_PARTITIONS, assigned=assigned, revoking=revoking)
    missing = target - assigned.keys()
    # A partition that the member itself is revoking is not free, but the member may have it back.
    given = {each for each in missing if goal.is_free(each) or each in current.revoking}
    next_assignment = CurrentAssignment(
        member_epoch=goal.epoch,
        previous_epoch=current.previous_epoch if goal.epoch == current.member_epoch else current.member_epoch,
        state=MemberState.STABLE if len(given) == len(missing) else MemberState.UNRELEASED_PARTITIONS,
        assigned={**assigned, **dict.fromkeys(sorted(given), goal.epoch)},
    )
    return current if next_assignment == current else next_assignment
