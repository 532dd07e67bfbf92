"""Requests to bookies, their responses as clients decode them, and the files on their disks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial

from crc32c import crc32c

from fuzz import seals
from fuzz.target import Target
from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core import checkpoint, log_format
from stratalog_bookies.disk.core.checkpoint import ClosedFile, LedgerState, State
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.cookie import DiskCookie, check_disks, decode_cookie, encode_cookie
from stratalog_bookies.disk.core.index import ROW, Run
from stratalog_bookies.disk.core.log_format import ControlItem
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import BookieInfo, DiskInfo, LedgerPage, LedgerSummary, LedgerTail, LedgerTails, Range

COOKIE = b"0123456789abcdef"
GENERATION = 2
SEED = log_format.frame_seed(COOKIE, GENERATION)


# -- messages


def _joined(parts: Sequence[object]) -> bytes:
    return b"".join(bytes(part) for part in parts)  # type: ignore[call-overload]


def _headers() -> list[bytes]:
    return [messages.pack_entry(7, entry, entry - 1, (b"payload",)) for entry in range(3)]


_ANSWER = messages.encode_read_answer([(0, 2, 3)], _headers(), [b"payload"] * 3)
_CONTROLS: tuple[messages.Control, ...] = (
    messages.LedgerIds(ledger_ids=(1, 2)),
    LedgerTails(ledgers=(LedgerTail(ledger_id=1, last_entry=3, lac=2, fenced=True),)),
    messages.ExplicitLacs(lacs=((1, 2),)),
    messages.ListLedgers(after=3, limit=5),
    LedgerPage(ledgers=(LedgerSummary(ledger_id=1, entries=4),), more=True),
    BookieInfo(
        bookie_id="b", read_only=False, free_bytes=3, disks=(DiskInfo(position=0, state="writable"),), counters={"a": 1}
    ),
)
DECODERS: tuple[tuple[Callable[[memoryview], object], bytes], ...] = (
    (messages.decode_add, _joined(messages.encode_add(_headers(), [b"payload"] * 3))),
    (messages.decode_statuses, messages.encode_statuses((0, 1, 2))),
    (messages.decode_read, _joined(messages.encode_read([Range(7, 0, 2)], 1000, messages.FENCE_FIRST))),
    (messages.decode_read_headers, _joined(messages.encode_read_headers([Range(7, 0, 2)], 61))),
    (messages.decode_read_answer, _joined(_ANSWER)),
    (lambda body: messages.decode_read_answer(body, 61), _joined(_ANSWER)),
    *((partial(messages.decode, type(one)), messages.encode(one)) for one in _CONTROLS),
)


def decode_message(content: bytes) -> None:
    """The first byte says which body it is."""
    decode, _ = DECODERS[content[0] % len(DECODERS) if content else 0]
    decode(memoryview(content[1:]))


# -- log files


def log_file() -> bytes:
    """A header, two entries frames of one group, a control frame of another."""
    content = bytearray(log_format.pack_file_header(COOKIE, GENERATION, 64 * 1024))
    start = len(content)
    items = log_format.pack_items(
        [ControlItem(log_format.FILE_START, 0, 0), ControlItem(log_format.FENCE, 7, 0), ControlItem(log_format.TOMBSTONE, 8, 0)]
    )
    lacs = log_format.pack_items([ControlItem(log_format.EXPLICIT_LAC, 7, 1)])
    heads = b"".join(_headers())
    for kind, count, head, payload, group in (
        (log_format.CONTROL, 3, items, b"", start),
        (log_format.ENTRIES, 3, heads, b"payload" * 3, start),
        (log_format.CONTROL, 1, lacs, b"", 0),
    ):
        at = len(content)
        content += (
            log_format.pack_frame(SEED, kind, count, at, at if group is None else group, head, len(payload)) + head + payload
        )
        content += bytes(-len(content) % log_format.ALIGNMENT)
    return bytes(content) + bytes(64)


def seal_log(content: bytes) -> bytes:
    """Header CRCs of all frames that say where they are, made right."""
    out = bytearray(content)
    position = out.find(log_format.FRAME_MAGIC)
    while 0 <= position <= len(out) - log_format.FRAME_BYTES:
        (head_bytes,) = struct.unpack_from(">I", out, position + log_format.FRAME_BYTES - 8)
        struct.pack_into(">I", out, position + 16, position)
        end = min(position + log_format.FRAME_BYTES + head_bytes, len(out))
        crc = crc32c(bytes(out[position + 8 : end]), SEED)
        struct.pack_into(">I", out, position + 4, crc)
        position = out.find(log_format.FRAME_MAGIC, position + 1)
    return bytes(out)


def replay_log(content: bytes) -> None:
    """As a restart does; then what it found must be fit for a checkpoint."""
    log = seals.opened(content, seal_log)
    log_format.check_file_header(log[: log_format.PAGE_BYTES], COOKIE, GENERATION)
    contents = Contents(index_bytes_max=1 << 20, tombstones_max=100)
    recovery.replay_file(contents, COOKIE, GENERATION, log, recovery.previous_end(log, SEED))
    contents.validate_state()
    checkpoint.encode_state(contents.state(GENERATION + 1))
    checkpoint.encode_index(GENERATION, list(contents.files[GENERATION].runs.values()))


# -- checkpoints and cookies


def seal_state(content: bytes) -> bytes:
    body = content[16:]
    fields = content[:8] + struct.pack(">I", len(body))
    return fields + struct.pack(">I", crc32c(body, crc32c(fields))) + body


def state_files() -> list[bytes]:
    state = State(
        next_generation=3,
        closed=(ClosedFile(generation=2, end=4200),),
        ledgers=checkpoint.pack_ledgers([LedgerState(ledger_id=7, lac=1, last_entry=2, fenced=True)]),
        tombstones=checkpoint.pack_tombstones([8]),
    )
    return [seals.sealed(checkpoint.encode_state(one)) for one in (state, State(next_generation=1))]


def read_state(content: bytes) -> None:
    state = checkpoint.decode_state(seals.opened(content, seal_state))
    contents = Contents(index_bytes_max=1 << 20, tombstones_max=100)
    contents.restore(state)
    contents.validate_state()
    checkpoint.encode_state(contents.state(GENERATION))


def seal_index(content: bytes) -> bytes:
    """The table's CRC, and its generation."""
    if len(content) < checkpoint.INDEX_HEADER_BYTES:
        return content
    fields = content[:8] + struct.pack(">Q", GENERATION) + content[16:20]
    (runs,) = struct.unpack_from(">I", fields, 16)
    start = checkpoint.INDEX_HEADER_BYTES
    table = content[start : start + runs * 48]
    return fields + struct.pack(">I", crc32c(table, crc32c(fields))) + content[start:]


