"""A bookie process from start to end: recovers disks, serves requests, keeps the record registered, runs background tasks.

A failed disk does not stop the others, nor does one that is missing, foreign or corrupt when a known bookie starts: its ledgers
are unreadable here (never absent), the bookie's record names it, and the auditor restores its copies elsewhere. Without one
usable disk the bookie does not start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from stratalog_bookies.client.read_client import open_read_client
from stratalog_bookies.config import LOOKS_MAX, SECTION, BookieSettings
from stratalog_bookies.disk.compaction import Compaction
from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.disk import Disk
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.metrics import Counters
from stratalog_bookies.node import boot
from stratalog_bookies.node.collector import Collector
from stratalog_bookies.node.dispatch import Dispatch
from stratalog_bookies.node.hanging_disks import unless_disk_hangs
from stratalog_bookies.node.registration import Registration
from stratalog_bookies.repair.auditor import Auditor
from stratalog_bookies.repair.entry_repair import EntryRepair
from stratalog_bookies.repair.scrub import Scrub
from stratalog_core.errors import Invalid, StratalogError
from stratalog_core.metrics.groups import MetricGroup
from stratalog_core.ports import Background, Bound, Clock, Files, Listener, Random, Transport
from stratalog_core.restarting import restarting
from stratalog_core.rpc.addresses import split_address
from stratalog_metadata.client.api import MetadataClient

_log = logging.getLogger(__name__)
_SPACE_INTERVAL_S = 1.0


class BookieServer:
    """One bookie. ``files`` are its disks in the order of ``settings.data_dirs``; ``background`` has
    ``settings.threads`` threads.
    """

    def __init__(
        self,
        settings: BookieSettings,
        metadata: MetadataClient,
        transport: Transport,
        files: Sequence[Files],
        clock: Clock,
        random: Random,
        background: Background,
    ) -> None:
        if len(files) != len(settings.data_dirs):
            raise Invalid(f"{len(files)} disks are given for {len(settings.data_dirs)} data_dirs")
        self._settings = settings
        self._metadata = metadata
        self._transport = transport
        self._files = files
        self._clock = clock
        self._random = random
        self._background = background
        self._registration = Registration(settings, metadata)
        self._counters = Counters()
        self._disks: list[Disk] = []
        self._dispatch: Dispatch | None = None
        self._bound: Bound | None = None
        self._listener: Listener | None = None
        self._background_tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """The served ``host:port``."""
        assert self._bound is not None, "the bookie has been started"
        return self._bound.address

    def metrics(self) -> Iterator[MetricGroup]:
        """Metric groups of the bookie and of each open disk, for one scrape."""
        yield self._counters
        if self._dispatch is not None:
            yield self._dispatch.metrics()
        for disk in self._disks:
            yield disk.metrics()

    async def start(self) -> None:
        """Start; the bookie serves and is registered on return. The caller has locked the disks.

        Raises ``Conflict`` (the port is taken), ``Invalid`` (wrong disk or address), ``Corrupt``, ``Unavailable``.
        """
        self._check_advertised()
        self._bound = await self._transport.bind(self._settings.listen)
        try:
            await self._recover_and_serve(self._bound)
        except BaseException:
            self._bound.close()
            raise

    def _check_advertised(self) -> None:
        """Raise ``Invalid`` if no client could use the advertised address: it would fail in each of them."""
        if self._settings.advertised:
            try:
                split_address(self._settings.advertised)
            except Invalid as wrong:
                raise Invalid(f"[{SECTION}] advertised: {wrong.message}") from wrong

    async def _recover_and_serve(self, bound: Bound) -> None:
        cookie, lost = await boot.claim_disks(
            self._settings, self._files, self._registration, self._random, self._background
        )  # fmt: skip
        for position, files in enumerate(self._files):
            self._disks.append(await self._open_disk(position, files, cookie, lost))
        cluster_id = await self._registration.cluster_id()
        collector = Collector(self._metadata, self._disks, cluster_id, self._registration.report_ledger_ids)
        self._dispatch = Dispatch(self._settings, self._disks, collector, self._counters)
        self._listener = await bound.listen(self._dispatch.handle)
        address = self._settings.advertised or bound.address
        await self._registration.register(
            cookie,
            address,
            read_only=self._is_read_only(),
            low_on_space=self._is_low(),
            failed_disks=self._failed_disks(),
            full_disks=self._full_disks(),
            greatest_ledger_id=collector.greatest_ledger_id,
        )
        self._start_background_tasks(collector, cluster_id, cookie)
        self._start_auditor()

    async def close(self) -> None:
        """Refuse new requests, answer accepted ones, end the session."""
        for task in self._background_tasks:
            task.cancel()
        if self._background_tasks:
            await asyncio.wait(self._background_tasks)
        await self._registration.close()
        if self._dispatch is not None:
            await self._dispatch.close()
        for disk in self._disks:
            await disk.close()
        if self._listener is not None:
            await self._listener.close()

    async def _open_disk(self, position: int, files: Files, cookie: str, lost: dict[int, str]) -> Disk:
        """Recover and start a disk. If it fails or hangs and another disk works, add the reason to ``lost``; else raise
        ``Corrupt`` or ``OSError``.
        """
        if position not in lost:
            recovery = self._recover_disk(position, files, cookie)
            directory = self._settings.data_dirs[position]
            has_another = len(lost) + 1 < len(self._files)
            try:
                disk = await unless_disk_hangs(
                    recovery, files, directory, self._settings, self._background, lambda: has_another
                )
            except (StratalogError, OSError) as failure:
                if not has_another:
                    raise
                lost[position] = str(failure)
            else:
                disk.files.start()
                return disk
        _log.critical("disk %d is not used; its entries are unavailable: %s", position, lost[position])
        store, core = boot.missing_disk(cookie, position, self._settings, lost[position])
        return self._disk(position, core, store, is_missing=True)

    async def _recover_disk(self, position: int, files: Files, cookie: str) -> Disk:
        store, core = await self._background.run(partial(boot.recover_disk, files, cookie, position, self._settings))
        disk = self._disk(position, core, store, is_missing=False)
        await disk.files.prepare()
        return disk

    def _disk(self, position: int, core: DiskCore, store: LogFiles, *, is_missing: bool) -> Disk:
        return Disk(
            position, core, store, self._settings, self._background, self._counters, self._disk_changed,
            is_missing=is_missing,
        )  # fmt: skip

    def _failed_disks(self) -> tuple[int, ...]:
        """Disks that have failed, or hang: copies on those are restored elsewhere if it takes longer than ``audit_delay_s``."""
        return tuple(disk.position for disk in self._disks if disk.core.failure or disk.core.stall)

    def _full_disks(self) -> tuple[int, ...]:
        return tuple(disk.position for disk in self._disks if disk.core.read_only)

    def _is_read_only(self) -> bool:
        return all(disk.core.refusal is not None for disk in self._disks)

    def _is_low(self) -> bool:
        return any(disk.files.is_low for disk in self._disks)

    def _disk_changed(self) -> None:
        if len(self._disks) == len(self._files):
            self._registration.set_state(
                read_only=self._is_read_only(),
                low_on_space=self._is_low(),
                failed_disks=self._failed_disks(),
                full_disks=self._full_disks(),
            )

    # -- background tasks

    def _start_background_tasks(self, collector: Collector, cluster_id: str, cookie: str) -> None:
        settings = self._settings
        self._every(settings.collect_interval_s, partial(self._collect, collector))
        self._every(settings.disk_stall_ms / 1000 / LOOKS_MAX, self._look)
        disks = [disk for disk in self._disks if not disk.is_missing]
        client = open_read_client(
            self._metadata, self._transport, self._clock, self._random, last_resort=frozenset({settings.bookie_id})
        )  # fmt: skip
        scrubs, repairs = [], []
        for disk in disks:
            compaction = Compaction(disk, settings)
            repair = EntryRepair(self._metadata, client.reads, self._clock, disk, compaction)
            disk.on_corruption = repair.wake
            self._every(_SPACE_INTERVAL_S, partial(_maintain, disk))
            self._every(settings.collect_interval_s, compaction.compact)
            content = boot.cookie_content(settings, cluster_id, cookie, disk.position)
            scrubs.append(Scrub(disk, settings, content, repair.wake))
            repairs.append(repair)
        assert self._dispatch is not None, "the dispatch exists"
        self._dispatch.scrub_by(scrubs)
        for work in (collector.run, *(repair.run for repair in repairs), *(scrub.run for scrub in scrubs)):
            self._background_tasks.append(asyncio.get_running_loop().create_task(restarting(work, work.__qualname__)))

    def _start_auditor(self) -> None:
        if not self._settings.audit_delay_s:
            return
        auditor = Auditor(
            self._settings, self._metadata, self._transport, self._clock, self._random, self._counters,
            lambda: self._registration.session_id,
        )  # fmt: skip
        self._background_tasks.append(asyncio.get_running_loop().create_task(auditor.run()))

    def _every(self, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
        self._background_tasks.append(asyncio.get_running_loop().create_task(_repeat(interval_s, work)))

    async def _look(self) -> None:
        for disk in self._disks:
            disk.look()

    async def _collect(self, collector: Collector) -> None:
        await collector.collect()
        for disk in self._disks:
            disk.files.wake()


async def _maintain(disk: Disk) -> None:
    disk.tick()
    await disk.files.check_space()


async def _repeat(interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            _log.exception("a background task failed; it is retried in %s s", interval_s)
