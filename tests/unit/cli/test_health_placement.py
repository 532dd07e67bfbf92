"""What ``stratalog doctor`` says of copies that share a host."""

from __future__ import annotations

from uuid import UUID

from unit.broker.hand_fed_view import HandFedView

from stratalog.health.cluster import check_placement
from stratalog.health.finding import Verdict
from stratalog.hot.report import bookie_rows
from stratalog_metadata.records import Bookie, Fragment, Ledger, Topic


def bookie(number: int, address: str, host: str = "") -> Bookie:
    return Bookie(bookie_id=f"b{number}", address=address, cookie="c", session_id=number + 1, host=host)


def ledger(*bookies: str) -> Ledger:
    return Ledger(
        ledger_id=1, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=3, ack_quorum=2,
        fragments=(Fragment(first_entry=0, bookies=bookies),),
    )  # fmt: skip


def test_bookies_of_one_machine_are_no_warning() -> None:
    view = HandFedView()
    topic = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=3)
    view.put(topic, *(bookie(number, f"127.0.0.1:{number}") for number in range(3)), ledger("b0", "b1", "b2"))
    assert check_placement(view).verdict is Verdict.OK


def test_too_few_hosts_and_copies_that_share_one_are_warnings() -> None:
    view = HandFedView()
    topic = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=3)
    view.put(topic, bookie(0, "h0:1"), bookie(1, "h1:1"), bookie(2, "h1:2"), ledger("b0", "b1", "b2"))
    assert check_placement(view).verdict is Verdict.WARN
    assert "2 hosts for up to 3 copies" in check_placement(view).detail
    view.put(bookie(3, "h1:3", host="h3"))
    assert "1 of 1 fragments" in check_placement(view).detail
    assert [row["host"] for row in bookie_rows(view)] == ["h0", "h1", "h1", "h3"]
    view.put(ledger("b0", "b2", "b3"))
    assert check_placement(view).verdict is Verdict.OK
