"""A change shortens retention exactly if a record may expire after it that did not expire before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.admin.retention_changes import RETENTION, Shortened, shortened_retention
from stratalog_core.errors import Invalid
from stratalog_tiering.core.policy import SEVEN_DAYS_MS, UNLIMITED, tier_policy

limits = st.dictionaries(st.sampled_from(RETENTION), st.integers(-1, 2**40).map(str))


@given(limits, limits)
def test_only_lower_limits_shorten(before: dict[str, str], after: dict[str, str]) -> None:
    def least_kept(configs: dict[str, str], name: str) -> float:
        policy = tier_policy(configs)
        value = {"retention.ms": policy.retention_ms, "retention.bytes": policy.retention_bytes}[name]
        return float("inf") if value == UNLIMITED else value

    lower = [name for name in RETENTION if least_kept(after, name) < least_kept(before, name)]
    assert [change.config for change in shortened_retention(before, after)] == lower


def test_a_change_names_both_values_in_force() -> None:
    assert shortened_retention({}, {"retention.ms": "5", "segment.ms": "1"}) == (Shortened("retention.ms", SEVEN_DAYS_MS, 5),)
    assert shortened_retention({"retention.ms": "5"}, {}) == ()
    with pytest.raises(Invalid, match=r"retention\.ms is -2; minimum is -1"):
        shortened_retention({}, {"retention.ms": "-2"})
