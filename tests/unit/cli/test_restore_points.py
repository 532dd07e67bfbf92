"""The points of ``stratalog restore`` are of partitions that the topic has."""

from __future__ import annotations

from uuid import UUID

import pytest

from stratalog.commands.restore import check_points, cut_points
from stratalog_core.errors import NotFound
from stratalog_tiering.format.descriptor import TopicDescriptor

FLIGHTS = TopicDescriptor(topic_id=UUID(int=1), name="flights", partition_count=2, replication_factor=1)


def test_a_point_of_a_partition_that_does_not_exist_is_refused() -> None:
    """Else everything would be restored."""
    with pytest.raises(NotFound, match="topic flights has 2 partitions, none with number 2"):
        check_points(cut_points(["0=5", "2=7"], None, ["flights"]), [FLIGHTS])


@pytest.mark.parametrize(("offsets", "time"), [(["0=5", "1=7"], None), ([], "2013-07-04"), ([], None)])
def test_other_points_are_not(offsets: list[str], time: str | None) -> None:
    check_points(cut_points(offsets, time, ["flights"]), [FLIGHTS])
