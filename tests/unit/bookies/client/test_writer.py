"""The writer's core: quorums, order, ensemble changes, refusals."""

from __future__ import annotations

from uuid import UUID

import pytest

from stratalog_bookies.client.core.entry import PendingEntry
from stratalog_bookies.client.core.writer import LedgerWriterCore
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Status
from stratalog_core.errors import Corrupt, LedgerFenced, OutcomeUnknown
from stratalog_metadata.records import Fragment, Ledger


class NoSink:
    def on_added(self, entry: PendingEntry, bookie: str, /) -> bool:
        raise AssertionError

    def on_refused(self, entry: PendingEntry, bookie: str, status: int, /) -> bool:
        raise AssertionError

    def deliver(self) -> None:
        raise AssertionError


def make_writer(ensemble_size: int = 3, write_quorum: int = 3, ack_quorum: int = 2) -> LedgerWriterCore:
    bookies = tuple(f"b{position}" for position in range(ensemble_size))
    ledger = Ledger(
        ledger_id=9, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=write_quorum,
        ack_quorum=ack_quorum, fragments=(Fragment(first_entry=0, bookies=bookies),),
    )  # fmt: skip
    return LedgerWriterCore(ledger, sink=NoSink())


def append(writer: LedgerWriterCore, count: int = 1) -> list[PendingEntry]:
    entries = [writer.append((b"pay", memoryview(b"load")), 7) for _ in range(count)]
    writer.validate_state()
    return entries


def fail_and_change(writer: LedgerWriterCore, position: int, bookie: str) -> Ledger:
    writer.on_bookie_failed(writer.ledger.fragments[-1].bookies[position])
    return writer.begin_change({position: bookie})


def test_entries_bear_the_header_that_bookies_check() -> None:
    entry = append(make_writer())[0]
    assert entry.header == messages.pack_entry(9, 0, -1, (b"payload",))
    assert entry.digest_matches()


def test_an_entry_carries_the_lac_of_its_time() -> None:
    writer = make_writer()
    first = append(writer)[0]
    writer.on_added(first, "b0")
    writer.on_added(first, "b1")
    second = append(writer)[0]
    assert messages.EntryHeader._make(messages.ENTRY_HEADER.unpack(second.header)).lac == 0


def test_confirmed_at_the_ack_quorum_and_not_before() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    assert writer.on_added(entry, "b2")
    assert (writer.first_copied, writer.lac) == (0, -1)
    assert writer.on_added(entry, "b0")
    assert writer.lac == 0
    assert writer.held_bytes == 7, "the third copy is still on its way"
    assert not writer.on_added(entry, "b1")
    assert writer.held_bytes == 0
    assert writer.is_settled


def test_a_first_copy_that_nobody_wants_to_hear_of_is_counted_and_not_delivered() -> None:
    writer = make_writer()
    writer.tells_first_copies = False
    first, second = append(writer, 2)
    assert not writer.on_added(first, "b0")
    assert not writer.on_added(second, "b0")
    assert (writer.first_copied, writer.lac) == (1, -1)
    assert writer.on_added(first, "b1"), "what is confirmed is told as ever"
    writer.tells_first_copies = True
    third = append(writer)[0]
    assert writer.on_added(third, "b2")
    assert (writer.first_copied, writer.lac) == (2, 0)


def test_the_same_bookie_twice_is_one_copy() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    writer.on_added(entry, "b0")
    writer.on_added(entry, "b0")
    assert writer.lac == -1


def test_confirmed_in_order() -> None:
    writer = make_writer()
    first, second, third = append(writer, 3)
    for entry in (third, second):
        for bookie in ("b0", "b1", "b2"):
            assert not writer.on_added(entry, bookie)
    assert (writer.first_copied, writer.lac) == (-1, -1)
    assert writer.on_added(first, "b0")
    assert (writer.first_copied, writer.lac) == (2, -1)
    assert writer.on_added(first, "b1")
    assert writer.lac == 2


