"""Bytes of the bookie's wire messages and stored formats, as version 1 writes them; they must be readable for ever.

``bookie.txt`` holds one ``name: hexadecimal`` a line. To add a case, run with ``STRATALOG_GOLDEN=write``; a changed old
line is a format change and needs a new version.
"""

from __future__ import annotations

import os
from pathlib import Path

from stratalog_bookies.disk.core import checkpoint, log_format
from stratalog_bookies.disk.core.checkpoint import ClosedFile, LedgerState, State
from stratalog_bookies.disk.core.cookie import DiskCookie, decode_cookie, disk_key, encode_cookie
from stratalog_bookies.disk.core.index import ROW, Run
from stratalog_bookies.disk.core.log import Log
from stratalog_bookies.disk.core.log_format import ControlItem
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Range, Status

GOLDEN = Path(__file__).with_name("bookie.txt")
KEY = bytes(range(16))
HEADERS = [messages.pack_entry(7, 0, -1, (b"zero",)), messages.pack_entry(2**40, 2**33, 2**33 - 1, (b"",), 1)]


def cases() -> dict[str, bytes]:
    read_answer = messages.encode_read_answer([(0, 5, 1), (2, 9, 0), (0, 0, 1)], HEADERS, [b"zero"])
    return {
        "add": b"".join(messages.encode_add(HEADERS, [b"zero", b""])),
        "statuses": messages.encode_statuses(list(Status)),
        "read": b"".join(messages.encode_read([Range(7, 0, 5), Range(9, 2, 2**62)], 65_536, messages.FENCE_FIRST)),
        "read_headers": b"".join(messages.encode_read_headers([Range(7, 0, 5)], 61, 1000)),
        "read_answer": b"".join(read_answer),
        "ledger_ids": messages.encode(messages.LedgerIds(ledger_ids=(1, 2**40))),
        "ledger_tails": messages.encode(
            messages.LedgerTails(
                ledgers=(
                    messages.LedgerTail(ledger_id=1, last_entry=5, lac=4, fenced=True),
                    messages.LedgerTail(ledger_id=2, status=2),
                )
            )
        ),
        "explicit_lacs": messages.encode(messages.ExplicitLacs(lacs=((1, 5), (2, -1)))),
        "list_ledgers": messages.encode(messages.ListLedgers(after=3, limit=2)),
        "ledger_page": messages.encode(
            messages.LedgerPage(
                ledgers=(messages.LedgerSummary(ledger_id=4, entries=2, payload_bytes=9, last_entry=1),), more=True
            )
        ),
        "await_lac": messages.encode(messages.AwaitLac(ledger_id=2**40, above=2**33, max_wait_ms=60_000)),
        "ledger_tail": messages.encode(messages.LedgerTail(ledger_id=2**40, last_entry=2**33 + 2, lac=2**33 + 1, fenced=True)),
        "scrub": messages.encode(messages.ScrubDisks(start=True)),
        "scrub_asked": messages.encode(messages.ScrubDisks()),
        "scrub_status": messages.encode(messages.ScrubStatus(disks=(disk_scrub(), messages.DiskScrub(position=1)))),
        "scrub_status_unchecked": messages.encode(
            messages.ScrubStatus(disks=(messages.DiskScrub(position=1, number=2, unchecked="log file 7"),))
        ),
        "bookie_info": messages.encode(
            messages.BookieInfo(
                bookie_id="b1",
                read_only=False,
                free_bytes=5,
                disks=(messages.DiskInfo(position=0, state="writable", log_files=1),),
                counters={"add_requests": 3},
            )
        ),
        "log_file_header": log_format.pack_file_header(KEY, 17, 65_536).rstrip(b"\0"),
        "log_groups": log_groups(),
        "index": checkpoint.encode_index(17, [run()]),
        "state": checkpoint.encode_state(state()),
        "cookie": encode_cookie(cookie()),
        "disk_key": disk_key("ab" * 16, 1),
    }


def disk_scrub() -> messages.DiskScrub:
    """Every field with a value of its own."""
    return messages.DiskScrub(
        position=2,
        number=3,
        running=True,
        total_bytes=2**40,
        checked_bytes=2**33,
        checked_entries=7,
        damaged_entries=6,
        healed_entries=5,
        waiting_entries=4,
        untried_entries=1,
        broken_files=8,
        repaired_files=9,
        examples=("entry 5 of ledger 7",),
    )


def log_groups() -> bytes:
    """Two groups of a file: its start with two entries; fences, tombstones and LACs."""
    log = Log(KEY, 17, 65_536)
    log.append(log_format.ENTRIES, 2, b"".join(HEADERS), (b"zero", b""), 4)
    first = log.take()
    assert first is not None
    log.written(first.sequence)
    log.append_control(
        (
            ControlItem(log_format.FENCE, 7, 0),
            ControlItem(log_format.TOMBSTONE, 8, 0),
            ControlItem(log_format.EXPLICIT_LAC, 9, 5),
        )
    )
    second = log.take()
    assert second is not None
    whole = b"".join(first.buffers).ljust(second.position - first.position, b"\0")
    return (whole[: second.position - first.position] + b"".join(second.buffers)).rstrip(b"\0")


