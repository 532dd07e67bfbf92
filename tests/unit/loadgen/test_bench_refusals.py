"""What ``stratalog bench`` does not begin, and how it ends when it is told to."""

from __future__ import annotations

import signal

import pytest

from stratalog import kafka
from stratalog_core.errors import Invalid, Unavailable
from stratalog_loadgen.command import ended_in_order
from stratalog_loadgen.processes.workers import Workers
from stratalog_loadgen.runs.produce import producer_loads
from stratalog_loadgen.settings import Topics, Traffic, Window
from stratalog_loadgen.topics import Prepared, prepared


def test_an_address_that_does_not_answer_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "TIMEOUT_S", 0.3)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"), prepared("127.0.0.1:9", Topics()):
        raise AssertionError("never begun")


def test_more_partitions_than_any_cluster_takes_are_refused() -> None:
    with pytest.raises(Invalid, match="10,000,000 partitions"), prepared("127.0.0.1:9", Topics(count=1000, partitions=10_000)):
        raise AssertionError("never begun")


def test_a_setting_that_the_client_does_not_know_is_wrong_usage() -> None:
    (load,) = producer_loads(Prepared("127.0.0.1:9", ["bench"], 1), Traffic(client={"fooo": 1}), Window(duration_s=0.1))
    with pytest.raises(Invalid, match="fooo"), Workers([load]):
        raise AssertionError("never begun")


def test_an_end_from_outside_unwinds() -> None:
    with pytest.raises(SystemExit) as ended, ended_in_order():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
