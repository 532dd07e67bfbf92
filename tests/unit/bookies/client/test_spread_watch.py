"""The log messages about ensembles that share hosts and racks."""

from __future__ import annotations

import logging

import pytest

from stratalog_bookies.client.core.placement import Candidate
from stratalog_bookies.client.ledger_client import SpreadWatch


def bookies(*places: tuple[str, str]) -> list[Candidate]:
    return [
        Candidate(bookie_id=f"b{number}", host=host, rack=rack, live=True) for number, (host, rack) in enumerate(places)
    ]  # fmt: skip


def test_a_cluster_on_one_machine_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        SpreadWatch().chosen(("b0", "b1", "b2"), bookies(*[("127.0.0.1", "")] * 3))
    assert not caplog.records


def test_shared_hosts_are_reported_once_until_they_are_spanned_again(caplog: pytest.LogCaptureFixture) -> None:
    watch = SpreadWatch()
    known = bookies(("h0", ""), ("h0", ""), ("h1", ""), ("h2", ""))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            watch.chosen(("b0", "b1", "b2"), known)
            watch.chosen(("b0", "b2"), known)
        watch.chosen(("b0", "b2", "b3"), known)
        watch.chosen(("b0", "b2", "b3"), known)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "ensembles of 3 bookies share failure domains (hosts: 2, racks: 1)" in caplog.text
