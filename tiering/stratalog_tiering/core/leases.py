"""The objects that readers' leases keep from being deleted, and until when. No I/O.

An object that left the history before a lease began is not needed by its holder, who reads the history as it was then or later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer
from stratalog_tiering.core.garbage import Garbage
from stratalog_tiering.format.descriptor import LEASE_MS_MAX, ReaderLease, decode_descriptor
from stratalog_tiering.store.base import ObjectInfo

CLOCKS_APART_MS: Final = 60_000
"""Allowance for the clocks of holders, workers and the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """A lease in force. It keeps what left the history at ``from_ms`` or later, until ``until_ms`` (wall time)."""

    holder: str
    topic_ids: frozenset[UUID]
    from_ms: int
    until_ms: int

    def covers(self, topic_id: UUID) -> bool:
        return not self.topic_ids or topic_id in self.topic_ids


def protection_of(content: Buffer, info: ObjectInfo) -> Protection:
    """The protection by the lease in the object ``info``. One that cannot be read keeps everything, for the longest time."""
    try:
        lease = decode_descriptor(content, ReaderLease, info.key)
    except (Corrupt, Invalid):
        return Protection(
            holder=f"{info.key} (unreadable)", topic_ids=frozenset(), from_ms=0, until_ms=info.last_modified_ms + LEASE_MS_MAX
        )
    return Protection(
        holder=lease.holder,
        topic_ids=frozenset(lease.topic_ids),
        from_ms=min(lease.began_at_ms, info.last_modified_ms) - CLOCKS_APART_MS,
        until_ms=info.last_modified_ms + lease.duration_ms + CLOCKS_APART_MS,
    )


def unprotected_before_ms(protections: Iterable[Protection], topic_id: UUID, before_ms: int) -> int:
    """The last wall time, at most ``before_ms``: no object of the topic that left the history then or earlier is protected."""
    return min([before_ms, *(each.from_ms - 1 for each in protections if each.covers(topic_id))])


def kept_by_leases(
    garbage: Iterable[Garbage], protections: Sequence[Protection], topic_id: UUID, grace_ms: int
) -> list[Garbage]:
    """``garbage``, whose due times are ``grace_ms`` after it left the history; what a lease protects is due when that ends."""
    covering = [each for each in protections if each.covers(topic_id)]
    kept = []
    for each in garbage:
        keeping = [lease for lease in covering if each.due_ms - grace_ms >= lease.from_ms]
        longest = max(keeping, key=lambda lease: lease.until_ms, default=None)
        kept.append(each if longest is None else replace(each, due_ms=max(each.due_ms, longest.until_ms), lease=longest.holder))
    return kept
