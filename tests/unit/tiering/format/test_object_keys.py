"""Keys: what is written is parsed back, listings sort as promised, only markers commit."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from stratalog_tiering.format import object_keys as keys

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")
numbers = st.integers(0, 2**63 - 1)


@given(numbers, st.integers(0, 2**31 - 1), numbers)
def test_segment_keys_explain_themselves(base: int, epoch: int, random_id: int) -> None:
    parsed = keys.parse_segment_key(keys.segment_key(TOPIC, 4, base, epoch, random_id))
    assert parsed == keys.SegmentKey(topic_id=TOPIC, partition=4, base_offset=base, leader_epoch=epoch, random_id=random_id)


@given(st.sets(numbers, min_size=1, max_size=8), st.data())
def test_the_newest_marked_manifest_is_the_committed_one(versions: set[int], data: st.DataObject) -> None:
    manifests = {version: keys.manifest_key(TOPIC, 0, version, data.draw(numbers)) for version in versions}
    losers = [keys.manifest_key(TOPIC, 0, version, data.draw(numbers)) for version in versions]
    marked = data.draw(st.sets(st.sampled_from(sorted(versions))))
    late = data.draw(st.sets(st.sampled_from(sorted(marked)))) if marked else set()
    manifests.update({version: keys.version_key(TOPIC, 0, version) for version in late})
    listing = [*manifests.values(), *losers, *(keys.marker_key(manifests[version]) for version in marked)]
    expected = manifests[max(marked)] if marked else None
    assert keys.newest_committed(data.draw(st.permutations(listing))) == expected


@given(st.lists(numbers, min_size=2, max_size=2, unique=True))
def test_listings_begin_with_the_newest_manifest(versions: list[int]) -> None:
    low, high = sorted(versions)
    assert keys.manifest_key(TOPIC, 0, high, 9) < keys.manifest_key(TOPIC, 0, low, 1)


def test_markers_and_manifests_name_each_other() -> None:
    manifest = keys.manifest_key(TOPIC, 0, 5, 1)
    marker = keys.marker_key(manifest)
    assert keys.marked_manifest(marker) == manifest
    assert keys.is_marker(marker)
    assert not keys.is_marker(manifest)
    parsed = keys.parse_manifest_key(marker)
    assert parsed == keys.ManifestKey(topic_id=TOPIC, partition=0, version=5, is_marker=True)


def test_foreign_keys_are_not_ours() -> None:
    for key in ("segments/x", "topics/readme.txt", "manifests/a/b/c", "", "segments/" + TOPIC.hex + "/0/1.segment"):
        assert keys.parse_segment_key(key) is None
        assert keys.parse_manifest_key(key) is None
        assert keys.parse_topic_key(key) is None


def test_one_partitions_prefix_does_not_hold_anothers_keys() -> None:
    assert not keys.segment_key(TOPIC, 10, 0, 0, 0).startswith(keys.segments_prefix(TOPIC, 1))
    assert keys.parse_topic_key(keys.topic_key(TOPIC, 7)) == keys.TopicKey(topic_id=TOPIC, version=7)
    assert keys.topic_key(TOPIC, 10) < keys.topic_key(TOPIC, 9), "a listing begins with the newest"
