"""The expiry of a record is a header's value, if that is a number."""

from __future__ import annotations

import pytest

from stratalog_core.batches.record_expiry import expiry_of


@pytest.mark.parametrize(
    ("value", "at_ms"),
    [(b"0", 0), (b"1700000000000", 1_700_000_000_000), (b"", None), (b"-1", None), (b"9" * 20, None), (None, None)],
)
def test_only_decimal_text_is_a_time(value: bytes | None, at_ms: int | None) -> None:
    assert expiry_of(value) == at_ms
