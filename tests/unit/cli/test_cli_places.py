"""Offsets as users give them, in ``group reset --to`` and ``topic delete-records --before``."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import Consumer, TopicPartition

from stratalog.places import places
from stratalog_core.errors import Invalid


class _Reader:
    """A consumer of a topic with the offsets 5 to 10 in partition 0, and 0 to 20 in partition 1."""

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        return ((5, 10), (0, 20))[place.partition]


def _offsets(target: str) -> list[int]:
    return [place.offset for place in places(cast(Consumer, _Reader()), "events", [0, 1], target)]


@pytest.mark.parametrize(
    ("target", "expected"), [("earliest", [5, 0]), ("latest", [10, 20]), ("3", [5, 3]), ("15", [10, 15]), ("20", [10, 20])]
)
def test_an_offset_is_clamped_to_those_of_each_partition(target: str, expected: list[int]) -> None:
    assert _offsets(target) == expected


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("21", "offset 21 is past the end of events, 20: give latest"),
        ("20130704", "give latest for the end, or time:TIME for a time"),
        ("2013-07-04", "give time:2013-07-04"),
        ("7d", "give time:7d"),
        ("end", "give earliest, latest, a number or time:TIME"),
        ("-5", "give earliest, latest, a number or time:TIME"),
        ("time:20130704", "for the day give 2013-07-04"),
    ],
)
def test_what_is_no_offset_is_refused_with_the_word_for_it(target: str, remedy: str) -> None:
    with pytest.raises(Invalid, match=remedy):
        _offsets(target)
