"""Garbage is only what a listing and the committed manifest prove to be garbage."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_metadata.records import DeletedTopic, Topic
from stratalog_tiering.core.garbage import (
    Garbage,
    deleted_topic_garbage,
    deletion_due_ms,
    manifest_garbage,
    orphans,
    removed_garbage,
)
from stratalog_tiering.format.manifest import RemovedObject
from stratalog_tiering.format.object_keys import manifest_key, marker_key
from stratalog_tiering.store import ObjectInfo

TOPIC = UUID(int=1)
NOTHING: frozenset[str] = frozenset()
GRACE_MS = 50


def info(key: str, written_ms: int) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, etag="", last_modified_ms=written_ms)


def due(garbage: list[Garbage], now_ms: int) -> list[str]:
    return [each.key for each in garbage if each.is_due(now_ms)]


def test_orphans_are_old_and_unreferenced() -> None:
    listed = [info("a", 10), info("b", 10), info("c", 99)]
    found = orphans(listed, frozenset({"a"}), GRACE_MS)
    assert due(found, 60) == []
    assert due(found, 61) == ["b"]
    assert due(found, 10**9) == ["b", "c"]


def test_removed_objects_are_due_after_the_grace_period_for_the_reason_of_their_removal() -> None:
    removed = [RemovedObject(key=key, object_bytes=7, reason="merged", removed_at_ms=10) for key in ("a", "shared", "gone")]
    found = removed_garbage([info("a", 0), info("shared", 0)], removed, frozenset({"shared"}), GRACE_MS)
    assert found == [Garbage(key="a", object_bytes=7, reason="merged", due_ms=60)]
    assert (due(found, 59), due(found, 60)) == ([], ["a"])


manifests = [manifest_key(TOPIC, 0, version, lot) for version in (1, 2, 3) for lot in (1, 2)]
keys = st.sampled_from([*"abcdef", *manifests, *map(marker_key, manifests)])


@settings(max_examples=50)
@given(st.dictionaries(keys, st.integers(0, 200)), st.frozensets(keys), st.integers(0, 100), st.integers(0, 500))
def test_nothing_that_the_current_manifest_refers_to_is_garbage(
    written: dict[str, int], referenced: frozenset[str], grace_ms: int, now_ms: int
) -> None:
    current = manifest_key(TOPIC, 0, 2, 1)
    listed = [info(key, written_ms) for key, written_ms in written.items()]
    of_data = orphans([each for each in listed if len(each.key) == 1], referenced, grace_ms)
    garbage = [each.key for each in (*of_data, *manifest_garbage(listed, 2, current, referenced, grace_ms))]
    assert not {*garbage} & {*referenced, current, marker_key(current)}
    assert {*garbage} <= written.keys()
    assert all(written[key] + grace_ms < now_ms for key in due(of_data, now_ms))


def test_objects_of_a_deleted_topic_wait_until_it_cannot_be_restored() -> None:
    topic = Topic(name="t", topic_id=TOPIC, partition_count=1, replication_factor=1)
    restorable = DeletedTopic(topic_id=TOPIC, name="t", deleted_at_ms=100, restorable_ms=200, topic=topic)
    final = DeletedTopic(topic_id=TOPIC, name="t", deleted_at_ms=100)
    assert (deletion_due_ms(restorable, 130, GRACE_MS), deletion_due_ms(final, 130, GRACE_MS)) == (330, 180)
    assert deletion_due_ms(final, 70, GRACE_MS) == 150, "a marker of an earlier deletion"
    waiting = deleted_topic_garbage([info("a", 0)], restorable, 130, GRACE_MS)
    assert (waiting[0].due_ms, due(waiting, 10**9)) == (330, []), "only a worker makes the deletion final"
    gone = deleted_topic_garbage([info("a", 0)], final, 130, GRACE_MS)
    assert (due(gone, 179), due(gone, 180)) == ([], ["a"])


def test_superseded_versions_expire_by_their_successors_age_and_losers_by_their_own() -> None:
    names = {version: manifest_key(TOPIC, 0, version, 1) for version in range(1, 5)}
    loser_old, loser_new = manifest_key(TOPIC, 0, 4, 2), manifest_key(TOPIC, 0, 5, 3)
    listed = [info(names[version], version * 100) for version in names]
    listed += [info(marker_key(names[version]), version * 100 + 1) for version in names]
    listed += [info(loser_old, 150), info(loser_new, 900)]
    garbage = due(manifest_garbage(listed, 4, names[4], NOTHING, GRACE_MS), 400)
    assert set(garbage) == {names[1], names[2], marker_key(names[1]), marker_key(names[2]), loser_old}
    assert garbage.index(marker_key(names[2])) > garbage.index(names[2])
    removed = frozenset({names[1], marker_key(names[2])})
    assert set(due(manifest_garbage(listed, 4, names[4], removed, GRACE_MS), 400)) == set(garbage) - removed
    everything = due(manifest_garbage(listed, 4, names[4], NOTHING, GRACE_MS), 10**9)
    assert names[4] not in everything
    assert marker_key(names[4]) not in everything


def test_a_version_without_a_listed_successor_expires_by_the_next_one() -> None:
    """The successor is already deleted, or too new to be in the listing."""
    first, loser, current = (manifest_key(TOPIC, 0, version, 1) for version in (1, 2, 9))
    listed = [info(first, 100), info(loser, 150), info(marker_key(current), 900)]
    found = manifest_garbage(listed, 9, current, NOTHING, GRACE_MS)
    assert (due(found, 950), due(found, 951)) == ([], [loser, first])
    assert manifest_garbage(listed[:2], 9, current, NOTHING, GRACE_MS) == []
