"""A reader's lease keeps what left the history since it began, nothing else, and only until it expires."""

from __future__ import annotations

from uuid import UUID

from stratalog_tiering.core.garbage import Garbage
from stratalog_tiering.core.leases import CLOCKS_APART_MS, kept_by_leases, protection_of, unprotected_before_ms
from stratalog_tiering.format.descriptor import LEASE_MS_MAX, ReaderLease, encode_descriptor
from stratalog_tiering.store import ObjectInfo

TOPIC, OTHER = UUID(int=1), UUID(int=2)
NOW_MS, GRACE_MS = 1_000_000_000, 1_000


def info(written_ms: int) -> ObjectInfo:
    return ObjectInfo(key="leases/1.json", size_bytes=1, etag="", last_modified_ms=written_ms)


def garbage(left_ms: int) -> Garbage:
    return Garbage(key="k", object_bytes=1, reason="orphan", due_ms=left_ms + GRACE_MS)


def test_what_left_since_the_lease_began_is_kept_until_it_ends() -> None:
    lease = ReaderLease(holder="audit", topic_ids=(TOPIC,), began_at_ms=NOW_MS, duration_ms=5_000)
    renewed = protection_of(encode_descriptor(lease), info(NOW_MS + 60_000))
    assert renewed.from_ms == NOW_MS - CLOCKS_APART_MS, "renewing does not move the beginning"
    assert renewed.until_ms == NOW_MS + 65_000 + CLOCKS_APART_MS
    early, late = garbage(renewed.from_ms - 1), garbage(renewed.from_ms)
    kept = kept_by_leases([early, late], [renewed], TOPIC, GRACE_MS)
    assert kept[0] == early
    assert (kept[1].due_ms, kept[1].lease) == (renewed.until_ms, "audit")
    assert kept_by_leases([late], [renewed], OTHER, GRACE_MS) == [late]
    assert unprotected_before_ms([renewed], TOPIC, NOW_MS) == renewed.from_ms - 1
    assert unprotected_before_ms([renewed], OTHER, NOW_MS) == NOW_MS


def test_a_lease_without_topics_keeps_all_and_one_that_cannot_be_read_does_for_a_day() -> None:
    lease = protection_of(encode_descriptor(ReaderLease(holder="x", began_at_ms=NOW_MS, duration_ms=5_000)), info(NOW_MS))
    assert lease.covers(TOPIC)
    unreadable = protection_of(b"{", info(NOW_MS))
    assert unreadable.covers(OTHER)
    assert (unreadable.from_ms, unreadable.until_ms) == (0, NOW_MS + LEASE_MS_MAX)
