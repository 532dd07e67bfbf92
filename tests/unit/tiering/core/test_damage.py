"""A partition's status names a limited number of damaged objects; those that it has no room for do not look sound."""

from __future__ import annotations

from uuid import UUID

from stratalog_tiering.core.damage import REMEMBERED_MAX, may_be_damaged, remembered
from stratalog_tiering.format.object_keys import segment_key

SEGMENTS = [segment_key(UUID(int=1), 0, 10 * number, 0, number) for number in range(REMEMBERED_MAX + 10)]


def test_nothing_that_is_damaged_looks_sound() -> None:
    for first in range(len(SEGMENTS)):
        damaged = SEGMENTS[first:-1]
        known = remembered(damaged)
        assert len(known) <= REMEMBERED_MAX
        assert all(may_be_damaged(key, known) for key in damaged)
        assert not may_be_damaged(SEGMENTS[-1], known), "it is newer than all of them"


def test_an_older_segment_looks_sound_if_there_was_room_for_all_damage() -> None:
    known = remembered(SEGMENTS[-(REMEMBERED_MAX - 1) :])
    assert not may_be_damaged(SEGMENTS[0], known)
