"""Bounds and time-outs of consumer groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Timeouts(NamedTuple):
    """A member that sends no heartbeat for ``session_ms`` is removed; it is asked for one every ``heartbeat_ms``."""

    session_ms: int = 45_000
    heartbeat_ms: int = 5_000


def default_timeouts(group_id: str) -> Timeouts:
    return Timeouts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """``assignors`` are the allowed ones, the default first.

    A target assignment is computed at most once per ``assignment_interval_ms``, so that many members that join one after the
    other cause few of them (KIP-1263). ``turn_requests_max`` and ``turn_bytes_max``: heartbeats, and bytes
    of their subscriptions, that are handled in one step and one batch of records. ``group_bytes_max``: the subscriptions of all
    members.
    """

    members_max: int = 10_000
    assignors: tuple[str, ...] = ("uniform", "range")
    assignment_interval_ms: int = 1_000
    timeouts_of: Callable[[str], Timeouts] = default_timeouts
    """Returns the time-outs of a group by its id."""
    name_bytes_max: int = 4_096
    subscription_bytes_max: int = 262_144
    group_bytes_max: int = 67_108_864
    turn_requests_max: int = 500
    turn_bytes_max: int = 524_288
