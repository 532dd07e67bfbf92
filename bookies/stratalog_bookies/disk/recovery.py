"""Restores a disk's state at start: the last checkpoint, then every later log file in order. Blocking; run it in the
background.

Every acknowledged entry is found, wherever the process or the machine stopped. The log files from the state file's
``next_generation`` on are read whole and replayed, oldest first; none may be missing. Each is then closed at the end of its
intact frames, with an index, and writing continues in a new file: a torn tail is cut off once and never read again. If durable
frames are missing, the log is corrupt: ``Corrupt`` is raised and the disk is left unchanged.
"""

from __future__ import annotations

import logging

from crc32c import crc32c

from stratalog_bookies.disk.core import checkpoint, log_format
from stratalog_bookies.disk.core.checkpoint import State
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.disk_core import DiskCore, Header
from stratalog_bookies.disk.core.index import ROW, SMALL_BYTES_MAX, Run
from stratalog_bookies.disk.core.log import Log
from stratalog_bookies.disk.core.log_format import Frame, Scan
from stratalog_bookies.disk.log_files import STATE, LogFiles
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.ids import ID_MAX
from stratalog_bookies.protocol.messages import HEAD_BYTES_MAX
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Files

_log = logging.getLogger(__name__)
_NEW = State(next_generation=1)
_REMEDY = "Restore the file, or replace the bookie: start one with a new bookie_id on empty disks, then decommission this one"


def holds_data(files: Files) -> bool:
    """Whether a directory without a cookie holds more than an interrupted ``create`` leaves."""
    return files.exists(STATE) and checkpoint.decode_state(files.read(STATE)) != _NEW


def create(store: LogFiles) -> None:
    """Make the state file and the first log file of an empty disk durable. Idempotent."""
    if 1 not in store.generations():
        store.prepare(1)
        store.finish(1)
    store.save_state(_NEW)


def recover(store: LogFiles, contents: Contents, cookie: bytes, *, ledgers_max: int) -> DiskCore:
    """Load ``contents`` up to the end of the log and open a new file after it. Raises ``Corrupt`` or ``OSError``."""
    state = store.load_state()
    contents.restore(state)
    for closed in state.closed:
        contents.restore_runs(closed.generation, _index_of(store, closed.generation, closed.end))
    existing = store.generations()
    tail = [generation for generation in existing if generation >= state.next_generation]
    _check_complete(state, existing, tail)
    _replay_files(store, contents, cookie, tail)
    generation = max(tail) + 1
    store.prepare(generation)
    for replayed in tail:
        store.save_index(replayed, list(contents.files[replayed].runs.values()))
    empty = frozenset(each for each in tail if contents.files[each].end == log_format.FIRST_FRAME)
    store.save_state(contents.state(generation, without=empty))
    for replayed in tail:
        contents.file_closed(replayed)
    _remove_unnamed(store, contents, empty, generation)
    return DiskCore(contents, Log(cookie, generation, store.file_bytes), ledgers_max=ledgers_max)


def _check_complete(state: State, existing: list[int], tail: list[int]) -> None:
    missing = sorted({closed.generation for closed in state.closed} - set(existing))
    expected = list(range(state.next_generation, max(tail, default=state.next_generation) + 1))
    missing += sorted(set(expected) - set(tail))
    if missing:
        raise Corrupt(f"log file {missing[0]:016x} is missing. {_REMEDY}")


def _replay_files(store: LogFiles, contents: Contents, cookie: bytes, generations: list[int]) -> None:
    """Replay each file up to the end that the next file records for it."""
    pending: tuple[int, bytes] | None = None
    for generation in generations:
        content = store.read_log(generation)
        if pending is not None:
            end = previous_end(content, log_format.frame_seed(cookie, generation))
            _replay_durably(store, contents, cookie, *pending, end)
        pending = (generation, content)
    if pending is not None:
        _replay_durably(store, contents, cookie, *pending, 0)


def _replay_durably(
    store: LogFiles, contents: Contents, cookie: bytes, generation: int, content: bytes, durable_end: int
) -> None:
    """Replay a file, and make its last group durable: it was written only after the groups before it were."""
    scan = replay_file(contents, cookie, generation, content, durable_end)
    if scan.frames:
        start = scan.frames[-1].group_start
        store.write_again(generation, memoryview(content)[start : scan.end], start)


