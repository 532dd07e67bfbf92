"""Lists of removed objects: they are merged up to the longest length, so a manifest root refers to few of them."""

from __future__ import annotations

from itertools import count
from uuid import UUID

import msgspec

from stratalog_tiering.format.manifest import RemovedList, RemovedObject, decode_removed_list, empty_manifest
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.removed_objects import RemovedObjects

TOPIC = UUID("00000000-0000-4000-8000-0000000000aa")


def test_objects_that_are_removed_one_at_a_time_are_merged_to_the_longest_lists() -> None:
    limits = ManifestLimits(page_fan_in=4, inline_removed_max=8, removed_list_objects_max=128)
    base, ids, lists = empty_manifest(TOPIC, "t", 0, 0), count(), dict[str, RemovedList]()
    for number in range(1000):
        removed = RemovedObjects(base, lambda: next(ids), limits)
        removed.add([RemovedObject(key=f"{number}", object_bytes=1, reason="expired", removed_at_ms=0)])
        removed.finish(number, "worker", lists)
        lists.update({key: decode_removed_list(content, object_sha256(content)) for key, content in removed.new_lists()})
        base = msgspec.structs.replace(
            base, removed=tuple(removed.inline), removed_lists=tuple(removed.refs), removed_lists_made=removed.lists_made
        )
    assert [ref.object_count for ref in base.removed_lists[:8]] == [128] * 8
