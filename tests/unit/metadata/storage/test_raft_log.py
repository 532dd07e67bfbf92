"""The durable Raft log: synced entries survive, a torn tail is removed, corruption is refused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.world.disk import Disk

from stratalog_core.errors import Corrupt
from stratalog_core.system import SystemFiles
from stratalog_metadata.raft import Entry, EntryKind, HardState, LogTail, Membership, Raft, RaftSettings
from stratalog_metadata.raft.messages import Append
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.raft_log import DurableLog, LogWrite

SEGMENT = "raft/log-0000000001"
VOTE_TERM = 9


def entry(index: int, term: int = 1, payload: bytes = b"payload") -> Entry:
    return Entry(index, term, EntryKind.COMMAND, payload)


def write(*entries: Entry, previous_term: int = 0) -> LogWrite:
    return LogWrite(entries=entries, previous_term=previous_term)


def entries_of(tail: LogTail) -> tuple[Entry, ...]:
    return tail.between(tail.base_index + 1, tail.last_index)


def reopened(root: Path) -> LogTail:
    log, _, tail = DurableLog.open(SystemFiles(root), "raft")
    log.close()
    return tail


def written(root: Path, batches: Sequence[Sequence[LogWrite]], segment_bytes_max: int = 16 * 1024 * 1024) -> DurableLog:
    log, _, _ = DurableLog.open(SystemFiles(root), "raft", segment_bytes_max)
    log.persist([LogWrite(hard_state=HardState(term=VOTE_TERM, voted_for=2))])
    for batch in batches:
        log.persist(batch)
    return log


def test_persisted_entries_are_loaded_again(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1), entry(2))], [write(entry(3, 4), previous_term=1)]])
    log.close()
    log, hard_state, tail = DurableLog.open(SystemFiles(tmp_path), "raft")
    log.close()
    assert hard_state == HardState(term=VOTE_TERM, voted_for=2)
    assert entries_of(tail) == (entry(1), entry(2), entry(3, 4))


def test_a_conflicting_suffix_is_replaced(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1), entry(2), entry(3))], [write(entry(2, 2), previous_term=1)]])
    log.close()
    assert entries_of(reopened(tmp_path)) == (entry(1), entry(2, 2))


def test_an_entry_of_an_earlier_term_replaces_an_uncommitted_one(tmp_path: Path) -> None:
    """Figure 8 of the Raft paper: a leader of term 4 brings its old entry of term 2 to a node that has one of term 3 there."""
    returned = write(entry(2, 2), entry(3, 4), previous_term=1)
    log = written(tmp_path, [[write(entry(1))], [write(entry(2, 3), previous_term=1)], [returned]])
    log.close()
    assert entries_of(reopened(tmp_path)) == (entry(1), entry(2, 2), entry(3, 4))


def test_an_entry_that_was_replaced_and_brought_back_in_one_turn_is_written_again(tmp_path: Path) -> None:
    """As in figure 8, but the entry of term 3 and the return of that of term 2 reach the node in one turn."""
    log = written(tmp_path, [[write(entry(1), entry(2, 2))]])
    core = Raft(
        RaftSettings(node_id=2), Membership.of_voters([1, 2, 3, 4, 5]), hard_state=HardState(term=2),
        log=LogTail(entries=[entry(1), entry(2, 2)]), applied=1, random=random.Random(2), now=0.0,
    )  # fmt: skip
    for sender, term, entries in ((3, 3, (entry(2, 3),)), (1, 4, (entry(2, 2), entry(3, 4)))):
        core.step(
            Append(sender=sender, receiver=2, term=term, previous_index=1, previous_term=1, commit=1, entries=entries)
        )  # fmt: skip
    ready = core.ready()
    assert ready is not None
    log.persist([LogWrite(entries=ready.entries, previous_term=ready.previous_term)])
    log.close()
    tail = reopened(tmp_path)
    assert entries_of(tail) == entries_of(core.log) == (entry(1), entry(2, 2), entry(3, 4))


def test_a_duplicate_entry_with_another_payload_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1), entry(2))], [write(entry(2, 1, b"another"), previous_term=1)]]).close()
    with pytest.raises(Corrupt, match="repeats"):
        reopened(tmp_path)


def test_writes_of_one_batch_may_replace_each_other(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1), entry(2)), write(entry(2, 2), entry(3, 2), previous_term=1)]])
    log.close()
    assert entries_of(reopened(tmp_path)) == (entry(1), entry(2, 2), entry(3, 2))


def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1), entry(2))], [write(entry(3), entry(4), previous_term=1)]])
    log.close()
    whole = (tmp_path / SEGMENT).read_bytes()
    record_bytes = log_format.RECORD_HEADER_BYTES + len(b"payload")
    synced = log_format.SEGMENT_HEADER_BYTES + 2 * record_bytes
    for end in range(synced, len(whole)):
        shutil.copytree(tmp_path / "raft", tmp_path / "torn" / "raft", dirs_exist_ok=True)
        (tmp_path / "torn" / SEGMENT).write_bytes(whole[:end])
        tail = reopened(tmp_path / "torn")
        assert tail.last_index == 2 + (end - synced) // record_bytes
        assert (tmp_path / "torn" / SEGMENT).stat().st_size == log_format.SEGMENT_HEADER_BYTES + tail.last_index * record_bytes


def test_a_batch_torn_in_its_middle_is_cut_from_there(tmp_path: Path) -> None:
    """A disk may keep later sectors of an unsynced write and lose earlier ones."""
    large = [entry(index, payload=bytes([index]) * 700) for index in (2, 3, 4)]
    written(tmp_path, [[write(entry(1))], [write(*large, previous_term=1)]]).close()
    whole = (tmp_path / SEGMENT).read_bytes()
    second = log_format.SEGMENT_HEADER_BYTES + log_format.RECORD_HEADER_BYTES + len(b"payload")
    record_bytes = log_format.RECORD_HEADER_BYTES + 700
    for sector in range(0, len(whole), log_format.SECTOR_BYTES):
        content = bytearray(whole)
        lost = content[max(sector, second) : sector + log_format.SECTOR_BYTES]
        content[max(sector, second) : sector + log_format.SECTOR_BYTES] = bytes(len(lost))
        (tmp_path / SEGMENT).write_bytes(content)
        assert reopened(tmp_path).last_index == 1 + max(sector - second, 0) // record_bytes


def test_rot_in_the_last_batch_is_refused_at_every_byte(tmp_path: Path) -> None:
    """Nothing later proves that the batch was durable, but an interrupted write cannot cause this corruption."""
    written(tmp_path, [[write(entry(1))], [write(entry(2), entry(3), previous_term=1)]]).close()
    whole = (tmp_path / SEGMENT).read_bytes()
    second = log_format.SEGMENT_HEADER_BYTES + log_format.RECORD_HEADER_BYTES + len(b"payload")
    for position in range(second, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        (tmp_path / SEGMENT).write_bytes(damaged)
        with pytest.raises(Corrupt, match=r"not by a write that was cut off.*metadata remove"):
            reopened(tmp_path)
    assert (tmp_path / SEGMENT).read_bytes() == damaged, "a log that is refused is left as it is"


def test_a_lost_end_that_looks_torn_is_refused_after_it_was_marked(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1))], [write(entry(2), previous_term=1)]])
    assert not log.is_marked
    log.mark()
    assert log.is_marked
    log.close()
    content = (tmp_path / SEGMENT).read_bytes()
    for lost in (content[:-3], content[:-3] + bytes(3), content[:-20] + bytes(20)):
        (tmp_path / SEGMENT).write_bytes(lost)
        with pytest.raises(Corrupt):
            reopened(tmp_path)


def test_the_end_found_at_start_is_marked(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1))]]).close()
    log, _, _ = DurableLog.open(SystemFiles(tmp_path), "raft")
    log.close()
    content = (tmp_path / SEGMENT).read_bytes()
    (tmp_path / SEGMENT).write_bytes(content[:-3])
    with pytest.raises(Corrupt, match="reached byte"):
        reopened(tmp_path)


def test_zeros_after_the_last_record_are_a_torn_tail(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1))]]).close()
    with (tmp_path / SEGMENT).open("ab") as file:
        file.write(bytes(5000))
    assert reopened(tmp_path).last_index == 1


def test_writing_continues_after_a_torn_tail(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1))], [write(entry(2), previous_term=1)]]).close()
    content = (tmp_path / SEGMENT).read_bytes()
    (tmp_path / SEGMENT).write_bytes(content[:-3])
    log, _, _ = DurableLog.open(SystemFiles(tmp_path), "raft")
    log.persist([write(entry(2, 3), previous_term=1)])
    log.close()
    assert entries_of(reopened(tmp_path)) == (entry(1), entry(2, 3))


def test_corruption_before_a_later_batch_is_refused_at_every_byte(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1))], [write(entry(2), previous_term=1)], [write(entry(3), previous_term=1)]])
    log.close()
    whole = (tmp_path / SEGMENT).read_bytes()
    last_batch = len(whole) - log_format.RECORD_HEADER_BYTES - len(b"payload")
    for position in range(last_batch):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        (tmp_path / SEGMENT).write_bytes(damaged)
        with pytest.raises(Corrupt):
            reopened(tmp_path)


def test_corruption_in_an_older_segment_is_refused(tmp_path: Path) -> None:
    batches = [[write(entry(index), previous_term=1 if index > 1 else 0)] for index in range(1, 6)]
    written(tmp_path, batches, segment_bytes_max=60).close()
    path = tmp_path / "raft" / "log-0000000003"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="damaged"):
        reopened(tmp_path)


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    batches = [[write(entry(index), previous_term=1 if index > 1 else 0)] for index in range(1, 6)]
    written(tmp_path, batches, segment_bytes_max=60).close()
    (tmp_path / "raft" / "log-0000000003").unlink()
    with pytest.raises(Corrupt, match="missing"):
        reopened(tmp_path)


def test_a_segment_whose_creation_was_cut_short_is_dropped(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1))]]).close()
    for size in range(log_format.SEGMENT_HEADER_BYTES):
        (tmp_path / "raft" / "log-0000000002").write_bytes(log_format.pack_segment(1, 1, reset=False)[:size])
        log, _, tail = DurableLog.open(SystemFiles(tmp_path), "raft")
        assert tail.last_index == 1
        log.close()
        assert not (tmp_path / "raft" / "log-0000000002").exists()


def test_writing_continues_after_a_dropped_segment(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1))]]).close()
    (tmp_path / "raft" / "log-0000000002").write_bytes(b"")
    log, _, _ = DurableLog.open(SystemFiles(tmp_path), "raft")
    log.persist([write(entry(2), previous_term=1)])
    log.close()
    assert reopened(tmp_path).last_index == 2


def test_compaction_removes_whole_segments_only(tmp_path: Path) -> None:
    batches = [[write(entry(index), previous_term=1 if index > 1 else 0)] for index in range(1, 6)]
    log = written(tmp_path, batches, segment_bytes_max=60)
    log.compact(3)
    log.close()
    tail = reopened(tmp_path)
    assert (tail.base_index, tail.base_term, tail.last_index) == (3, 1, 5)


def test_a_snapshot_starts_a_new_log(tmp_path: Path) -> None:
    log = written(tmp_path, [[write(entry(1), entry(2))]])
    log.persist([write(entry(3), previous_term=1), LogWrite(reset_to=(40, 3)), write(entry(41, 4), previous_term=3)])
    log.close()
    tail = reopened(tmp_path)
    assert (tail.base_index, tail.base_term) == (40, 3)
    assert entries_of(tail) == (entry(41, 4),)


def test_segments_left_by_a_reset_are_removed(tmp_path: Path) -> None:
    """The node stopped between starting the new segment and removing the old ones."""
    written(tmp_path, [[write(entry(1), entry(2))]]).close()
    (tmp_path / "raft" / "log-0000000002").write_bytes(log_format.pack_segment(40, 3, reset=True))
    tail = reopened(tmp_path)
    assert (tail.base_index, tail.last_index) == (40, 40)
    assert not (tmp_path / SEGMENT).exists()


def test_a_replaced_base_is_understood_after_compaction(tmp_path: Path) -> None:
    """The older segment with the replaced entries is removed; the newer one has its own start in its header."""
    log = written(
        tmp_path, [[write(entry(1), entry(2), entry(3))], [write(entry(2, 2), previous_term=1)]], segment_bytes_max=60
    )
    log.compact(3)
    log.close()
    tail = reopened(tmp_path)
    assert (tail.base_index, tail.base_term) == (1, 1)
    assert entries_of(tail) == (entry(2, 2),)


@pytest.mark.parametrize("damage", [b"", b"SLVT", None])
def test_a_lost_or_damaged_vote_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    written(tmp_path, [[write(entry(1))]]).close()
    vote = tmp_path / "raft" / "vote"
    if damage is None:
        vote.unlink()
    else:
        vote.write_bytes(damage)
    with pytest.raises(Corrupt):
        reopened(tmp_path)


def test_a_vote_of_an_earlier_term_than_the_log_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [[write(entry(1, 8))]]).close()
    (tmp_path / "raft" / "vote").write_bytes(log_format.pack_vote(HardState(term=7), log_format.LogMark(segment=1)))
    with pytest.raises(Corrupt, match="term 7"):
        reopened(tmp_path)


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    header = bytearray(log_format.pack_segment(0, 0, reset=False))
    header[8:10] = b"\x00\x07"
    sealed = log_format._sealed(bytes(header[:-4]))
    (tmp_path / "raft").mkdir()
    (tmp_path / SEGMENT).write_bytes(sealed)
    with pytest.raises(Corrupt, match="version 7"):
        reopened(tmp_path)


@st.composite
def histories(draw: st.DrawFn) -> list[list[LogWrite]]:
    """Batches as a node could be told to write: appended, or overruling with another term, be it an earlier one."""
    tail, term, highest = LogTail(), 1, 1
    batches = []
    for _ in range(draw(st.integers(1, 8))):
        batch = []
        for _ in range(draw(st.integers(1, 3))):
            if draw(st.booleans()) and tail.last_index:
                kept = draw(st.integers(0, tail.last_index - 1))
                replaced = tail.term_at(kept + 1)
                tail.truncate_after(kept)
                term = draw(st.sampled_from([each for each in range(max(tail.last_term, 1), highest + 2) if each != replaced]))
                highest = max(highest, term)
            first = tail.last_index + 1
            previous_term = tail.last_term
            payloads = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=3))
            entries = tuple(entry(first + number, term, payload) for number, payload in enumerate(payloads))
            tail.extend(entries)
            batch.append(LogWrite(entries=entries, previous_term=previous_term))
        batches.append(batch)
    return batches


@settings(max_examples=60, deadline=None)
@given(history=histories(), segment_bytes_max=st.sampled_from([60, 200, 1_000_000]))
def test_any_history_is_recovered(history: list[list[LogWrite]], segment_bytes_max: int) -> None:
    files = Disk("disk", random.Random(1)).mount()
    log, _, _ = DurableLog.open(files, "raft", segment_bytes_max)
    expected = LogTail()
    for batch in history:
        log.persist([LogWrite(hard_state=HardState(term=100)), *batch])
        for one in batch:
            expected.truncate_after(one.entries[0].index - 1)
            expected.extend(one.entries)
    log.close()
    log, _, tail = DurableLog.open(files, "raft", segment_bytes_max)
    log.close()
    assert entries_of(tail) == entries_of(expected)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (HardState(term=VOTE_TERM - 1, voted_for=0), "term 8 after 9"),
        (HardState(term=VOTE_TERM, voted_for=3), "two votes in term 9"),
        (HardState(term=VOTE_TERM, voted_for=0), "two votes in term 9"),
    ],
)
def test_a_broken_promise_is_never_written(tmp_path: Path, state: HardState, complaint: str) -> None:
    log = written(tmp_path, [])
    with pytest.raises(AssertionError, match=complaint):
        log.persist([LogWrite(hard_state=state)])
    log.close()
    log, hard_state, _ = DurableLog.open(SystemFiles(tmp_path), "raft")
    log.close()
    assert hard_state == HardState(term=VOTE_TERM, voted_for=2)


def test_what_a_restart_finds_after_a_failed_sync_is_durable() -> None:
    """The page cache still has the entry and counts it as written, so that a sync of the new process does nothing for it."""
    disk = Disk("node", random.Random(1))
    log, _, _ = DurableLog.open(disk.mount(), "raft")
    log.persist([LogWrite(hard_state=HardState(term=VOTE_TERM)), write(entry(1))])
    disk.faults.sync_fails = True
    with pytest.raises(OSError, match="fsync"):
        log.persist([write(entry(2), previous_term=1)])
    disk.faults.sync_fails = False
    _, _, found = DurableLog.open(disk.mount(), "raft")
    disk.crash()
    _, _, tail = DurableLog.open(disk.mount(), "raft")
    assert entries_of(tail) == entries_of(found) == (entry(1), entry(2))
