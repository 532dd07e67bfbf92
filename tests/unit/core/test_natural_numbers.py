"""Numbers in text from outside: digits that only Unicode has, and numbers beyond any limit, are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.natural_numbers import natural_number


@given(st.integers(0, 2**63 - 1), st.integers(0, 5000))
def test_a_number_is_read_whatever_zeros_it_begins_with(number: int, zeros: int) -> None:
    assert natural_number("0" * zeros + str(number)) == number
    assert natural_number(str(number), number) == number
    assert natural_number(str(number), number - 1) is None


@pytest.mark.parametrize("text", ["", "²", "1²", "٣", "-1", "+1", "1_0", " 1", "1\n", "1.0", "x", str(2**63), "9" * 5000])
def test_anything_else_is_none(text: str) -> None:
    """``int`` takes some of it, and at 4300 digits raises ``ValueError``; ``str.isdigit`` takes what ``int`` does not."""
    assert natural_number(text) is None