def test_striping_sends_each_entry_to_its_write_set() -> None:
    writer = make_writer(5, 3, 2)
    entries = append(writer, 6)
    assert [set(writer.targets(entry)) for entry in entries] == [
        {"b0", "b1", "b2"},
        {"b1", "b2", "b3"},
        {"b2", "b3", "b4"},
        {"b3", "b4", "b0"},
        {"b4", "b0", "b1"},
        {"b0", "b1", "b2"},
    ]
    assert not writer.on_added(entries[0], "b4"), "a bookie outside the write set does not count"
    assert writer.first_copied == -1


def test_fenced_ends_the_writer_and_the_entry_may_exist() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    writer.on_added(entry, "b0")
    assert not writer.on_refused(entry, "b1", Status.FENCED)
    assert isinstance(writer.error, LedgerFenced)
    assert not writer.on_added(entry, "b2"), "nothing is confirmed after a fence was seen, whoever still answers"
    assert writer.lac == -1


def test_a_deleted_ledger_takes_no_adds() -> None:
    writer = make_writer()
    assert not writer.on_refused(append(writer)[0], "b1", Status.NO_SUCH_LEDGER)
    assert isinstance(writer.error, LedgerFenced)


def test_a_fence_seen_by_a_replaced_bookie_ends_the_writer_too() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    fail_and_change(writer, 0, "b9")
    writer.commit_change()
    writer.on_refused(entry, "b0", Status.FENCED)
    assert isinstance(writer.error, LedgerFenced)


def test_another_entry_under_the_same_id_ends_the_writer_loudly() -> None:
    writer = make_writer()
    writer.on_refused(append(writer)[0], "b0", Status.CONFLICT)
    assert isinstance(writer.error, Corrupt)


def test_a_payload_changed_under_way_is_told_from_a_bad_bookie() -> None:
    writer = make_writer()
    good = append(writer)[0]
    writer.on_refused(good, "b0", Status.BAD_CRC)
    assert writer.error is None
    assert writer.failed_positions == (0,)
    payload = bytearray(b"payload")
    changed = writer.append((payload,), 7)
    payload[0] = 0
    writer.on_refused(changed, "b1", Status.BAD_CRC)
    assert isinstance(writer.error, Corrupt)


@pytest.mark.parametrize("status", [Status.READ_ONLY, Status.STORAGE_FAILED])
def test_a_bookie_that_cannot_write_is_to_be_replaced(status: Status) -> None:
    writer = make_writer()
    assert not writer.on_refused(append(writer)[0], "b1", status)
    assert writer.failed_positions == (1,)


def test_an_overloaded_bookie_gets_the_entry_again() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    assert writer.on_refused(entry, "b1", Status.OVERLOADED)
    assert writer.failed_positions == ()


def test_a_replacement_gets_what_is_unconfirmed_and_only_after_the_commit() -> None:
    writer = make_writer()
    confirmed, *waiting = append(writer, 4)
    for bookie in ("b0", "b1", "b2"):
        writer.on_added(confirmed, bookie)
    for entry in waiting:
        writer.on_added(entry, "b0")
    changed = fail_and_change(writer, 0, "b9")
    assert changed.fragments[-1] == Fragment(first_entry=1, bookies=("b9", "b1", "b2"))
    late = append(writer)[0]
    assert writer.targets(late) == ("b1", "b2"), "nobody outside the committed ensemble gets an entry"
    sends = writer.commit_change()
    assert {(send.bookie, send.entry.entry_id) for send in sends} == {("b9", entry_id) for entry_id in (1, 2, 3, 4)}
    assert writer.ledger == changed
    writer.on_added(waiting[0], "b1")
    assert writer.lac == 0, "the copy of the bookie that left does not count in the new fragment"
    writer.on_added(waiting[0], "b9")
    assert writer.lac == 1
    writer.validate_state()


def test_confirming_goes_on_during_a_change_without_who_leaves() -> None:
    writer = make_writer()
    first, second = append(writer, 2)
    writer.on_added(first, "b0")
    writer.on_added(second, "b0")
    fail_and_change(writer, 0, "b9")
    writer.on_added(first, "b1")
    assert writer.lac == -1, "b0 is leaving: its copy would be lost with the change"
    writer.on_added(first, "b2")
    assert writer.lac == 0
    assert writer.held_bytes == 14, "the replacement must get the confirmed entry too"
    assert {send.entry.entry_id for send in writer.commit_change()} == {0, 1}