def run() -> Run:
    made = Run(7, 17)
    for entry_id in (0, 1, 5):
        made.add(entry_id, ROW.pack(entry_id, 4096 + entry_id, 10, 0xDEADBEEF, entry_id - 1, 0xCAFEF00D))
        made.payload_bytes += 10
    return made


def state() -> State:
    return State(
        next_generation=18,
        closed=(ClosedFile(generation=3, end=9000), ClosedFile(generation=17, end=65_536)),
        ledgers=checkpoint.pack_ledgers([LedgerState(ledger_id=7, lac=4, last_entry=5, fenced=True)]),
        tombstones=checkpoint.pack_tombstones([8]),
        greatest_ledger_id=9,
    )


def cookie() -> DiskCookie:
    return DiskCookie(format_version=1, cluster_id="MkU3OEVBNTcwNTJENDM2Qg", bookie_id="b1", cookie="ab" * 16, disk=1, disks=2)


def golden() -> dict[str, bytes]:
    lines = [line.split(": ") for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: bytes.fromhex(content) for name, content in lines}


def test_bytes_are_what_they_were() -> None:
    if os.environ.get("STRATALOG_GOLDEN") == "write":
        GOLDEN.write_text("".join(f"{name}: {content.hex()}\n" for name, content in cases().items()))
    assert {name: content.hex() for name, content in cases().items()} == {
        name: content.hex() for name, content in golden().items()
    }


def test_stored_formats_are_read_back() -> None:
    stored = golden()
    content = memoryview(bytes(log_format.FIRST_FRAME) + stored["log_groups"] + bytes(4096))
    scan = log_format.scan(bytes(content), log_format.frame_seed(KEY, 17))
    assert [frame.kind for frame in scan.frames] == [log_format.CONTROL, log_format.ENTRIES, log_format.CONTROL]
    assert [header[:4] for header in log_format.entries_of(content, scan.frames[1])] == [
        (7, 0, -1, 4),
        (2**40, 2**33, 2**33 - 1, 0),
    ]
    assert [item.kind for item in log_format.items_of(content, scan.frames[2])] == [1, 2, 3]
    log_format.check_file_header(stored["log_file_header"].ljust(4096, b"\0"), KEY, 17)
    assert checkpoint.decode_state(stored["state"]) == state()
    assert decode_cookie(stored["cookie"], "/d") == cookie()
    header = stored["index"][: checkpoint.INDEX_HEADER_BYTES]
    table_bytes = checkpoint.index_table_bytes(header, 17)
    (read,) = checkpoint.decode_index_table(header, stored["index"][len(header) : len(header) + table_bytes], 17)
    assert checkpoint.check_rows(read, stored["index"][read.stored_at :]) == run().rows


def test_messages_are_read_back() -> None:
    sent = {name: memoryview(content) for name, content in golden().items()}
    assert [header[:4] for header in messages.decode_add(sent["add"])] == [(7, 0, -1, 4), (2**40, 2**33, 2**33 - 1, 0)]
    assert messages.decode_read(sent["read"]) == ([Range(7, 0, 5), Range(9, 2, 2**62)], 65_536, messages.FENCE_FIRST)
    first, second, third = messages.decode_read_answer(sent["read_answer"])
    assert (bytes(first.entries[0].payload), second.status, third.entries[0].entry_id) == (
        b"zero",
        Status.NO_SUCH_LEDGER,
        2**33,
    )
    assert list(messages.decode_statuses(sent["statuses"])) == list(Status)
    assert messages.decode(messages.LedgerTails, sent["ledger_tails"]).ledgers[0].fenced
    assert messages.decode(messages.AwaitLac, sent["await_lac"]) == messages.AwaitLac(
        ledger_id=2**40, above=2**33, max_wait_ms=60_000
    )
    tail = messages.decode(messages.LedgerTail, sent["ledger_tail"])
    assert (tail.ledger_id, tail.last_entry, tail.lac, tail.fenced) == (2**40, 2**33 + 2, 2**33 + 1, True)
    assert messages.decode(messages.ScrubDisks, sent["scrub"]).start
    assert not messages.decode(messages.ScrubDisks, sent["scrub_asked"]).start
    assert messages.decode(messages.ScrubStatus, sent["scrub_status"]).disks == (disk_scrub(), messages.DiskScrub(position=1))
    assert messages.decode(messages.BookieInfo, sent["bookie_info"]).counters == {"add_requests": 3}


def test_method_numbers_are_permanent() -> None:
    methods = {name: number for name, number in vars(messages).items() if name.isupper() and number in range(0x0201, 0x0300)}
    assert methods == {
        "ADD": 0x0201,
        "READ": 0x0202,
        "READ_HEADERS": 0x0203,
        "FENCE": 0x0204,
        "LAC": 0x0205,
        "WRITE_LAC": 0x0206,
        "DELETE": 0x0207,
        "LIST": 0x0208,
        "INFO": 0x0209,
        "SCRUB": 0x020A,
        "AWAIT_LAC": 0x020B,
    }
