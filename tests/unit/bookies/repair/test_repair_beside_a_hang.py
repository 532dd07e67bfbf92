"""Corrupt entries are repaired while another disk of the bookie hangs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from unit.bookies.bookie_cluster import PAYLOADS, Cluster, eventually, run_cluster
from unit.bookies.hanging_disk import HangingFiles

from stratalog_bookies.disk.log_files import log_path
from stratalog_bookies.protocol.messages import EntryState, Range
from stratalog_core.system import SystemFiles


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        yield made


def flip_a_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes((byte ^ 1,)))


async def test_a_disk_that_hangs_does_not_keep_the_others_from_being_repaired(cluster: Cluster) -> None:
    directories = tuple(str(cluster.path / "b0" / name) for name in ("0", "1"))
    hanging, sound = HangingFiles(SystemFiles(Path(directories[0]))), SystemFiles(Path(directories[1]))
    await cluster.start_bookie(
        "b0", audit_delay_s=0.0, disks=[hanging, sound], data_dirs=directories, log_file_bytes=128 * 1024
    )
    for name in ("b1", "b2"):
        await cluster.start_bookie(name, audit_delay_s=0.0)
    ledgers = [await cluster.sealed() for _ in range(16)]
    odd = max(ledger.ledger_id for ledger in ledgers if ledger.ledger_id % 2)
    first, second = cluster.bookies["b0"][0]._disks
    await eventually(lambda: any(file.closed for file in first.core.contents.files.values()))
    closed = next(file.generation for file in first.core.contents.files.values() if file.closed)
    hanging.works.clear()
    try:
        first.corruption.files[closed] = "planted"
        first.on_corruption()
        await eventually(lambda: first.background.oldest is not None)
        run, row = next((run, row) for run in second.core.contents.ledgers[odd].runs if (row := run.find(5)))
        flip_a_byte(Path(directories[1]) / log_path(run.generation), row.position)
        (answer,) = await cluster.client._requests.read("b0", [Range(odd, 0, 1000)], 1 << 24)
        assert [entry.entry_id for entry in answer.entries if entry.state == EntryState.UNREADABLE] == [5]
        await eventually(lambda: second.corruption.repaired == 1)
        (answer,) = await cluster.client._requests.read("b0", [Range(odd, 0, 1000)], 1 << 24)
        assert [bytes(entry.payload) for entry in answer.entries] == PAYLOADS
    finally:
        hanging.works.set()
