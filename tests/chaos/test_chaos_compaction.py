"""The checks of compacted topics notice each kind of fault."""

from __future__ import annotations

import pytest

from chaos.compaction.readings import Gap, Readings, Seen
from chaos.compaction.sends import Place, Send
from chaos.compaction.verdict import Passed, wrong_identities, wrong_last_records
from chaos.outcomes import State

PLACE: Place = ("keyed", 0)
KEY = b"a 1"


def send(number: int, offset: int | None, state: State = State.COMMITTED, *, is_tombstone: bool = False) -> Send:
    return Send(
        number=number, place=PLACE, key=KEY, is_tombstone=is_tombstone, invoked_s=float(number), state=state, offset=offset
    )


def seen(sent: Send, offset: int) -> Seen:
    return Seen(offset=offset, number=sent.number, key=sent.key, value=sent.value)


SENDS = [send(0, 10), send(1, 11, State.ABORTED), send(2, 12), send(3, None, State.UNKNOWN)]
DELETED = [send(0, 10), send(1, 11, is_tombstone=True)]
MAYBE_DELETED = [send(0, 10), send(1, None, State.UNKNOWN, is_tombstone=True)]


def last(sends: list[Send], *numbers_at: tuple[int, int], start: int = 0, compacted: bool = False, quick: bool = True) -> str:
    records = {PLACE: [seen(sends[number], offset) for number, offset in numbers_at]}
    problems = wrong_last_records(sends, records, {PLACE: start}, is_compacted=compacted, is_quick=quick)
    return "; ".join(problems)


@pytest.mark.parametrize(
    ("sends", "numbers_at"),
    [
        (SENDS, [(2, 12)]),
        (SENDS, [(0, 10), (2, 12)]),
        (SENDS, [(2, 12), (3, 13)]),
        (SENDS, [(3, 13)]),
        (DELETED, [(1, 11)]),
        (DELETED, []),
        (MAYBE_DELETED, [(0, 10)]),
        (MAYBE_DELETED, []),
    ],
)
def test_the_last_record_or_its_tombstone_is_right(sends: list[Send], numbers_at: list[tuple[int, int]]) -> None:
    assert last(sends, *numbers_at) == ""


@pytest.mark.parametrize(
    ("sends", "numbers_at", "problem"),
    [
        (SENDS, [], "no record is left; the last acknowledged record is number 2 at 12"),
        (SENDS, [(0, 10)], "number 0 at 10 is the newest"),
        (SENDS, [(2, 12), (0, 14)], "number 0 at 14 is the newest and was acknowledged elsewhere"),
        (DELETED, [(0, 10)], "number 0 at 10 is the newest; the last acknowledged record is number 1 at 11, a tombstone"),
    ],
)
def test_a_lost_key_and_an_older_record_are_named(sends: list[Send], numbers_at: list[tuple[int, int]], problem: str) -> None:
    assert problem in last(sends, *numbers_at)


def test_expired_records_and_tombstones_that_a_slow_reading_missed_are_no_problem() -> None:
    assert last(SENDS, start=13) == ""
    assert last(DELETED, (0, 10), quick=False) == ""


def test_two_records_of_a_key_are_wrong_after_a_compaction() -> None:
    assert last(SENDS, (2, 12), (3, 13), compacted=True) == "a 1 in keyed-0 has 2 records after a compaction: offsets [12, 13]"


def test_each_record_is_what_was_sent_there() -> None:
    assert list(wrong_identities(SENDS, {(PLACE, 12): seen(SENDS[2], 12)})) == []
    problems = "; ".join(wrong_identities(SENDS, {(PLACE, 12): seen(SENDS[0], 12), (PLACE, 11): seen(SENDS[1], 11)}))
    assert "holds number 0; 2 was acknowledged there" in problems
    assert "keyed-0@11 holds number 1 of an aborted transaction" in problems
    changed = Seen(offset=12, number=2, key=KEY, value=b"other")
    assert list(wrong_identities(SENDS, {(PLACE, 12): changed})) == ["keyed-0@12 holds other bytes than number 2"]
    foreign = Seen(offset=12, number=2, key=b"b 1", value=SENDS[2].value)
    assert "never sent there" in "; ".join(wrong_identities(SENDS, {(PLACE, 12): foreign}))


@pytest.mark.parametrize(("moment_s", "is_wrong"), [(1.5, True), (2.5, False)])
def test_a_reader_passes_over_a_record_after_a_newer_one_was_sent(moment_s: float, is_wrong: bool) -> None:
    sends = [send(0, 10), send(1, 11, State.ABORTED), send(2, 12)]
    gap = Gap(place=PLACE, before=9, after=12, moment_s=moment_s)
    assert bool(list(Passed(sends).wrong([gap], {}))) is is_wrong
    assert Passed(sends).compacted([gap]).total() == (not is_wrong)
    assert list(Passed(sends).wrong([gap], {PLACE: 11})) == []


def test_a_record_that_was_not_passed_over_is_not_counted() -> None:
    sends = [send(0, 10), send(2, 12)]
    gaps = [Gap(place=PLACE, before=10, after=12, moment_s=5), Gap(place=PLACE, before=7, after=10, moment_s=5)]
    assert Passed(sends).compacted(gaps).total() == 0


def test_readers_that_go_back_or_find_another_record_are_named() -> None:
    readings = Readings()
    readings.note(PLACE, 9, seen(SENDS[0], 10), 1.0)
    readings.note(PLACE, 10, seen(SENDS[2], 12), 2.0)
    assert readings.problems() == []
    assert [(gap.before, gap.after) for gap in readings.gaps()] == [(10, 12)]
    readings.note(PLACE, 12, seen(SENDS[2], 12), 3.0)
    readings.note(PLACE, 11, seen(SENDS[0], 12), 4.0)
    assert readings.problems() == ["keyed-0: a reader went back from 12 to 12", "keyed-0@12 was record 2 and is record 0"]