def index_files() -> list[bytes]:
    run = Run(7, GENERATION)
    for entry in range(3):
        run.add(entry, ROW.pack(entry, 4200 + entry, 7, 0, entry - 1, 0))
    return [seals.sealed(checkpoint.encode_index(GENERATION, [run]))]


def read_index(content: bytes) -> None:
    """As a start does: header, table, then each run's rows."""
    stored = seals.opened(content, seal_index)
    header = stored[: checkpoint.INDEX_HEADER_BYTES]
    end = checkpoint.INDEX_HEADER_BYTES + checkpoint.index_table_bytes(header, GENERATION)
    runs = checkpoint.decode_index_table(header, stored[checkpoint.INDEX_HEADER_BYTES : end], GENERATION)
    contents = Contents(index_bytes_max=1 << 20, tombstones_max=100)
    contents.open_file(GENERATION).end = 8192
    contents.restore_runs(GENERATION, runs)
    contents.validate_state()
    checkpoint.encode_state(contents.state(GENERATION + 1))
    for run in runs:
        rows = checkpoint.check_rows(run, stored[run.stored_at : run.stored_at + run.count * ROW.size])
        contents.cache.keep(run, rows)
        run.find(run.first)
        list(run.between(run.first, run.last))


def cookies() -> list[bytes]:
    return [encode_cookie(DiskCookie(format_version=1, cluster_id="c", bookie_id="b", cookie="0" * 32, disk=0, disks=1))]


def read_cookie(content: bytes) -> None:
    check_disks(None, [decode_cookie(content, "disk")], cluster_id="c", bookie_id="b", directories=["disk"])


TARGETS = (
    Target(
        name="bookie-messages",
        run=decode_message,
        seeds=lambda: [bytes((number,)) + sound for number, (_, sound) in enumerate(DECODERS)],
    ),
    Target(name="bookie-log", run=replay_log, seeds=lambda: [seals.sealed(log_file())]),
    Target(name="bookie-state", run=read_state, seeds=state_files),
    Target(name="bookie-index", run=read_index, seeds=index_files),
    Target(name="bookie-cookie", run=read_cookie, seeds=cookies),
)
