"""Heads of entries, which a takeover reads without payloads, are checked: a corrupt head is never returned as intact."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from simulation.world.disk import Disk as SimulatedDisk
from unit.bookies.bookie_cluster import ENTRIES, PAYLOADS, Cluster, run_cluster
from unit.bookies.plain_disk import PlainDisk

from stratalog_bookies.disk.core.index import SMALL_BYTES_MAX
from stratalog_bookies.disk.core.lookup import Place
from stratalog_bookies.disk.log_files import log_path
from stratalog_bookies.disk.reads import read_places
from stratalog_bookies.protocol.messages import HEAD_BYTES_MAX
from stratalog_core.errors import Unavailable

FILE_BYTES = 32 * 1024
SIZES = (1, 60, 61, 62, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as cluster:
        for name in ("b0", "b1", "b2"):
            await cluster.start_bookie(name)
        yield cluster


def _rows(disk: PlainDisk) -> list[Place]:
    """Every entry of ledger 1, by entry id."""
    places = []
    for run in disk.contents.ledgers[1].runs:
        places += [Place(1, run.generation, row) for row in run.between(0, len(SIZES))]
    return sorted(places, key=lambda place: place.row.entry_id)


def _written() -> tuple[SimulatedDisk, PlainDisk, dict[int, bytes]]:
    """A disk with an entry of each size in ledger 1, all proved durable, and their payloads."""
    payloads = {entry: Random(size).randbytes(size) for entry, size in enumerate(SIZES)}
    simulated = SimulatedDisk("disk", Random(1))
    disk = PlainDisk(simulated.mount(), file_bytes=FILE_BYTES)
    disk.add(*((1, entry, payload) for entry, payload in payloads.items()))
    disk.commit()
    disk.core.prove_tail()
    disk.commit()
    return simulated, disk, payloads


def _check_every_byte(simulated: SimulatedDisk, disk: PlainDisk, payloads: dict[int, bytes]) -> None:
    for place in _rows(disk):
        payload = payloads[place.row.entry_id]
        # Bytes after the head of a large payload are not checked.
        head_end = len(payload) if len(payload) <= SMALL_BYTES_MAX else HEAD_BYTES_MAX
        for at in [*range(min(len(payload), HEAD_BYTES_MAX + 2)), len(payload) - 1]:
            simulated.flip_bit(log_path(place.generation), place.row.position + at, 3)
            is_checked = at < head_end
            assert read_places(disk.store, [place], HEAD_BYTES_MAX) == [None if is_checked else payload[:HEAD_BYTES_MAX]]
            assert read_places(disk.store, [place], 5) == [None if is_checked else payload[:5]], "also of a part of it"
            assert read_places(disk.store, [place], 0) == [b""], "a size needs no payload"
            simulated.flip_bit(log_path(place.generation), place.row.position + at, 3)
        assert read_places(disk.store, [place], HEAD_BYTES_MAX) == [payload[:HEAD_BYTES_MAX]]


def test_a_flipped_bit_in_a_head_is_unreadable_at_every_byte() -> None:
    """As written; after a restart, which reads the log again; and with rows from an index file."""
    simulated, disk, payloads = _written()
    _check_every_byte(simulated, disk, payloads)
    disk = PlainDisk(simulated.mount(), file_bytes=FILE_BYTES)
    _check_every_byte(simulated, disk, payloads)
    disk = PlainDisk(simulated.mount(), file_bytes=FILE_BYTES)
    disk.read(1)
    _check_every_byte(simulated, disk, payloads)


def test_rot_that_a_restart_finds_does_not_become_the_head_s_checksum() -> None:
    simulated, disk, payloads = _written()
    rotten = _rows(disk)[-1]
    simulated.flip_bit(log_path(rotten.generation), rotten.row.position, 0)
    disk = PlainDisk(simulated.mount(), file_bytes=FILE_BYTES)
    *sound, again = _rows(disk)
    assert read_places(disk.store, [again], HEAD_BYTES_MAX) == [None]
    heads = [payloads[place.row.entry_id][:HEAD_BYTES_MAX] for place in sound]
    assert read_places(disk.store, sound, HEAD_BYTES_MAX) == heads


async def test_a_takeover_s_heads_come_from_a_sound_copy_or_not_at_all(cluster: Cluster) -> None:
    ledger = await cluster.sealed()
    heads = [payload[:HEAD_BYTES_MAX] for payload in PAYLOADS]
    for name in ("b0", "b1"):
        _rot_a_head(cluster, name, ledger.ledger_id)
    for _ in range(5):
        assert [each.head for each in await cluster.client.read_headers(ledger, 0, ENTRIES - 1)] == heads


async def test_heads_that_rotted_everywhere_are_unreadable_and_not_absent(cluster: Cluster) -> None:
    ledger = await cluster.sealed()
    for name in ("b0", "b1", "b2"):
        _rot_a_head(cluster, name, ledger.ledger_id)
    with pytest.raises(Unavailable, match=r"(?i)unreadable"):
        await cluster.client.read_headers(ledger, 0, ENTRIES - 1)


def _rot_a_head(cluster: Cluster, name: str, ledger_id: int) -> None:
    (run,) = cluster.bookies[name][0]._disks[0].core.contents.ledgers[ledger_id].runs
    row = run.find(ENTRIES // 2)
    assert row is not None
    path = cluster.path / name / log_path(run.generation)
    with path.open("r+b") as file:
        file.seek(row.position + 3)
        (byte,) = file.read(1)
        file.seek(row.position + 3)
        file.write(bytes([byte ^ 1]))
