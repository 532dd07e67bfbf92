"""Which lock a new object gets: rounded up, never renewed by a merge, and for commits as long as the history needs it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.segment_entries import entry_of, leaves_of
from unit.tiering.core.test_retention_of_hot_ledgers import NOW_MS, ledger, state

from stratalog_core.object_lock import LOCK_MS_MIN, LockMode, ObjectLock, in_force, joined
from stratalog_tiering.core.garbage import Garbage, kept_by_policy
from stratalog_tiering.core.locks import merged_lock, new_lock, pointer_lock
from stratalog_tiering.core.policy import TierPolicy, tier_policy
from stratalog_tiering.core.retention import expired_ledgers, expiry_reason
from stratalog_tiering.format.locks import entry_lock, manifest_lock
from stratalog_tiering.format.manifest import Reason, SegmentEntry, decode_manifest, empty_manifest, pointer_to
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous, Removal

COMPLIANCE, GOVERNANCE = LockMode.COMPLIANCE, LockMode.GOVERNANCE
LOCKS = st.none() | st.builds(ObjectLock, mode=st.sampled_from(LockMode), until_ms=st.integers(1, 100).map(lambda s: s * 1000))


def entry(number: int, lock: ObjectLock | None = None) -> SegmentEntry:
    made = entry_of(f"s{number}", number * 10, number * 10 + 10, created_at_ms=1)
    if lock is None:
        return made
    options = msgspec.structs.replace(made.options, lock_until_ms=lock.until_ms, lock_mode=lock.mode.value)
    return msgspec.structs.replace(made, options=options)


@pytest.mark.parametrize(("now_ms", "lock_ms", "until_ms"), [(0, 1000, 1000), (1, 1000, 2000), (999, 1, 1000), (1000, 1, 2000)])
def test_a_new_segment_is_locked_for_its_time_in_whole_seconds(now_ms: int, lock_ms: int, until_ms: int) -> None:
    policy = TierPolicy(lock_mode=GOVERNANCE, lock_ms=lock_ms)
    assert new_lock(policy, now_ms) == ObjectLock(mode=GOVERNANCE, until_ms=until_ms)
    assert new_lock(TierPolicy(lock_ms=lock_ms), now_ms) is None


def test_the_policy_is_read_from_the_topics_configs() -> None:
    configs = {"stratalog.tier.lock.mode": "compliance", "stratalog.tier.lock.ms": "60000"}
    assert (tier_policy(configs).lock_mode, tier_policy(configs).lock_ms) == (COMPLIANCE, 60_000)
    assert tier_policy({**configs, "stratalog.tier.lock.mode": "none"}).lock_mode is None
    assert tier_policy({}).lock_mode is None


@given(locks=st.lists(LOCKS, max_size=5), now_ms=st.integers(0, 110_000))
def test_what_replaces_or_refers_to_others_is_locked_as_long_as_they_are_and_no_longer(
    locks: list[ObjectLock | None], now_ms: int
) -> None:
    sources = [entry(number, lock) for number, lock in enumerate(locks)]
    assert [entry_lock(source) for source in sources] == locks
    given_locks = [lock for lock in locks if lock is not None]
    merged = merged_lock(sources, now_ms)
    latest_ms = max((lock.until_ms for lock in given_locks), default=0)
    if merged is None:
        assert latest_ms < now_ms + LOCK_MS_MIN
        return
    assert merged == in_force(joined(locks), now_ms)
    assert merged.until_ms == latest_ms
    assert (merged.mode is COMPLIANCE) == any(lock.mode is COMPLIANCE for lock in given_locks)


@given(locks=st.lists(LOCKS, min_size=1, max_size=6), now_ms=st.integers(0, 110_000))
def test_a_manifest_is_locked_as_long_as_any_segment_that_it_or_its_predecessors_referred_to(
    locks: list[ObjectLock | None], now_ms: int
) -> None:
    previous, last = Previous(manifest=empty_manifest(UUID(int=1), "t", 0, 0)), None
    for number, lock in enumerate(locks):
        edit = ManifestEdit(previous, writer="w", random_id=lambda: 7)
        appended = entry(number, lock)
        edit.append(appended, leaves_of(appended))
        last = edit.finish(created_at_ms=now_ms)
        previous = Previous(manifest=last.manifest, key=last.key, sha256=last.sha256)
    assert last is not None
    stored = decode_manifest(last.content, last.sha256)
    latest_ms = max((lock.until_ms for lock in locks if lock is not None), default=0)
    assert stored.lock_until_ms == (latest_ms if latest_ms > now_ms else 0)
    assert last.lock == in_force(manifest_lock(stored), now_ms)
    assert pointer_lock(pointer_to(stored, last.key, last.sha256), now_ms) == last.lock
    assert (last.lock is not None) == (latest_ms >= now_ms + LOCK_MS_MIN)


def test_segments_that_left_the_history_do_not_shorten_its_lock() -> None:
    """Their objects are still in the store for the grace period, or longer."""
    lock = ObjectLock(mode=GOVERNANCE, until_ms=90_000)
    edit = ManifestEdit(Previous(manifest=empty_manifest(UUID(int=1), "t", 0, 0)), writer="w", random_id=lambda: 7)
    for each in (entry(0, lock), entry(1)):
        edit.append(each, leaves_of(each))
    first = edit.finish(created_at_ms=1000)
    previous = Previous(manifest=first.manifest, key=first.key, sha256=first.sha256)
    edit = ManifestEdit(previous, writer="w", random_id=lambda: 8)
    edit.drop_below(10, lambda _: Removal(reason=Reason.LOG_START))
    assert edit.finish(created_at_ms=2000).lock == lock


def test_a_locked_segment_does_not_expire_by_any_rule() -> None:
    lock = ObjectLock(mode=COMPLIANCE, until_ms=9000)
    policy = TierPolicy(retention_ms=1, retention_bytes=1)
    rules = ({"log_start_offset": 10}, {"log_start_offset": 0})
    for rule in rules:
        at = [
            expiry_reason(entry(0, lock), each, total_bytes=10**6, now_ms=now_ms, **rule)
            for now_ms in (8999, 9000)
            for each in (policy, TierPolicy(retention_ms=-1, retention_bytes=1))
        ]
        assert at[:2] == [None, None]
        assert None not in at[2:]


def test_hot_ledgers_stay_while_older_history_is_locked() -> None:
    """Removing them would make the locked history unreadable, because the log's start moves to their end."""
    ledgers = [ledger(1, 100), ledger(2, 100)]
    found = state(ledgers, cold_newest_ms=1)
    policy = TierPolicy(retention_ms=-1, retention_bytes=1)
    assert expired_ledgers(found, policy, {}, NOW_MS)
    pointer = found.pointer
    assert pointer is not None
    locked = msgspec.structs.replace(pointer, lock_until_ms=NOW_MS + 1, lock_mode="governance")
    assert not expired_ledgers(replace(found, pointer=locked), policy, {}, NOW_MS)
    ended = msgspec.structs.replace(pointer, lock_until_ms=NOW_MS, lock_mode="governance")
    assert expired_ledgers(replace(found, pointer=ended), policy, {}, NOW_MS)


def test_garbage_of_a_topic_with_locks_waits_for_the_time_that_it_gives() -> None:
    found = [Garbage(key=key, object_bytes=1, reason="orphan", due_ms=50) for key in ("s.segment", "s.key", "unknown")]
    kept = kept_by_policy(found, {"s.segment": 40, "s.key": 40}, 100)
    assert [each.due_ms for each in kept] == [140, 50, 100]
    assert kept_by_policy(found, {"s.segment": 40}, 0) == found