def test_a_change_that_surely_failed_leaves_the_old_ensemble() -> None:
    writer = make_writer()
    entry = append(writer)[0]
    writer.on_added(entry, "b0")
    before = writer.ledger
    fail_and_change(writer, 0, "b9")
    writer.on_added(entry, "b1")
    assert writer.lac == -1
    writer.abandon_change()
    assert writer.ledger == before
    assert writer.lac == 0, "the copy counts again"


def test_several_failures_at_once_are_replaced_at_once() -> None:
    writer = make_writer(3, 3, 3)
    entry = append(writer)[0]
    writer.on_bookie_failed("b0")
    writer.on_bookie_failed("b2")
    changed = writer.begin_change({0: "b8", 2: "b9"})
    assert changed.fragments == (Fragment(first_entry=0, bookies=("b8", "b1", "b9")),)
    assert {send.bookie for send in writer.commit_change()} == {"b8", "b9"}
    for bookie in ("b8", "b1", "b9"):
        writer.on_added(entry, bookie)
    assert writer.lac == 0


def test_a_failure_during_a_change_waits_for_the_next_one() -> None:
    writer = make_writer()
    append(writer)
    fail_and_change(writer, 0, "b8")
    writer.on_bookie_failed("b1")
    writer.commit_change()
    assert writer.failed_positions == (1,)
    assert writer.begin_change({1: "b9"}).fragments == (Fragment(first_entry=0, bookies=("b8", "b9", "b2")),)


def test_a_new_fragment_reaches_back_over_what_the_failed_bookie_lacks() -> None:
    writer = make_writer()
    complete, lacking = append(writer, 2)
    for bookie in ("b0", "b1", "b2"):
        writer.on_added(complete, bookie)
    writer.on_added(lacking, "b1")
    writer.on_added(lacking, "b2")
    assert writer.lac == 1
    changed = fail_and_change(writer, 0, "b9")
    assert changed.fragments[-1].first_entry == 1, "entry 0 has all its copies, entry 1 gets its third"
    assert [(send.bookie, send.entry) for send in writer.commit_change()] == [("b9", lacking)]
    writer.validate_state()
    writer.on_added(lacking, "b9")
    assert writer.is_settled


def test_without_a_spare_the_writer_goes_on_and_takes_the_bookie_back() -> None:
    writer = make_writer()
    first, second = append(writer, 2)
    writer.on_bookie_failed("b0")
    writer.give_up()
    for bookie in ("b1", "b2"):
        writer.on_added(first, bookie)
    assert writer.lac == 0
    assert writer.held_bytes == 7, "nothing confirmed is kept for a bookie that nobody can replace"
    third = append(writer)[0]
    assert writer.targets(third) == ("b1", "b2")
    sends = writer.revive(writer.failed_positions)
    assert [(send.bookie, send.entry) for send in sends] == [("b0", second), ("b0", third)]
    assert writer.failed_positions == ()


def test_letting_go_ends_the_holding_but_not_the_change() -> None:
    writer = make_writer()
    first, second = append(writer, 2)
    fail_and_change(writer, 0, "b9")
    for bookie in ("b1", "b2"):
        writer.on_added(first, bookie)
    writer.release_held()
    assert writer.held_bytes == 7
    assert [(send.bookie, send.entry) for send in writer.commit_change()] == [("b9", second)]
    writer.validate_state()


def test_entries_that_cannot_be_confirmed_have_an_unknown_outcome() -> None:
    writer = make_writer()
    append(writer, 3)
    writer.fail_outcome_unknown("too long")
    assert isinstance(writer.error, OutcomeUnknown)
    assert "3 entries of ledger 9" in str(writer.error)


def test_a_recovered_entry_keeps_its_bytes() -> None:
    original = messages.pack_entry(9, 5, 3, (b"payload",))
    writer = make_writer()
    rewriter = LedgerWriterCore(writer.ledger, sink=NoSink(), first_entry=5, recovering=True)
    entry = rewriter.append_recovered(original, memoryview(b"payload"))
    assert entry.header == messages.pack_entry(9, 5, 3, (b"payload",), messages.RECOVERY_ADD)
    assert rewriter.lac == 4
