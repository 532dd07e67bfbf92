"""Flipped bits: every one in a used byte is found; it is repaired from another replica, or the start is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import msgspec
import pytest
from simulation.world.disk import Content
from simulation.world.disk import Disk as SimulatedDisk
from unit.bookies.bookie_cluster import ENTRIES, PAYLOADS, Cluster, eventually, run_cluster
from unit.bookies.plain_disk import KEY, PlainDisk

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.checkpoint import INDEX_HEADER_BYTES
from stratalog_bookies.disk.core.corruption import KnownCorruption
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles, index_path, log_path
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, Range, ScrubDisks, ScrubStatus, Status
from stratalog_bookies.repair import entry_repair
from stratalog_bookies.repair.core.log_check import check_piece
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Request
from stratalog_metadata.records import Bookie, Ledger, bookie_key
from stratalog_metadata.state.commands import Command, Put

ENTRIES_OF_1 = {entry: bytes([65 + entry]) * (20 + entry) for entry in range(6)}
ENTRIES_OF_2 = {entry: bytes([97 + entry]) * 30 for entry in range(3)}


def _stopped_disk() -> SimulatedDisk:
    """Two ledgers over a closed file and the open one, a fence, a tombstone; stopped cleanly."""
    simulated = SimulatedDisk("disk", Random(1))
    first = PlainDisk(simulated.mount(), file_bytes=16 * 1024)
    first.add(*((1, entry, payload) for entry, payload in list(ENTRIES_OF_1.items())[:3]))
    first.commit()
    disk = PlainDisk(simulated.mount(), file_bytes=16 * 1024)
    disk.add((3, 0, b"to be deleted"))
    disk.add(*((1, entry, payload) for entry, payload in list(ENTRIES_OF_1.items())[3:]))
    disk.commit()
    disk.add(*((2, entry, payload) for entry, payload in ENTRIES_OF_2.items()))
    disk.commit()
    disk.delete(3)
    disk.fence(2)
    disk.commit()
    disk.core.prove_tail()
    disk.commit()
    return simulated


def _load_again(disk: PlainDisk, ledger_id: int) -> dict[int, bytes | None]:
    """Return what reads find. As in the running bookie, a corrupt index is rebuilt."""
    try:
        return disk.read(ledger_id)
    except Corrupt:
        for file in disk.contents.files.values():
            if file.closed:
                rebuilt = recovery.make_index(disk.store, file.generation, file.end)
                for run in file.runs.values():
                    run.stored_at, run.stored_crc = rebuilt[run.ledger_id].stored_at, rebuilt[run.ledger_id].stored_crc
        return disk.read(ledger_id)


def test_a_bit_flipped_in_a_stopped_bookie_is_refused_or_unreadable_and_never_absence() -> None:
    stopped = _stopped_disk().content
    names = [name for name in stopped if not name.endswith(".spare")]
    outcomes = {"refused": 0, "unreadable": 0, "whole": 0}
    for name in sorted(names):
        used = len(stopped[name].now.rstrip(b"\0"))
        for position in range(used):
            if any(stopped[name].now[position : position + 16]):
                simulated = _copied(stopped)
                simulated.flip_bit(name, position, position % 8)
                outcomes[_outcome(simulated)] += 1
    assert all(outcomes.values()), outcomes


def _copied(content: Mapping[str, Content]) -> SimulatedDisk:
    copied = SimulatedDisk("disk", Random(1))
    for name, each in content.items():
        copied.content[name] = Content(bytearray(each.now), bytearray(each.durable))
    copied.sync_names(".")
    return copied


def _outcome(simulated: SimulatedDisk) -> str:
    try:
        disk = PlainDisk(simulated.mount(), file_bytes=16 * 1024, index_bytes_max=0)
        found = {ledger_id: _load_again(disk, ledger_id) for ledger_id in (1, 2)}
    except Corrupt:
        return "refused"
    assert set(found[1]) == set(ENTRIES_OF_1), "no entry is absent"
    assert set(found[2]) == set(ENTRIES_OF_2)
    wrong = [piece for ledger_id, entries in ((1, ENTRIES_OF_1), (2, ENTRIES_OF_2))
             for entry, piece in found[ledger_id].items() if piece not in (None, entries[entry])]  # fmt: skip
    assert not wrong, "no other content is given"
    assert disk.contents.ledgers[2].fenced
    assert 3 in disk.contents.tombstones
    return "unreadable" if None in [*found[1].values(), *found[2].values()] else "whole"


def test_every_bit_of_a_log_file_is_checked() -> None:
    simulated = _stopped_disk()
    store = LogFiles(simulated.mount(), KEY, 16 * 1024)
    generation = store.generations()[-2]
    content = store.read_log(generation)
    scan = log_format.scan(content, store.seed(generation))
    meaningful = [
        position for frame in scan.frames for position in range(frame.position, frame.payload_end)
    ]  # fmt: skip
    assert len(meaningful) > 400
    for position in meaningful:
        for bit in range(8):
            corrupt = bytearray(content[log_format.FIRST_FRAME : scan.end])
            corrupt[position - log_format.FIRST_FRAME] ^= 1 << bit
            checked = check_piece(memoryview(corrupt), log_format.FIRST_FRAME, store.seed(generation))
            if checked.end < scan.end and not checked.corrupt:
                rest = memoryview(corrupt)[checked.end - log_format.FIRST_FRAME :]
                checked = check_piece(rest, checked.end, store.seed(generation))
            assert checked.broken or checked.corrupt, f"bit {bit} of byte {position}"
    whole = check_piece(memoryview(content)[log_format.FIRST_FRAME : scan.end], log_format.FIRST_FRAME, store.seed(generation))
    assert (whole.end, whole.broken, whole.corrupt) == (scan.end, False, [])
    assert whole.entries == 1 + 3 + len(ENTRIES_OF_2)


@pytest.mark.parametrize("cut", [40, 100, 333])
def test_a_piece_that_ends_inside_a_frame_is_not_damage(cut: int) -> None:
    simulated = _stopped_disk()
    store = LogFiles(simulated.mount(), KEY, 16 * 1024)
    generation = store.generations()[-2]
    content = memoryview(store.read_log(generation))
    end = log_format.scan(bytes(content), store.seed(generation)).end
    position, entries = log_format.FIRST_FRAME, 0
    while position < end:
        claimed = log_format.claimed_bytes(content[position:end], 0)
        piece = content[position : min(end, position + max(cut, claimed))]
        checked = check_piece(piece, position, store.seed(generation))
        assert not checked.broken
        assert not checked.corrupt
        position, entries = checked.end, entries + checked.entries
    assert (position, entries) == (end, 1 + 3 + len(ENTRIES_OF_2))


def test_the_tail_of_an_idle_log_is_proved() -> None:
    """Without the proof, a corrupt last group is cut off as torn; with it the start is refused."""
    for proved in (False, True):
        simulated = SimulatedDisk("disk", Random(1))
        disk = PlainDisk(simulated.mount(), file_bytes=16 * 1024)
        disk.add((1, 0, b"zero"))
        disk.commit()
        if proved:
            disk.core.prove_tail()
            disk.commit()
        path = log_path(disk.core.log.generation)
        simulated.flip_bit(path, simulated.content[path].now.index(b"zero") - 40, 3)
        if proved:
            with pytest.raises(Corrupt, match="no intact frame"):
                PlainDisk(simulated.mount(), file_bytes=16 * 1024)
        else:
            assert PlainDisk(simulated.mount(), file_bytes=16 * 1024).read(1) == {}


def test_damage_is_bounded_and_tried_again_later() -> None:
    corruption = KnownCorruption()
    assert corruption.add(1, 0, 7)
    assert not corruption.add(1, 0, 7)
    (entry,) = corruption.due(0.0)
    entry.postpone(0.0, "nobody has it")
    assert corruption.due(0.5) == []
    assert [each.entry_id for each in corruption.due(1.0)] == [0]
    assert list(corruption.examples(5)) == ["entry 0 of ledger 1: nobody has it"]
    for number in range(20_000):
        corruption.add(2, number, 7)
    assert len(corruption) == 10_000
    corruption.remove(entry)
    assert len(corruption) == 9_999


# -- mending, in a cluster


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(entry_repair, "_RETRY_S", 0.02)
    async with run_cluster(tmp_path) as made:
        for number in range(3):
            await start(made, f"b{number}")
        yield made


BASE_OFFSET_LAST_BYTE = 7


async def start(cluster: Cluster, name: str, scrub_bytes_per_s: int = 1 << 40) -> None:
    await cluster.start_bookie(
        name, log_file_bytes=128 * 1024, scrub_bytes_per_s=scrub_bytes_per_s, scrub_interval_s=1000.0,
        compaction_bytes_per_s=1 << 40, index_bytes_max=0, audit_delay_s=0.0,
    )  # fmt: skip


def disk_of(cluster: Cluster, name: str) -> Disk:
    return cluster.bookies[name][0]._disks[0]


async def scrub(cluster: Cluster, name: str, *, whole: bool = True) -> messages.DiskScrub:
    """Start a scrub and wait for its end and, if asked, until no corruption is left."""
    channel = cluster.transport.channel(cluster.bookies[name][0].address)
    request = ScrubDisks(start=True)
    while True:
        answer = await channel.call(messages.SCRUB, [messages.encode(request)], 60.0)
        (status,) = messages.decode(ScrubStatus, answer).disks
        if (
            not status.running
            and not status.untried_entries
            and not (whole and (status.waiting_entries or status.broken_files))
        ):
            return status
        request = ScrubDisks()
        await asyncio.sleep(0.01)


WAIT_S = 60.0


async def held(cluster: Cluster, name: str, ledger: Ledger) -> list[bytes | None]:
    """The entries of a ledger on one bookie; None for those that it cannot read."""
    found: list[bytes | None] = []
    while len(found) <= ledger.last_entry:
        asked = Range(ledger.ledger_id, len(found), ledger.last_entry)
        (answer,) = await cluster.client._requests.read(name, [asked], 1 << 24)
        assert answer.status is Status.OK
        assert [entry.entry_id for entry in answer.entries] == list(range(len(found), answer.decided_to + 1))
        found += [bytes(each.payload) if each.state == EntryState.PRESENT else None for each in answer.entries]
    return found


def flip(path: Path, position: int, bit: int = 3) -> None:
    descriptor = os.open(path, os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, position)
    os.pwrite(descriptor, bytes((byte ^ 1 << bit,)), position)
    os.close(descriptor)


def _frames(path: Path, generation: int, store: LogFiles) -> Iterator[tuple[memoryview, log_format.Frame]]:
    content = path.read_bytes()
    for frame in log_format.scan(content, store.seed(generation)).frames:
        yield memoryview(content), frame


def _place(disk: Disk, directory: Path, what: str) -> tuple[Path, int]:
    """A byte of this kind: ``closed …`` in a log file that has its checkpoint, ``open …`` in the open one."""
    where, _, field = what.partition(" ")
    if where == "state":
        return directory / "state", 30
    if where == "cookie":
        return directory / "cookie", 60
    files = disk.core.contents.files
    generation = min(files) if where in ("closed", "index") else disk.core.log.generation
    path = directory / (index_path(generation) if where == "index" else log_path(generation))
    if where == "index":
        return path, {"header": 9, "table": INDEX_HEADER_BYTES + 3, "rows": path.stat().st_size - 5}[field]
    if field == "file header":
        return path, 17
    frames = list(_frames(path, generation, disk.store))
    if field == "fence":
        return path, next(frame.head_start + 8 for content, frame in frames if frame.kind == log_format.CONTROL
                          and any(item.kind == log_format.FENCE for item in log_format.items_of(content, frame)))  # fmt: skip
    frame = next(frame for _, frame in frames if frame.kind == log_format.ENTRIES)
    starts = {"group start": frame.position + 22, "entry header": frame.head_start + 12, "payload": frame.payload_start + 99}
    return path, starts[field]


PLACES = [
    "closed payload", "open payload", "closed entry header", "open entry header", "closed group start", "open group start",
    "closed file header", "open fence", "index header", "index table", "index rows", "state", "cookie",
]  # fmt: skip


async def test_the_scrub_mends_every_kind_of_damage(cluster: Cluster) -> None:
    ledgers = [await cluster.sealed() for _ in range(6)]
    directory = cluster.path / "b1"
    await eventually(lambda: any(file.closed for file in disk_of(cluster, "b1").core.contents.files.values()))
    for what in PLACES:
        writer = await cluster.write(entries=2)
        await eventually(lambda w=writer: w.unconfirmed_bytes == 0)  # type: ignore[misc]
        (recovered,) = await cluster.client.recover([writer.ledger.ledger_id])
        ledgers.append(recovered)
        path, position = _place(disk_of(cluster, "b1"), directory, what)
        flip(path, position)
        status = await scrub(cluster, "b1")
        counters = disk_of(cluster, "b1").counters
        assert status.damaged_entries + status.repaired_files + counters.scrub_errors > 0 or what == "state", what
        for ledger in ledgers:
            assert await held(cluster, "b1", ledger) == PAYLOADS[: ledger.last_entry + 1], what
    assert disk_of(cluster, "b1").counters.repaired_files >= 5
    await cluster.stop_bookie("b1")
    await start(cluster, "b1")
    contents = disk_of(cluster, "b1").core.contents
    for ledger in ledgers:
        assert await held(cluster, "b1", ledger) == PAYLOADS[: ledger.last_entry + 1]
    assert all(contents.ledgers[ledger.ledger_id].fenced for ledger in ledgers[6:])
    status = await scrub(cluster, "b1")
    assert (status.damaged_entries, status.repaired_files, status.broken_files) == (0, 0, 0)
    assert status.checked_bytes == status.total_bytes > 0


async def test_a_read_mends_what_it_finds_damaged(cluster: Cluster) -> None:
    ledger = await cluster.sealed()
    path, position = _place(disk_of(cluster, "b0"), cluster.path / "b0", "open payload")
    flip(path, position)
    assert (await held(cluster, "b0", ledger)).count(None) == 1
    await eventually(lambda: disk_of(cluster, "b0").counters.repaired_entries == 1)
    await eventually(lambda: len(disk_of(cluster, "b0").corruption) == 0)
    assert await held(cluster, "b0", ledger) == PAYLOADS
    await cluster.stop_bookie("b0")
    await start(cluster, "b0")
    assert await held(cluster, "b0", ledger) == PAYLOADS


async def test_damage_without_a_good_copy_is_told_and_mended_when_one_is_back(cluster: Cluster) -> None:
    ledger = await cluster.sealed()
    for name in ("b1", "b2"):
        await cluster.stop_bookie(name)
    path, position = _place(disk_of(cluster, "b0"), cluster.path / "b0", "open payload")
    flip(path, position)
    status = await scrub(cluster, "b0", whole=False)
    assert (status.damaged_entries, status.healed_entries, status.waiting_entries) == (1, 0, 1)
    assert "of ledger" in status.examples[0]
    assert disk_of(cluster, "b0").info().damaged_entries == 1
    found = await held(cluster, "b0", ledger)
    assert (len(found), found.count(None)) == (ENTRIES, 1)
    await start(cluster, "b1")
    status = await scrub(cluster, "b0")
    assert status.waiting_entries == 0
    assert await held(cluster, "b0", ledger) == PAYLOADS


async def test_a_copy_of_another_entry_is_never_taken(cluster: Cluster) -> None:
    """A replica with another payload under the same id: it repairs nothing, and nothing becomes absent."""
    ledger = await cluster.sealed(entries=1)
    row = disk_of(cluster, "b0").core.contents.ledgers[ledger.ledger_id].runs[0]
    forged = messages.pack_entry(ledger.ledger_id, 0, -1, (b"forged",))
    for name in ("b1", "b2"):
        await cluster.stop_bookie(name)
    answering = await _serve_forged(cluster, forged)
    path, position = _place(disk_of(cluster, "b0"), cluster.path / "b0", "open payload")
    flip(path, position)
    status = await scrub(cluster, "b0", whole=False)
    assert status.waiting_entries == 1
    assert "differs from the one that this bookie acknowledged" in status.examples[0]
    assert await held(cluster, "b0", ledger) == [None]
    assert row.count == 1
    await answering()


async def test_rot_in_the_last_batchs_header_does_not_move_a_recovered_ledgers_end(cluster: Cluster) -> None:
    """A head that is read without its payload has no checksum: the end offset, which is permanent, must not depend on it."""
    writer = await cluster.write()
    await eventually(lambda: all_confirmed(cluster, writer.ledger.ledger_id))
    await cluster.sealed()  # so that the page of the last entry is not written again
    for name in ("b0", "b1"):
        disk = disk_of(cluster, name)
        run = disk.core.contents.ledgers[writer.ledger.ledger_id].runs[-1]
        row = run.find(ENTRIES - 1)
        assert row is not None
        flip(cluster.path / name / log_path(run.generation), row.position + BASE_OFFSET_LAST_BYTE)
    cluster.client._directory._last_resort = frozenset({"b2"})
    (recovered,) = await cluster.client.recover([writer.ledger.ledger_id])
    assert (recovered.last_entry, recovered.end_offset) == (ENTRIES - 1, ENTRIES)
    assert recovered.payload_bytes == sum(map(len, PAYLOADS))


def all_confirmed(cluster: Cluster, ledger_id: int) -> bool:
    """Whether every bookie knows that everything is confirmed, so that recovery has nothing to read again."""
    tails = [disk_of(cluster, name).core.tails([ledger_id])[0] for name in cluster.bookies]
    return all(tail.lac == tail.last_entry == ENTRIES - 1 for tail in tails)


async def _serve_forged(cluster: Cluster, header: bytes) -> Callable[[], Awaitable[None]]:
    """Replaces b1: answers every read with an entry of its own."""

    def answer(request: Request) -> None:
        request.reply(*messages.encode_read_answer([(0, 0, 1)], [header[:-1] + b"\0"], [b"forged"]))

    listener = await (await cluster.transport.bind("127.0.0.1:0")).listen(answer)
    record = cluster.metadata.view.find(Bookie, bookie_key("b1"))
    assert record is not None
    session_id = await cluster.metadata.open_session("b1", 30_000, lambda: None)
    changed = msgspec.structs.replace(record, address=listener.address, session_id=session_id)
    await cluster.metadata.propose(Command(updates=(Put(record=changed),)))
    return listener.close
