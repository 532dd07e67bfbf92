"""Garbage is only what a listing and the committed manifest prove to be garbage."""

from __future__ import annotations

from uuid import UUID

from stratalog_tiering.core.garbage import manifest_garbage, orphans
from stratalog_tiering.format.object_keys import manifest_key, marker_key
from stratalog_tiering.store import ObjectInfo

TOPIC = UUID(int=1)
NOTHING: frozenset[str] = frozenset()


def info(key: str, written_ms: int) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=1, etag="", last_modified_ms=written_ms)


def test_orphans_are_old_and_unreferenced() -> None:
    listed = [info("a", 10), info("b", 10), info("c", 99)]
    assert orphans(listed, frozenset({"a"}), 50) == ["b"]


def test_superseded_versions_expire_by_their_successors_age_and_losers_by_their_own() -> None:
    names = {version: manifest_key(TOPIC, 0, version, 1) for version in range(1, 5)}
    loser_old, loser_new = manifest_key(TOPIC, 0, 4, 2), manifest_key(TOPIC, 0, 5, 3)
    listed = [info(names[version], version * 100) for version in names]
    listed += [info(marker_key(names[version]), version * 100 + 1) for version in names]
    listed += [info(loser_old, 150), info(loser_new, 900)]
    garbage = manifest_garbage(listed, 4, names[4], NOTHING, 350)
    assert set(garbage) == {names[1], names[2], marker_key(names[1]), marker_key(names[2]), loser_old}
    assert garbage.index(marker_key(names[2])) > garbage.index(names[2])
    removed = frozenset({names[1], marker_key(names[2])})
    assert set(manifest_garbage(listed, 4, names[4], removed, 350)) == set(garbage) - removed
    assert names[4] not in manifest_garbage(listed, 4, names[4], NOTHING, 10**9)
    assert marker_key(names[4]) not in manifest_garbage(listed, 4, names[4], NOTHING, 10**9)


def test_a_version_without_a_listed_successor_expires_by_the_next_one() -> None:
    """The successor is already deleted, or too new to be in the listing."""
    first, loser, current = (manifest_key(TOPIC, 0, version, 1) for version in (1, 2, 9))
    listed = [info(first, 100), info(loser, 150), info(marker_key(current), 900)]
    assert manifest_garbage(listed, 9, current, NOTHING, 900) == []
    assert manifest_garbage(listed, 9, current, NOTHING, 901) == [loser, first]
    assert manifest_garbage(listed[:2], 9, current, NOTHING, 10**9) == []
