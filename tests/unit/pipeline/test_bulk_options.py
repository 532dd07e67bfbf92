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


@pytest.mark.parametrize("name", ["kafka.bootstrap.servers", "fetchOffset.numRetries", "checkpointLocation"])
def test_options_without_an_effect_are_refused(name: str) -> None:
    with pytest.raises(Invalid, match=f"option '{name}' is unknown"):
        parse_bulk_options({**GIVEN, name: "1"})


@pytest.mark.parametrize("text", ["0", "²", "-1", "9999999999", ""])
def test_a_number_of_partitions_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="'partitions' is"):
        parse_bulk_options({**GIVEN, "partitions": text})
