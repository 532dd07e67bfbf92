"""The core of recovery: one test for each defect known from other implementations."""

from __future__ import annotations

from uuid import UUID

import pytest

from stratalog_bookies.client.core.recovery import READ_AHEAD_ENTRIES, Fence, LedgerRecovery, ReadRange, Rewrite
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, RangeAnswer, ReadEntry, Status
from stratalog_core.errors import Corrupt
from stratalog_metadata.records import Fragment, Ledger, LedgerState

LEDGER_ID = 9


def make_recovery(
    ensemble_size: int = 3, write_quorum: int = 3, ack_quorum: int = 2, *, last_fragment_at: int = 0
) -> LedgerRecovery:
    bookies = tuple(f"b{position}" for position in range(ensemble_size))
    fragments = [Fragment(first_entry=0, bookies=tuple(f"old{position}" for position in range(ensemble_size)))]
    if last_fragment_at == 0:
        fragments.clear()
    fragments.append(Fragment(first_entry=last_fragment_at, bookies=bookies))
    ledger = Ledger(
        ledger_id=LEDGER_ID, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=write_quorum,
        ack_quorum=ack_quorum, fragments=tuple(fragments), state=LedgerState.IN_RECOVERY,
    )  # fmt: skip
    recovery = LedgerRecovery(ledger)
    assert recovery.start() == [Fence(bookie=name) for name in bookies]
    return recovery


def entry(entry_id: int, lac: int = -1, state: EntryState = EntryState.PRESENT, payload: bytes = b"payload") -> ReadEntry:
    header = messages.EntryHeader._make(messages.ENTRY_HEADER.unpack(messages.pack_entry(LEDGER_ID, entry_id, lac, (payload,))))
    return ReadEntry(entry_id, lac, len(payload), header.crc, state, memoryview(payload))


def answer(decided_to: int, *entries: ReadEntry) -> RangeAnswer:
    return RangeAnswer(Status.OK, decided_to, list(entries))


def test_an_idle_ledger_is_decided_by_its_fences_alone() -> None:
    recovery = make_recovery()
    assert recovery.on_fenced("b0", 4, 4) == []
    assert recovery.on_fenced("b1", 4, 4) == []
    assert recovery.end == 4


def test_fencing_needs_so_many_that_no_write_set_can_reach_the_ack_quorum() -> None:
    recovery = make_recovery(5, 3, 2)
    recovery.on_fenced("b0", -1, -1)
    recovery.on_fenced("b2", -1, -1)
    recovery.on_fenced("b3", -1, -1)
    assert not recovery.is_fenced, "entries of b4, b0 and b1 could still be confirmed by b4 and b1"
    recovery.on_fenced("b4", -1, -1)
    assert recovery.is_fenced


def test_a_fence_that_was_not_answered_counts_for_nothing() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", -1, -1)
    recovery.on_fence_failed("b1")
    recovery.on_fence_failed("b2")
    assert recovery.end is None
    assert not recovery.is_fenced
    assert recovery.retry() == [Fence(bookie="b1"), Fence(bookie="b2")]


def test_recovery_starts_behind_the_greatest_lac() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 7, 3)
    assert recovery.on_fenced("b1", 7, 5) == [ReadRange(bookie="b0", first=6, last=7)]
    assert recovery.first_rewritten == 6


def test_recovery_never_starts_before_the_last_fragment() -> None:
    """Fresh bookies of a new fragment answer LAC -1; starting at 0 would rewrite the old fragment to the wrong bookies."""
    recovery = make_recovery(last_fragment_at=10)
    recovery.on_fenced("b0", -1, -1)
    recovery.on_fenced("b1", -1, -1)
    assert recovery.first_rewritten == 10
    assert recovery.end == 9


def test_what_one_bookie_has_is_copied_to_all() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 0, -1)
    assert recovery.on_fenced("b1", -1, -1) == [ReadRange(bookie="b0", first=0, last=0)]
    (rewrite,) = recovery.on_read("b0", answer(0, entry(0)))
    header = messages.pack_entry(LEDGER_ID, 0, -1, (b"payload",))
    assert rewrite == Rewrite(entry_id=0, header=header, payload=memoryview(b"payload"))
    assert recovery.end == 0, "b0 and b1 lack entry 1"


