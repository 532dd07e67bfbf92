"""Lists of removed objects: they are merged up to the longest length, so a manifest root refers to few of them."""

from __future__ import annotations

from itertools import count
from uuid import UUID

import msgspec

from stratalog_tiering.format.manifest import Manifest, RemovedList, RemovedObject, decode_removed_list, empty_manifest
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.removed_objects import RemovedObjects

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")


def after_removals(objects: int, *, is_damaged: bool) -> Manifest:
    """A manifest from which ``objects`` were removed one at a time. Its first list cannot be read if ``is_damaged``."""
    limits = ManifestLimits(page_fan_in=4, inline_removed_max=8, removed_list_objects_max=128)
    base, ids, lists, lost = empty_manifest(TOPIC, "t", 0, 0), count(), dict[str, RemovedList](), set[str]()
    for number in range(objects):
        removed = RemovedObjects(base, lambda: next(ids), limits)
        removed.add([RemovedObject(key=f"{number}", object_bytes=1, reason="expired", removed_at_ms=0)])
        removed.finish(number, "worker", {ref.key: lists[ref.key] for ref in removed.lists_to_merge(lost)})
        lists.update({key: decode_removed_list(content, object_sha256(content)) for key, content in removed.new_lists()})
        lost.update(ref.key for ref in removed.refs[:1] if is_damaged)
        base = msgspec.structs.replace(
            base, removed=tuple(removed.inline), removed_lists=tuple(removed.refs), removed_lists_made=removed.lists_made
        )
    return base


def test_objects_that_are_removed_one_at_a_time_are_merged_to_the_longest_lists() -> None:
    base = after_removals(1000, is_damaged=False)
    assert [ref.object_count for ref in base.removed_lists[:8]] == [128] * 8


def test_a_damaged_list_stays_and_later_ones_are_merged() -> None:
    base = after_removals(1000, is_damaged=True)
    assert [ref.object_count for ref in base.removed_lists[:8]] == [8, *[128] * 7]