def replay_file(contents: Contents, cookie: bytes, generation: int, content: bytes, durable_end: int) -> Scan:
    """Replay a file whose end, according to the next file, is ``durable_end`` (0: unknown). Raises ``Corrupt``."""
    contents.open_file(generation)
    try:
        scan = log_format.scan(content, log_format.frame_seed(cookie, generation), durable_end)
    except Corrupt as corruption:
        raise Corrupt(
            f"log file {generation:016x} is corrupt: {corruption.message}. Nothing was changed. {_REMEDY}",
            generation=generation,
        ) from corruption
    if scan.corrupt_frames:
        count = len(scan.corrupt_frames)
        _log.error("log file %016x: %d frames have corrupt payloads; their entries are kept as unreadable", generation, count)
    view = memoryview(content)
    for frame in scan.frames:
        replay(contents, view, frame, generation, is_sound=frame.position not in scan.corrupt_frames)
    contents.end_file(generation, scan.end)
    return scan


def replay(contents: Contents, content: memoryview, frame: Frame, generation: int, *, is_sound: bool) -> None:
    """Apply a frame. ``is_sound``: all of its payloads match their CRCs."""
    if frame.kind == log_format.CONTROL:
        for item in log_format.items_of(content, frame):
            _replay_item(contents, item.kind, item.ledger_id, item.value)
        return
    position = frame.payload_start
    for header in log_format.entries_of(content, frame):
        ledger_id, entry_id, lac, payload_bytes, crc, _ = header
        if ledger_id | entry_id > ID_MAX:
            raise Corrupt(f"log file {generation:016x} holds entry {entry_id} of ledger {ledger_id}; maximum is {ID_MAX}")
        if ledger_id not in contents.tombstones:
            ledger = contents.ledger(ledger_id)
            run = contents.open_run(ledger, generation)
            if run.count == 0 or run.find(entry_id) is None:
                head_crc = _head_crc(header, content[position : position + payload_bytes], is_sound=is_sound)
                run.add(entry_id, ROW.pack(entry_id, position, payload_bytes, crc, lac, head_crc))
                run.payload_bytes += payload_bytes
            ledger.last_entry = max(ledger.last_entry, entry_id)
            ledger.lac = max(ledger.lac, lac)
        position += payload_bytes


def _head_crc(header: Header, payload: memoryview, *, is_sound: bool) -> int:
    """The head CRC for the index. For a corrupt payload, a CRC that its head does not match either."""
    if len(payload) <= SMALL_BYTES_MAX:
        return 0
    head_crc = int(crc32c(payload[:HEAD_BYTES_MAX]))
    ledger_id, entry_id, lac, payload_bytes, crc, _ = header
    matches = is_sound or messages.entry_crc(ledger_id, entry_id, lac, (payload,), payload_bytes) == crc
    return head_crc if matches else head_crc ^ 0xFFFFFFFF


def _replay_item(contents: Contents, kind: int, ledger_id: int, value: int) -> None:
    if kind == log_format.TOMBSTONE:
        contents.delete(ledger_id)
    elif ledger_id not in contents.tombstones:
        if kind == log_format.FENCE:
            contents.ledger(ledger_id).fenced = True
        elif kind == log_format.EXPLICIT_LAC:
            ledger = contents.ledger(ledger_id)
            ledger.lac = max(ledger.lac, value)


def previous_end(content: bytes, seed: int) -> int:
    """End of the previous file according to a file's first frame (0: unknown)."""
    view = memoryview(content)
    frame = log_format.read_frame(view, log_format.FIRST_FRAME, seed)
    if frame is None or frame.kind != log_format.CONTROL:
        return 0
    first = log_format.items_of(view, frame)[0]
    return first.value if first.kind == log_format.FILE_START else 0


def _index_of(store: LogFiles, generation: int, end: int) -> list[Run]:
    """The stored index of a closed file, rebuilt from the file if it cannot be read."""
    try:
        return store.load_index(generation)
    except (FileNotFoundError, Corrupt) as lost:
        _log.error("the index of log file %016x is lost (%s) and is rebuilt from the file", generation, lost)
    make_index(store, generation, end)
    return store.load_index(generation)


def make_index(store: LogFiles, generation: int, end: int) -> dict[int, Run]:
    """Rebuild a closed file's index from its frames: its runs by ledger. Raises ``Corrupt`` or ``OSError``."""
    rebuilt = Contents(index_bytes_max=0, tombstones_max=0)
    replay_file(rebuilt, store.cookie, generation, store.read_log(generation), end)
    runs = rebuilt.files[generation].runs
    store.save_index(generation, list(runs.values()))
    return runs


def _remove_unnamed(store: LogFiles, contents: Contents, empty: frozenset[int], next_generation: int) -> None:
    """Remove empty files, and those dropped just before the last stop.

    They are not recycled: a file system without a journal may keep both names of a renamed file, so one of the spares could be
    the same file.
    """
    for generation in empty:
        contents.drop_file(generation)
    for generation in store.generations():
        if generation < next_generation and generation not in contents.files:
            store.recycle(generation, spares_max=0)
