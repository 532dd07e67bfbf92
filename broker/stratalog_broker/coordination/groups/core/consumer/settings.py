"""Bounds and time-outs of consumer groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Timeouts(NamedTuple):
    """A member that sends no heartbeat for ``session_ms`` is removed; it is asked for one every ``heartbeat_ms``.

    A target assignment is computed at most once per ``assignment_ms``, so that many members that join one after the other cause
    few of them (KIP-1263).
    """

    session_ms: int = 45_000
    heartbeat_ms: int = 5_000
    assignment_ms: int = 1_000


def default_timeouts(group_id: str) -> Timeouts:
    return Timeouts()


class MigrationPolicy(StrEnum):
    """Which groups with members change their protocol: ``group.consumer.migration.policy``. Groups without always may."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"

    @property
    def upgrades(self) -> bool:
        """Whether a classic group becomes a consumer group when a member of the consumer protocol joins it."""
        return self in (MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.UPGRADE)

    @property
    def downgrades(self) -> bool:
        """Whether a consumer group becomes a classic one when its last member of the consumer protocol leaves it."""
        return self in (MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.DOWNGRADE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """``assignors`` are the allowed ones, the default first.

    A group that has more than ``classic_members_max`` members is not downgraded. One whose subscriptions are larger than
    ``migration_bytes_max`` is neither upgraded nor downgraded, because all of it is written as one batch.

    ``turn_requests_max`` and ``turn_bytes_max``: heartbeats, and bytes of their subscriptions, that are handled in one step and
    one batch of records. ``group_bytes_max``: the subscriptions of all members.
    """

    members_max: int = 10_000
    classic_members_max: int = 10_000
    migration: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL
    migration_bytes_max: int = 4_194_304
    assignors: tuple[str, ...] = ("uniform", "range")
    timeouts_of: Callable[[str], Timeouts] = default_timeouts
    """Returns the time-outs of a group by its id."""
    name_bytes_max: int = 4_096
    subscription_bytes_max: int = 262_144
    group_bytes_max: int = 67_108_864
    turn_requests_max: int = 500
    turn_bytes_max: int = 524_288
