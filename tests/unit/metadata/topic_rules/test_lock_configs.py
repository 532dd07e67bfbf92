"""Locks of history: refused if they would outlast the records, whichever of the two is changed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Invalid
from stratalog_metadata.topic_rules.topic_configs import check_topic_configs, check_topic_defaults

MODE, FOR = "stratalog.tier.lock.mode", "stratalog.tier.lock.ms"
SEVEN_DAYS_MS = 7 * 24 * 3_600_000


@given(
    lock_ms=st.sampled_from([10_000, SEVEN_DAYS_MS, SEVEN_DAYS_MS + 1]),
    retention_ms=st.none() | st.sampled_from([-1, 9_999, 10_000, SEVEN_DAYS_MS]),
    default_ms=st.none() | st.sampled_from([-1, 9_999, 10_000, SEVEN_DAYS_MS + 1]),
    mode=st.sampled_from(["none", "governance", "compliance"]),
)
def test_a_lock_is_not_longer_than_the_retention_in_force(
    lock_ms: int, retention_ms: int | None, default_ms: int | None, mode: str
) -> None:
    configs = {MODE: mode, FOR: str(lock_ms)} | ({} if retention_ms is None else {"retention.ms": str(retention_ms)})
    defaults = {} if default_ms is None else {"retention.ms": str(default_ms)}
    in_force = next(value for value in (retention_ms, default_ms, SEVEN_DAYS_MS) if value is not None)
    is_longer = mode != "none" and in_force != -1 and lock_ms > in_force
    refused = pytest.raises(Invalid, match=rf"{FOR} is {lock_ms}; maximum is retention\.ms, {in_force}: lower")
    with refused if is_longer else contextlib.nullcontext():
        check_topic_configs(configs, 3, defaults=defaults)


def test_a_lock_needs_a_time_and_the_object_store() -> None:
    for configs, complaint in (
        ({MODE: "compliance"}, f"{FOR} is 0; with a {MODE} the minimum is 10000"),
        ({MODE: "governance", FOR: "9999"}, f"{FOR} is 9999; with a {MODE} the minimum is 10000"),
        ({MODE: "forever"}, "choose none or governance or compliance"),
        ({FOR: "-1"}, f"{FOR} is -1; minimum is 0"),
        ({FOR: str(10**14)}, f"{FOR} is {10**14}; maximum is 3153600000000"),
        ({MODE: "governance", FOR: "10000", "remote.storage.enable": "false"}, "needs the object store"),
    ):
        with pytest.raises(Invalid, match=complaint):
            check_topic_configs(configs, 3)
    check_topic_configs({FOR: "9999"}, 3)
    check_topic_configs({MODE: "none", FOR: "0", "remote.storage.enable": "false"}, 3)


def test_defaults_do_not_contradict_each_other() -> None:
    check_topic_defaults({MODE: "governance", FOR: "10000"})
    with pytest.raises(Invalid, match=r"maximum is retention\.ms, 20000"):
        check_topic_defaults({MODE: "governance", FOR: "30000", "retention.ms": "20000"})
