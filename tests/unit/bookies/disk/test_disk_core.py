"""The rules of one disk: what it accepts and refuses, and when entries are durable and visible."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.world.disk import Disk as SimulatedDisk
from unit.bookies.plain_disk import PlainDisk

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.lookup import Budget, Found, locate
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import RECOVERY_ADD, LedgerTail, Range, Status
from stratalog_core.errors import Invalid

OK = Status.OK


@pytest.fixture
def disk() -> PlainDisk:
    return PlainDisk(SimulatedDisk("bookie", random.Random(1)).mount())


def test_what_is_not_durable_is_not_read(disk: PlainDisk) -> None:
    assert disk.add((1, 0, b"zero"), (1, 1, b"")) == [OK, OK]
    assert disk.read(1) == {}
    disk.commit()
    assert disk.read(1) == {0: b"zero", 1: b""}
    disk.add((1, 2, b"two"))
    assert disk.read(1) == {0: b"zero", 1: b""}


def test_an_entry_is_written_once(disk: PlainDisk) -> None:
    assert disk.add((1, 0, b"zero"), (1, 1, b"one"), (1, 0, b"zero"), (1, 1, b"eno")) == [OK, OK, OK, Status.CONFLICT]
    disk.commit()
    assert disk.add((1, 0, b"zero"), (1, 0, b"zero!")) == [OK, Status.CONFLICT]
    assert disk.read(1) == {0: b"zero", 1: b"one"}
    assert disk.contents.ledgers[1].runs[0].count == 2


@given(payload=st.binary(max_size=2000), other=st.binary(max_size=2000), lag=st.integers(1, 50), later_lag=st.integers(1, 50))
def test_the_same_payload_with_another_lac_is_the_same_entry(payload: bytes, other: bytes, lag: int, later_lag: int) -> None:
    disk = PlainDisk(SimulatedDisk("bookie", random.Random(1)).mount())
    disk.add((1, 5, payload), lac_lag=lag)
    assert disk.add((1, 5, payload), lac_lag=later_lag) == [OK]
    assert disk.add((1, 5, other), lac_lag=later_lag) == [OK if other == payload else Status.CONFLICT]


def test_a_fence_refuses_the_writer_and_takes_recovery(disk: PlainDisk) -> None:
    disk.add((1, 0, b"zero"))
    disk.fence(1, 2)
    assert disk.add((1, 1, b"one"), (2, 0, b"x"), (3, 0, b"y")) == [Status.FENCED, Status.FENCED, OK]
    assert disk.add((1, 0, b"zero")) == [Status.FENCED]
    assert disk.add((1, 1, b"one"), (2, 0, b"x"), flags=RECOVERY_ADD) == [OK, OK]
    disk.commit()
    assert disk.core.tails([1, 2, 9]) == [
        LedgerTail(ledger_id=1, last_entry=1, lac=0, fenced=True),
        LedgerTail(ledger_id=2, last_entry=0, lac=-1, fenced=True),
        LedgerTail(ledger_id=9, status=Status.NO_SUCH_LEDGER),
    ]


def test_a_fence_is_durable_after_all_that_came_before_it(disk: PlainDisk) -> None:
    disk.add((1, 0, b"zero"))
    sequence = disk.core.fence([1])
    assert disk.core.fence([1]) == sequence > disk.core.log.durable_sequence
    disk.commit()
    assert disk.core.log.durable_sequence == sequence
    assert disk.core.fence([1]) == sequence


def test_a_deleted_ledger_takes_nothing(disk: PlainDisk) -> None:
    disk.add((1, 0, b"zero"), (2, 0, b"other"))
    disk.commit()
    disk.delete(1, 5)
    assert disk.add((1, 1, b"one"), (5, 0, b""), (2, 1, b"x"), flags=RECOVERY_ADD) == [
        Status.NO_SUCH_LEDGER, Status.NO_SUCH_LEDGER, OK
    ]  # fmt: skip
    disk.fence(1)
    assert disk.write_lac(1, 5) == Status.NO_SUCH_LEDGER
    assert disk.core.tails([1])[0].status == Status.NO_SUCH_LEDGER
    disk.commit()
    assert disk.read(1) == {}


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    contents = Contents(index_bytes_max=0, tombstones_max=3)
    for ledger_id in (1, 2, 3, 1, 4):
        contents.delete(ledger_id)
    assert list(contents.tombstones) == [3, 1, 4]


def test_an_explicit_lac_only_rises(disk: PlainDisk) -> None:
    disk.add((1, 0, b"zero"), (1, 1, b"one"))
    assert disk.write_lac(1, 1) == OK
    assert disk.write_lac(1, 0) == OK
    assert disk.core.tails([1])[0].lac == 1
    disk.fence(1)
    assert disk.write_lac(1, 9) == Status.FENCED
    assert disk.write_lac(7, 0) == Status.NO_SUCH_LEDGER


def test_damaged_adds_are_refused_one_by_one(disk: PlainDisk) -> None:
    headers = [messages.pack_entry(1, entry, entry - 1, (b"payload",)) for entry in range(4)]
    body = bytearray(b"".join(messages.encode_add(headers, [b"payload"] * 4)))
    body[messages.payloads_start(4) + 7] ^= 1
    body[4 + 2 * 33 + 10] ^= 1
    assert disk.add_body(memoryview(bytes(body))) == [OK, Status.BAD_CRC, Status.BAD_CRC, OK]
    disk.commit()
    assert disk.read(1) == {0: b"payload", 3: b"payload"}


def test_entries_may_come_out_of_order_and_with_gaps(disk: PlainDisk) -> None:
    for entry in (4, 0, 2, 3):
        assert disk.add((1, entry, bytes([entry]))) == [OK]
    disk.commit()
    assert disk.read(1) == {entry: bytes([entry]) for entry in (0, 2, 3, 4)}
    assert list(disk.read(1, 1, 3)) == [2, 3]


def test_a_request_may_cross_the_end_of_a_file() -> None:
    disk = PlainDisk(SimulatedDisk("bookie", random.Random(1)).mount(), file_bytes=64 * 1024, index_bytes_max=0)
    entries = [(1 + entry % 3, entry, bytes([entry]) * 1200) for entry in range(60)]
    for first in range(0, 60, 20):
        assert set(disk.add(*entries[first : first + 20])) == {OK}
        assert set(disk.add(*entries[first : first + 20])) == {OK}
    disk.commit()
    disk.close_full()
    disk.core.validate_state()
    assert disk.core.log.generation > 2
    for ledger_id in (1, 2, 3):
        assert disk.read(ledger_id) == {entry: payload for ledger, entry, payload in entries if ledger == ledger_id}
    assert disk.add((1, 0, bytes(1)), (1, 0, bytes([0]) * 1200)) == [Status.CONFLICT, OK]


def test_a_failed_disk_takes_nothing_and_acknowledges_nothing(disk: PlainDisk) -> None:
    disk.add((1, 0, b"durable"))
    disk.commit()
    disk.add((1, 1, b"not durable"))
    disk.core.fail("sync failed")
    assert disk.core.take() is None
    assert disk.add((1, 2, b"x")) == [Status.STORAGE_FAILED]
    assert disk.read(1) == {0: b"durable"}


def test_a_full_disk_refuses_adds_and_records_fences(disk: PlainDisk) -> None:
    disk.add((1, 0, b"zero"))
    disk.core.read_only = "full"
    assert disk.add((1, 1, b"one"), flags=RECOVERY_ADD) == [Status.READ_ONLY]
    disk.fence(1)
    disk.commit()
    disk.core.read_only = ""
    assert disk.add((1, 1, b"one")) == [Status.FENCED]


def located(disk: PlainDisk, budget: Budget, *ranges: Range) -> list[Found]:
    found = locate(disk.core, ranges, budget)
    assert isinstance(found, list)
    return found


def test_an_answer_says_how_far_it_decides(disk: PlainDisk) -> None:
    for entry in (0, 1, 3, 4):
        disk.add((1, entry, bytes(100)))
    disk.commit()
    found = located(disk, Budget(250, 100), Range(1, 0, 9), Range(1, 3, 4))
    assert (found[0].decided_to, [place.row.entry_id for place in found[0].places]) == (2, [0, 1])
    assert (found[1].status, found[1].decided_to, found[1].places) == (OK, 2, [])
    found = located(disk, Budget(1, 100), Range(1, 2, 9), Range(8, 0, 9))
    assert (found[0].decided_to, [place.row.entry_id for place in found[0].places]) == (3, [3])
    assert (found[1].status, found[1].decided_to) == (Status.NO_SUCH_LEDGER, 9)
    found = located(disk, Budget(1 << 20, 100), Range(1, 4, 2**64 - 1), Range(1, 50, 60))
    assert [place.row.entry_id for place in found[0].places] == [4]
    assert (found[0].decided_to, found[1].decided_to) == (2**63 - 1, 60)


def test_ledgers_are_bounded() -> None:
    disk = PlainDisk(SimulatedDisk("bookie", random.Random(1)).mount())
    disk.core._ledgers_max = 2
    assert disk.add((1, 0, b""), (2, 0, b""), (3, 0, b"")) == [OK, OK, Status.OVERLOADED]


def test_a_file_that_is_read_is_not_recycled() -> None:
    disk = PlainDisk(SimulatedDisk("bookie", random.Random(1)).mount(), file_bytes=16 * 1024)
    for entry in range(8):
        disk.add((1, entry, bytes(4000)))
    disk.commit()
    disk.close_full()
    first = min(disk.contents.files)
    disk.contents.pin([first])
    disk.delete(1)
    disk.commit()
    assert first not in [file.generation for file in disk.contents.dead_files()]
    disk.contents.unpin([first])
    assert first in [file.generation for file in disk.contents.dead_files()]


def test_settings_are_checked() -> None:
    settings = BookieSettings(bookie_id="b", data_dirs=("/a", "/b"), read_jobs=2)
    assert settings.threads == 12
    with pytest.raises(Invalid, match="bookie_id"):
        BookieSettings(bookie_id="a/b", data_dirs=("/a",))
    with pytest.raises(Invalid, match="data_dirs is empty"):
        BookieSettings(bookie_id="b", data_dirs=())
