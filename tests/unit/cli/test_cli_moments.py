"""Points in time as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog.moments import format_moment, parse_moment
from stratalog_core.errors import Invalid

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1372896000000", 1_372_896_000_000),
        ("2013-07-04", 1_372_896_000_000),
        ("2013-07-04T02:00:00+02:00", 1_372_896_000_000),
        ("2013-07-04T00:00:00Z", 1_372_896_000_000),
        ("90s", NOW_MS - 90_000),
        ("15m", NOW_MS - 900_000),
        ("2h", NOW_MS - 7_200_000),
        ("7d", NOW_MS - 604_800_000),
    ],
)
def test_known_forms(text: str, expected_ms: int) -> None:
    assert parse_moment(text, now_ms=NOW_MS) == expected_ms


def test_an_unknown_form_is_refused_with_examples() -> None:
    with pytest.raises(Invalid, match="2013-07-04T12:00:00Z"):
        parse_moment("yesterday", now_ms=NOW_MS)


@given(st.integers(min_value=0, max_value=10**18 - 1))
def test_what_is_shown_can_be_typed(time_ms: int) -> None:
    assert parse_moment(format_moment(time_ms), now_ms=NOW_MS) == time_ms


@pytest.mark.parametrize("text", ["9" * 19, "9" * 30 + "d", "-" + "9" * 19])
def test_a_number_beyond_any_time_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a time"):
        parse_moment(text, now_ms=NOW_MS)
