"""What the collector of a bookie deletes while metadata or a disk changes under it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from unit.bookies.node.test_server import IDS_GIVEN, AbsentMetadata, Place, place

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.metrics import Counters
from stratalog_bookies.node import boot
from stratalog_bookies.node.collector import Collector
from stratalog_bookies.node.registration import Registration
from stratalog_bookies.protocol.messages import Status
from stratalog_core.system import SystemFiles, ThreadBackground
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import LEDGER_IDS, Counter, Versioned, counter_key, ledger_key

_ = place
COOKIE = "ab" * 16


@asynccontextmanager
async def opened_disks(place: Place, count: int) -> AsyncIterator[list[Disk]]:
    background = ThreadBackground(8, "bookie")
    disks = []
    for position in range(count):
        files = SystemFiles(place.directory / f"disk{position}")
        recovery.create(LogFiles(files, disk_key(COOKIE, position), place.settings.log_file_bytes))
        store, core = boot.recover_disk(files, COOKIE, position, place.settings)
        disks.append(Disk(position, core, store, place.settings, background, Counters(), lambda: None))
    for disk in disks:
        await disk.files.prepare()
        disk.files.start()
    yield disks
    for disk in disks:
        await disk.close()
    background.close()


async def cluster_id(place: Place) -> str:
    return await Registration(place.settings, place.quorum.client).cluster_id()


class RestoredMetadata(AbsentMetadata):
    """Metadata that is restored from an old copy, without the record of a ledger, while a bookie reads the records."""

    def __init__(self, client: MetadataClient, lost: int) -> None:
        super().__init__(client)
        self._lost = lost
        self._is_restored = False

    async def read(self, keys: Sequence[str]) -> list[Versioned | None]:
        found = await super().read(keys)
        if self._is_restored and counter_key(LEDGER_IDS) in keys:
            counter = Counter(name=LEDGER_IDS, next_value=self._lost)
            found[list(keys).index(counter_key(LEDGER_IDS))] = Versioned(version=1, record=counter)
        return found

    async def scan(self, prefix: str) -> list[Versioned]:
        self._is_restored = True
        return [each for each in await super().scan(prefix) if each.record.key() != ledger_key(self._lost)]


async def test_metadata_that_is_restored_during_a_pass_deletes_nothing(place: Place) -> None:
    async with opened_disks(place, 1) as (disk,):
        await disk.fence([1, 9])
        collector = Collector(RestoredMetadata(place.quorum.client, 9), [disk], await cluster_id(place))  # type: ignore[arg-type]
        assert await collector.collect() == 0
        assert set(disk.core.contents.ledgers) == {1, 9}
        assert "it was restored from an old copy" in collector.refusal


class SlowMetadata(AbsentMetadata):
    """Something happens between a read and its answer."""

    def __init__(self, client: MetadataClient, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(client)
        self._meanwhile = meanwhile

    async def read(self, keys: Sequence[str]) -> list[Versioned | None]:
        found = await super().read(keys)
        await self._meanwhile()
        return found


async def test_a_ledger_made_after_the_counter_was_read_is_no_sign_of_a_loss(place: Place) -> None:
    async with opened_disks(place, 1) as (disk,):
        await disk.fence([1, 100])
        metadata = SlowMetadata(place.quorum.client, lambda: disk.fence([IDS_GIVEN]))
        lost: list[str] = []
        collector = Collector(metadata, [disk], await cluster_id(place), lambda: lost.append("ids"))  # type: ignore[arg-type]
        assert await collector.collect() == 1
        assert (collector.refusal, lost) == ("", [])


async def test_a_disk_that_hangs_keeps_no_garbage_on_the_others(place: Place) -> None:
    async with opened_disks(place, 2) as (hanging, sound):
        await hanging.fence([2, 100, 102])
        await sound.fence([1, 101, 103])
        hanging.core.stall = "the disk hangs"
        collector = Collector(place.quorum.client, [hanging, sound], await cluster_id(place))
        statuses = await collector.delete([102, 103, 1])
        assert list(statuses) == [Status.STORAGE_FAILED, Status.OK, Status.CONFLICT]
        assert await collector.collect() == 1
        assert set(sound.core.contents.ledgers) == {1}
        hanging.core.stall = ""
        assert await collector.collect() == 2
        assert set(hanging.core.contents.ledgers) == {2}