def test_a_read_error_is_not_absence() -> None:
    """bookkeeper#2908."""
    recovery = make_recovery()
    recovery.on_fenced("b0", 0, -1)
    recovery.on_fenced("b1", -1, -1)
    (retried,) = recovery.on_read_failed("b0")
    assert retried == ReadRange(bookie="b2", first=0, last=READ_AHEAD_ENTRIES)
    assert recovery.on_read_failed("b2") == []
    assert recovery.end is None, "b1 alone lacks entry 0; the others may have it"
    assert recovery.retry() == [ReadRange(bookie="b0", first=0, last=0)]


@pytest.mark.parametrize("bad", [entry(0, state=EntryState.UNREADABLE), entry(0)._replace(crc=1)])
def test_an_unreadable_or_corrupt_copy_is_neither_content_nor_absence(bad: ReadEntry) -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 0, -1)
    recovery.on_fenced("b1", -1, -1)
    (retried,) = recovery.on_read("b0", answer(0, bad))
    assert retried == ReadRange(bookie="b2", first=0, last=READ_AHEAD_ENTRIES)
    assert recovery.end is None


def test_an_undecided_answer_is_not_absence() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 3, -1)
    recovery.on_fenced("b1", -1, -1)
    recovery.on_read("b0", RangeAnswer(Status.STORAGE_FAILED, -1, []))
    assert recovery.end is None


@pytest.mark.parametrize(("quorums", "negatives"), [((3, 3, 2), 2), ((3, 3, 3), 1), ((3, 3, 1), 3), ((5, 4, 2), 3)])
def test_truncated_only_after_enough_explicit_negatives(quorums: tuple[int, int, int], negatives: int) -> None:
    recovery = make_recovery(*quorums)
    fenced = 0
    for position in range(quorums[0]):
        recovery.on_fenced(f"b{position}", -1, -1)
        fenced += 1
        if recovery.end is not None:
            break
    assert recovery.end == -1
    assert fenced >= negatives


def test_the_unfenced_bookie_is_asked_by_a_read_that_fences() -> None:
    """bookkeeper#2614: b2 was not fenced. If b0 is lost, b2's answer is needed, and b2 must then take no more adds.

    The shell makes reads fence. Here b2 is read, and only by a recovery read.
    """
    recovery = make_recovery()
    recovery.on_fenced("b0", 0, -1)
    recovery.on_fenced("b1", -1, -1)
    (asked,) = recovery.on_read_failed("b0")
    assert isinstance(asked, ReadRange)
    assert asked.bookie == "b2"
    recovery.on_read("b2", answer(asked.last))
    assert recovery.end == -1


def test_a_gap_ends_the_ledger_even_if_later_entries_exist() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 2, -1)
    recovery.on_fenced("b1", 2, -1)
    instructions = recovery.on_read("b0", answer(2, entry(0), entry(2)))
    assert [each.entry_id for each in instructions if isinstance(each, Rewrite)] == [0]
    assert recovery.end is None, "b1 and b2 may have entry 1"
    assert recovery.on_read("b1", answer(2, entry(2))) == []
    assert recovery.end == 0


def test_a_confirmed_entry_that_is_gone_is_an_error_and_never_cut_off() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", -1, -1)
    recovery.on_fenced("b1", -1, -1)
    assert recovery.end == -1
    with pytest.raises(Corrupt, match="entry 0 was confirmed"):
        recovery.on_fenced("b2", 3, 2)


def test_a_later_entry_proves_a_greater_lac() -> None:
    recovery = make_recovery()
    recovery.on_fenced("b0", 2, -1)
    recovery.on_fenced("b1", -1, -1)
    with pytest.raises(Corrupt, match="entry 0 was confirmed"):
        recovery.on_read("b0", answer(2, entry(2, lac=1)))


def test_striped_entries_are_read_from_their_write_sets() -> None:
    recovery = make_recovery(4, 2, 2)
    for position, last in enumerate([4, 5, 5, 3]):
        instructions = recovery.on_fenced(f"b{position}", last, 3)
    assert instructions == []
    recovery = make_recovery(4, 2, 2)
    recovery.on_fenced("b1", 5, 3)
    asked = recovery.on_fenced("b2", 5, 3)
    asked = asked or recovery.on_fenced("b3", 3, 3)
    assert isinstance(asked[0], ReadRange)
    assert asked[0].first == 4
    assert asked[0].bookie in {"b0", "b1"}
