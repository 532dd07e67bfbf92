"""Expressions of clients match whole texts, in linear time, and malformed ones are refused."""

from __future__ import annotations

import pytest

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_core.errors import Invalid


def test_a_pattern_matches_the_whole_text() -> None:
    pattern = LinearPattern("copier-[0-9]+|x")
    assert [pattern.matches(text) for text in ("copier-12", "x", "copier-", "a copier-1", "xx")] == [True, True] + [False] * 3


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "(a{999}){999}"])
def test_what_re2_does_not_compile_is_refused(pattern: str) -> None:
    with pytest.raises(Invalid, match="RE2"):
        LinearPattern(pattern)


def test_no_pattern_takes_exponential_time() -> None:
    assert not LinearPattern("(a*)*b").matches("a" * 100_000)  # By backtracking it would not end.
