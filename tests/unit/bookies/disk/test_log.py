"""The write end of the log and its bytes: places, groups, rolling, and the scan that reads them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.log import Log
from stratalog_bookies.disk.core.log_format import ControlItem
from stratalog_bookies.protocol import messages
from stratalog_core.errors import Corrupt

KEY = b"0123456789abcdef"
FILE_BYTES = 64 * 1024


def new_log() -> Log:
    return Log(KEY, 5, FILE_BYTES)


def place(log: Log, ledger_id: int, entry_id: int, payload: bytes) -> int:
    header = messages.pack_entry(ledger_id, entry_id, entry_id - 1, (payload,))
    return log.append(log_format.ENTRIES, 1, header, (payload,), len(payload))


def drain(log: Log, file: bytearray) -> int:
    """Write all groups to ``file``; returns how many there were."""
    groups = 0
    while (write := log.take()) is not None:
        content = b"".join(write.buffers)
        file[write.position : write.position + len(content)] = content
        log.written(write.sequence)
        groups += 1
    return groups


def new_file() -> bytearray:
    file = bytearray(b"\xee" * FILE_BYTES)
    file[: log_format.PAGE_BYTES] = log_format.pack_file_header(KEY, 5, FILE_BYTES)
    return file


@given(groups=st.lists(st.lists(st.binary(max_size=900), min_size=1, max_size=4), max_size=8))
def test_what_was_written_is_scanned(groups: list[list[bytes]]) -> None:
    log, file = new_log(), new_file()
    placed: list[tuple[int, bytes]] = []
    for group in groups:
        for payload in group:
            placed.append((place(log, 1, len(placed), payload), payload))
        drain(log, file)
    scan = log_format.scan(bytes(file), log_format.frame_seed(KEY, 5))
    view = memoryview(file)
    entries = [frame for frame in scan.frames if frame.kind == log_format.ENTRIES]
    assert scan.end == (log.tail if groups else log_format.FIRST_FRAME)
    assert [(frame.payload_start, bytes(view[frame.payload_start : frame.payload_end])) for frame in entries] == placed
    assert all(frame.position % log_format.ALIGNMENT == 0 for frame in scan.frames)


def test_all_that_waits_is_one_group() -> None:
    log, file = new_log(), new_file()
    for entry in range(10):
        place(log, 1, entry, b"x" * 100)
    write = log.take()
    assert write is not None
    place(log, 1, 10, b"late")
    assert log.take() is None
    assert (write.sequence, log.sequence) == (1, 2)
    log.written(1)
    assert log.durable_position == write.position + len(b"".join(write.buffers[:-1]))
    assert drain(log, file) == 1


def test_a_write_fills_its_last_page_and_the_next_begins_inside_it() -> None:
    log = new_log()
    place(log, 1, 0, b"x" * 100)
    write = log.take()
    assert write is not None
    assert (write.position + len(b"".join(write.buffers))) % log_format.PAGE_BYTES == 0
    log.written(write.sequence)
    end = log.tail
    place(log, 1, 1, b"y")
    later = log.take()
    assert later is not None
    assert later.position == end
    assert end % log_format.PAGE_BYTES != 0


def test_payloads_are_not_copied() -> None:
    log = new_log()
    body = memoryview(bytearray(messages.pack_entry(1, 0, -1, (b"p" * 50,)) + b"p" * 50))
    payload = body[messages.ENTRY_HEADER_BYTES :]
    log.append(log_format.ENTRIES, 1, body[: messages.ENTRY_HEADER_BYTES], (payload,), 50)
    write = log.take()
    assert write is not None
    assert any(buffer is payload for buffer in write.buffers)


def test_rolling_needs_a_prepared_file_and_says_where_the_last_one_ends() -> None:
    log = new_log()
    place(log, 1, 0, b"x")
    assert not log.takes(FILE_BYTES - log_format.FIRST_FRAME)
    with pytest.raises(AssertionError, match="prepared"):
        log.roll()
    log.prepared_generation = 6
    end = log.tail
    assert log.takes(FILE_BYTES - log_format.FIRST_FRAME)
    log.roll()
    first, second = log.take(), None
    assert first is not None
    assert first.generation == 5
    log.written(first.sequence)
    second = log.take()
    assert second is not None
    assert second.generation == 6
    assert not log.is_durable(6, log_format.FIRST_FRAME + 100)
    assert log.is_durable(5, end)
    content = memoryview(bytes(log_format.FIRST_FRAME) + b"".join(second.buffers))
    frame = log_format.read_frame(content, log_format.FIRST_FRAME, log_format.frame_seed(KEY, 6))
    assert frame is not None
    assert log_format.items_of(content, frame) == [ControlItem(log_format.FILE_START, 0, end)]


def test_file_headers_name_their_disk_and_generation() -> None:
    page = log_format.pack_file_header(KEY, 5, FILE_BYTES)
    log_format.check_file_header(page, KEY, 5)
    with pytest.raises(Corrupt, match="another disk or generation"):
        log_format.check_file_header(page, KEY, 6)
    with pytest.raises(Corrupt, match="another disk or generation"):
        log_format.check_file_header(page, b"x" * 16, 5)
    with pytest.raises(Corrupt, match="does not match its CRC"):
        log_format.check_file_header(b"\0" + page[1:], KEY, 5)
    with pytest.raises(Corrupt, match="does not match its CRC"):
        log_format.check_file_header(b"", KEY, 5)


@given(flip=st.integers(log_format.FIRST_FRAME * 8, (log_format.FIRST_FRAME + 900) * 8 - 1))
def test_one_flipped_bit_is_never_taken_for_a_sound_frame(flip: int) -> None:
    log, file = new_log(), new_file()
    for entry in range(4):
        place(log, 1, entry, bytes([entry]) * 150)
    drain(log, file)
    sound = log_format.scan(bytes(file), log_format.frame_seed(KEY, 5))
    file[flip // 8] ^= 1 << flip % 8
    scan = log_format.scan(bytes(file), log_format.frame_seed(KEY, 5))
    assert scan.frames == sound.frames[: len(scan.frames)]
    for frame in scan.frames:
        assert log_format.payloads_match(memoryview(bytes(file)), frame)
