"""Options of bulk writes."""

from __future__ import annotations

import pytest

from stratalog_core.errors import Invalid
from stratalog_pipeline.bulk_sink import parse_bulk_options

GIVEN = {"store": "file:///b", "metadata": "h:1", "topic": "t", "partitions": "2"}


def test_offsets_begin_at_0_or_where_the_option_says() -> None:
    assert parse_bulk_options(GIVEN).first_offsets == (0, 0)
    assert parse_bulk_options({**GIVEN, "firstOffsets": "[7, 0]"}).first_offsets == (7, 0)


@pytest.mark.parametrize("text", ["[7]", "[7, -1]", "[7, 9223372036854775807]", "7, 0", '["a", 0]', ""])
def test_first_offsets_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="'firstOffsets' must"):
        parse_bulk_options({**GIVEN, "firstOffsets": text})
