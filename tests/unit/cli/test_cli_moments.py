"""Points in time as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog.moments import format_moment, parse_moment
from stratalog.parameters import moment_ms
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
        ("1w", NOW_MS - 604_800_000),
        ("now", NOW_MS),
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


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("20130704", "for the day give 2013-07-04;"),
        ("20131304", "give 2013-07-04 or"),
        ("1372896000", "for seconds since 1970 give 1372896000000;"),
        ("2013", "milliseconds since 1970 have 13 digits"),
        ("201307041200", "milliseconds since 1970 have 13 digits"),
        ("20130704120000", "milliseconds since 1970 have 13 digits"),
        ("1372896000000000", "milliseconds since 1970 have 13 digits"),
        ("-1", "milliseconds since 1970 have 13 digits"),
        ("-1372896000000", "milliseconds since 1970 have 13 digits"),
    ],
)
def test_a_number_that_may_be_a_date_or_another_unit_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(Invalid, match=f"'{text}' is not a time: .*{remedy}"):
        moment_ms(text)


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("0", 0), ("1372896000000", 1_372_896_000_000), ("1970-01-01T00:00:01Z", 1_000)]
)
def test_a_number_of_milliseconds_is_a_time(text: str, expected_ms: int) -> None:
    assert moment_ms(text) == expected_ms
