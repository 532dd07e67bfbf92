"""A bookie of several disks, one missing, foreign or corrupt at start: the others serve, and the loss is reported."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from unit.bookies.bookie_cluster import PAYLOADS, Cluster, eventually, run_cluster
from unit.bookies.disk.test_transient_errors import Rationed
from unit.bookies.hanging_disk import HangingFiles

from stratalog_bookies.disk.log_files import log_path
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import Range, Status
from stratalog_core.errors import Invalid
from stratalog_core.system import SystemFiles
from stratalog_metadata.records import Bookie, bookie_key


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with run_cluster(tmp_path) as made:
        yield made


async def start(cluster: Cluster, name: str, audit_delay_s: float = 0.3) -> None:
    directories = (str(cluster.path / name / "0"), str(cluster.path / name / "1"))
    await cluster.start_bookie(name, audit_delay_s=audit_delay_s, data_dirs=directories, log_file_bytes=256 * 1024)


def record(cluster: Cluster, name: str) -> Bookie:
    found = cluster.metadata.view.find(Bookie, bookie_key(name))
    assert found is not None
    return found


def _is_gone(path: Path) -> None:
    shutil.rmtree(path)


def _is_foreign(path: Path) -> None:
    cookie = path / "cookie"
    cookie.write_text(cookie.read_text().replace('"b0"', '"b7"'))


def _has_no_cookie(path: Path) -> None:
    (path / "cookie").unlink()


def _lost_its_state(path: Path) -> None:
    content = bytearray((path / "state").read_bytes())
    content[20] ^= 1
    (path / "state").write_bytes(content)


@pytest.mark.parametrize("lose", [_is_gone, _is_foreign, _has_no_cookie, _lost_its_state])
async def test_one_disk_that_cannot_be_used_leaves_the_others(cluster: Cluster, lose: Callable[[Path], None]) -> None:
    await start(cluster, "b0", audit_delay_s=0.0)
    ledgers = [await cluster.sealed(1, 1) for _ in range(4)]
    assert record(cluster, "b0").failed_disks == ()
    await cluster.stop_bookie("b0")
    lose(cluster.path / "b0" / "1")
    await start(cluster, "b0", audit_delay_s=0.0)
    assert (record(cluster, "b0").disks, record(cluster, "b0").failed_disks) == (2, (1,))
    assert not record(cluster, "b0").read_only
    requests = cluster.client._requests
    for ledger in ledgers:
        (answer,) = await requests.read("b0", [Range(ledger.ledger_id, 0, 1000)], 1 << 24)
        if ledger.ledger_id % 2:
            assert (answer.status, answer.decided_to, answer.entries) == (Status.STORAGE_FAILED, -1, []), "never absence"
            assert (await requests.fence("b0", ledger.ledger_id)).status == Status.STORAGE_FAILED
        else:
            assert [bytes(entry.payload) for entry in answer.entries] == PAYLOADS
    # The recovery reads of one turn are one request.
    answers = await asyncio.gather(*(requests.recovery_read("b0", Range(each.ledger_id, 0, 1000)) for each in ledgers))
    for ledger, answer in zip(ledgers, answers, strict=True):
        if ledger.ledger_id % 2:
            assert (answer.status, answer.decided_to, answer.entries) == (Status.STORAGE_FAILED, -1, []), "never absence"
        else:
            assert [bytes(entry.payload) for entry in answer.entries] == PAYLOADS
    channel = cluster.transport.channel(cluster.bookies["b0"][0].address)
    info = messages.decode(messages.BookieInfo, await channel.call(messages.INFO, (), 60.0))
    assert [disk.state for disk in info.disks] == ["writable", "failed"]
    assert info.disks[1].reason


@pytest.mark.parametrize("hangs", [lambda name: True, lambda name: name in ("datasync", "write_atomic")])
async def test_a_disk_that_hangs_at_the_start_leaves_the_others(cluster: Cluster, hangs: Callable[[str], bool]) -> None:
    """Also if it hangs only in writes: what the process before it has read may be in the page cache."""
    await start(cluster, "b0", audit_delay_s=0.0)
    ledgers = [await cluster.sealed(1, 1) for _ in range(2)]
    await cluster.stop_bookie("b0")
    directories = tuple(str(cluster.path / "b0" / name) for name in ("0", "1"))
    sound, hanging = SystemFiles(Path(directories[0])), HangingFiles(SystemFiles(Path(directories[1])), hangs)
    hanging.works.clear()
    try:
        async with asyncio.timeout(60):
            await cluster.start_bookie(
                "b0", audit_delay_s=0.0, disks=[sound, hanging], data_dirs=directories, log_file_bytes=256 * 1024,
                disk_stall_ms=1000,
            )  # fmt: skip
        assert (record(cluster, "b0").disks, record(cluster, "b0").failed_disks) == (2, (1,))
        (even,) = (ledger for ledger in ledgers if not ledger.ledger_id % 2)
        (answer,) = await cluster.client._requests.read("b0", [Range(even.ledger_id, 0, 1000)], 1 << 24)
        assert [bytes(entry.payload) for entry in answer.entries] == PAYLOADS
    finally:
        hanging.works.set()
    await cluster.stop_bookie("b0")
    await start(cluster, "b0", audit_delay_s=0.0)
    assert record(cluster, "b0").failed_disks == ()
    for ledger in ledgers:
        assert await cluster.read_back(ledger.ledger_id) == PAYLOADS


async def test_a_disk_that_hangs_right_after_its_recovery_leaves_the_others(cluster: Cluster) -> None:
    directories = tuple(str(cluster.path / "b0" / name) for name in ("0", "1"))

    calls: list[str] = []

    def hangs(name: str) -> bool:
        calls.append(name)
        if name == "free_bytes" and calls.count(name) == 1:  # Recovery does not look at it.
            hanging.works.clear()
        return True

    sound, hanging = SystemFiles(Path(directories[0])), HangingFiles(SystemFiles(Path(directories[1])), hangs)
    try:
        async with asyncio.timeout(30):
            await cluster.start_bookie(
                "b0", audit_delay_s=0.0, disks=[sound, hanging], data_dirs=directories, disk_stall_ms=1000
            )  # fmt: skip
        assert (record(cluster, "b0").disks, record(cluster, "b0").failed_disks) == (2, (1,))
        assert not record(cluster, "b0").read_only
    finally:
        hanging.works.set()
    await cluster.stop_bookie("b0")
    await start(cluster, "b0", audit_delay_s=0.0)
    assert record(cluster, "b0").failed_disks == ()


async def test_ledgers_of_a_full_disk_are_placed_on_other_bookies(cluster: Cluster) -> None:
    """No ledger begins there, is refused, and changes its ensemble."""
    directories = tuple(str(cluster.path / "b0" / name) for name in ("0", "1"))
    full = Rationed(SystemFiles(Path(directories[1])))
    full.free = 0
    disks: list[Any] = [SystemFiles(Path(directories[0])), full]
    await cluster.start_bookie("b0", audit_delay_s=0.0, disks=disks, data_dirs=directories)
    await cluster.start_bookie("b1", audit_delay_s=0.0)
    state = record(cluster, "b0")
    assert (state.read_only, state.failed_disks, state.full_disks) == (False, (), (1,))
    ledgers = [await cluster.sealed(1, 1) for _ in range(8)]
    assert {each.fragments[0].bookies for each in ledgers if each.ledger_id % 2} == {("b1",)}
    assert {bookie for each in ledgers for bookie in each.fragments[0].bookies} == {"b0", "b1"}
    assert all(len(each.fragments) == 1 for each in ledgers)
    full.free = None
    await eventually(lambda: record(cluster, "b0").full_disks == ())


class BrokenFiles:
    """A disk that fails when the log file after the first is made, as soon as it is recovered."""

    def __init__(self, files: SystemFiles) -> None:
        self._files = files

    def rename(self, source: str, target: str) -> None:
        if target == log_path(3):
            raise OSError(errno.EIO, "the disk is broken")
        self._files.rename(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


async def test_a_disk_that_fails_right_after_its_recovery_leaves_the_others(cluster: Cluster) -> None:
    directories = tuple(str(cluster.path / "b0" / name) for name in ("0", "1"))
    sound, broken = SystemFiles(Path(directories[0])), BrokenFiles(SystemFiles(Path(directories[1])))
    disks: list[Any] = [sound, broken]
    await cluster.start_bookie("b0", audit_delay_s=0.0, disks=disks, data_dirs=directories)
    await eventually(lambda: (record(cluster, "b0").disks, record(cluster, "b0").failed_disks) == (2, (1,)))
    assert not record(cluster, "b0").read_only


async def test_a_bookie_whose_only_disk_hangs_waits_for_it(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.start_bookie("b0")
    await cluster.stop_bookie("b0")
    hanging = HangingFiles(SystemFiles(cluster.path / "b0"))
    hanging.works.clear()
    starting = asyncio.ensure_future(cluster.start_bookie("b0", disks=[hanging], disk_stall_ms=100))
    await eventually(lambda: "the bookie waits for it" in caplog.text)
    hanging.works.set()
    await asyncio.wait_for(starting, 60)
    assert record(cluster, "b0").failed_disks == ()


async def test_without_a_sound_disk_it_does_not_start(cluster: Cluster) -> None:
    await start(cluster, "b0", audit_delay_s=0.0)
    await cluster.stop_bookie("b0")
    first, second, aside = (cluster.path / "b0" / name for name in ("0", "1", "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(Invalid, match="place in data_dirs 1, not 0"):
        await start(cluster, "b0")


async def test_what_a_failed_disk_held_is_made_anew_elsewhere(cluster: Cluster) -> None:
    for number in range(4):
        # Only b1 audits: while it is away nothing is restored, however long its start takes.
        await start(cluster, f"b{number}", audit_delay_s=0.3 if number == 1 else 0.0)
    ledgers = [await cluster.sealed() for _ in range(6)]
    await cluster.stop_bookie("b1")
    _is_gone(cluster.path / "b1" / "0")
    await start(cluster, "b1")
    hurt = [ledger.ledger_id for ledger in ledgers if ledger.ledger_id % 2 == 0 and "b1" in cluster.named(ledger.ledger_id)]
    others = {ledger.ledger_id: cluster.named(ledger.ledger_id) for ledger in ledgers if ledger.ledger_id not in hurt}
    await eventually(lambda: not any("b1" in cluster.named(ledger_id) for ledger_id in hurt))
    assert {ledger_id: cluster.named(ledger_id) for ledger_id in others} == others
    for ledger in ledgers:
        assert await cluster.missing(cluster.stored(ledger.ledger_id)) == 0
        assert await cluster.read_back(ledger.ledger_id) == PAYLOADS
    for _ in range(4):
        fresh = await cluster.sealed()
        assert fresh.ledger_id % 2 or "b1" not in cluster.named(fresh.ledger_id), "no new ledger on the failed disk"
