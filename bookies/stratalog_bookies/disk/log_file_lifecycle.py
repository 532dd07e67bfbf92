"""Keeps a disk's files in order: the next log file ready, full ones closed with a checkpoint, dead ones recycled, some
space free.

The order of a checkpoint is index, then state; the order of freeing is state, then file. All of it runs beside the group
commit and never holds it up, unless a whole file fills before the next one is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.disk.transient_errors import is_transient
from stratalog_bookies.metrics import Counters
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Background

_log = logging.getLogger(__name__)
_IDLE_S = 0.5
_IDLE_BYTES = 1024 * 1024
"""A disk that took less than this in that time has time for spares."""


class LogFileLifecycle:
    """One disk's files. ``on_change`` is called when room appeared, or the disk became or ceased to be writable."""

    def __init__(
        self,
        core: DiskCore,
        store: LogFiles,
        settings: BookieSettings,
        background: Background,
        counters: Counters,
        on_change: Callable[[], None],
    ) -> None:
        self.free_bytes = 0
        self._first_open = core.log.generation
        self._core = core
        self._store = store
        self._settings = settings
        self._background = background
        self._counters = counters
        self._on_change = on_change
        self._wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self._dropped: list[int] = []
        self._put_off = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.check_space()
        await self._prepare_next()
        self._wanted.set()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def look(self) -> None:
        """Cheap; called after everything that may have filled a file."""
        log = self._core.log
        if not log.has_next_file or log.durable_generation > self._first_open:
            self._wanted.set()

    def wake(self) -> None:
        """Something was deleted or emptied: files may be free now."""
        self._wanted.set()

    async def _keep(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._put_off = False
            try:
                await self._prepare_next()
                await self._close_full()
                await self._free_dead()
                await self._fill_spares()
            except OSError as failure:
                self._failed(failure)
            except Exception as failure:
                # A disk whose files nobody keeps would stop without a word when the file is full.
                _log.exception("the log files cannot be kept any more")
                self._failed(failure)

    # -- the next file

    async def _prepare_next(self) -> None:
        """Have the next file ready, or take no more adds until there is space (and a file descriptor) for it."""
        log = self._core.log
        if self._core.failure or (log.has_next_file and not self._core.read_only):
            return
        # Looked at now: between two looks of ``check_space`` a fast writer fills many files.
        self.free_bytes = await self._background.run(self._store.free_bytes)
        lack = "" if self._store.spare_files or self._may_grow() else self._too_full()
        if not log.has_next_file and (not lack or self._may_lend()):
            try:
                async with self._lock:
                    await self._background.run(partial(self._store.prepare, log.generation + 1))
                log.prepared_generation = log.generation + 1
            except OSError as failure:
                if not is_transient(failure):
                    raise
                lack = str(failure)
        self._set_read_only(lack)

    def _too_full(self) -> str:
        return f"{self.free_bytes} bytes are free, and {self._settings.free_bytes_min} must stay free"

    def _may_lend(self) -> bool:
        """Whether compaction gets a file of the space that is kept free: it gives back more than it takes.

        Without it a full disk whose files are mostly dead would stay full for ever.
        """
        to_gain = self._core.contents.sparse_files(self._settings.compaction_live_ratio)
        return bool(to_gain) and self.free_bytes >= self._store.file_bytes

    def _may_grow(self) -> bool:
        return self.free_bytes - self._store.file_bytes >= self._settings.free_bytes_min

    def _set_read_only(self, reason: str) -> None:
        if bool(reason) != bool(self._core.read_only):
            _log.warning("the disk takes no more adds: %s", reason) if reason else _log.info("the disk takes adds again")
        self._core.read_only = reason
        self._on_change()

    async def check_space(self) -> None:
        """Look how much is free; a disk that was full becomes writable as soon as a file can be made."""
        try:
            self.free_bytes = await self._background.run(self._store.free_bytes)
        except OSError as failure:
            self._failed(failure)
            return
        core = self._core
        if not core.log.has_next_file or core.read_only or self._put_off:
            self._wanted.set()

    async def _fill_spares(self) -> None:
        """Prewrite spares while the disk has nothing better to do: under load that would only take its time."""
        while self._store.spare_files < self._settings.spare_files and self._may_grow():
            appended = self._appended_bytes()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._wanted.wait()
            if self._wanted.is_set():
                return
            if self._appended_bytes() - appended > _IDLE_BYTES:
                continue
            async with self._lock:
                await self._background.run(self._store.fill_spare)
            self.free_bytes = await self._background.run(self._store.free_bytes)

    def _appended_bytes(self) -> int:
        log = self._core.log
        return log.generation * self._store.file_bytes + log.tail

    # -- checkpoints and freeing

    async def _close_full(self) -> None:
        contents = self._core.contents
        while not self._core.failure and (generation := self._core.next_to_close()) is not None:
            async with self._lock:
                runs = list(contents.files[generation].runs.values())
                await self._background.run(partial(self._store.save_index, generation, runs))
                state = contents.state(generation + 1)
                await self._background.run(partial(self._store.save_state, state))
                contents.file_closed(generation)
                self._store.finish(generation)
                self._first_open = generation + 1

    async def _free_dead(self) -> None:
        """Recycle closed files in which nothing is left. Raises ``OSError``."""
        contents = self._core.contents
        async with self._lock:
            dead = frozenset(file.generation for file in contents.dead_files())
            if not (dead or self._dropped) or self._core.failure:
                return
            if dead:
                state = contents.state(self._first_open, without=dead)
                await self._background.run(partial(self._store.save_state, state))
                # One that somebody began to read while the state was written stays until the next time.
                for file in contents.dead_files():
                    if file.generation in dead:
                        contents.drop_file(file.generation)
                        self._dropped.append(file.generation)
            while self._dropped:
                await self._background.run(partial(self._store.recycle, self._dropped[0], self._settings.spare_files + 1))
                del self._dropped[0]
                self._counters.files_recycled += 1
        await self.check_space()

    async def check_state(self) -> None:
        """Read the state file; one that is damaged is written again from memory. A write that fails retires the disk."""
        store = self._store
        async with self._lock:
            try:
                await self._background.run(store.load_state)
                return
            except (Corrupt, OSError) as lost:
                if is_transient(lost):
                    return
                _log.error("the state file is damaged and written again: %s", lost)
            state = self._core.contents.state(self._first_open)
            try:
                await self._background.run(partial(store.save_state, state))
            except OSError as failure:
                self._failed(failure)

    def _failed(self, failure: Exception) -> None:
        """Space and file descriptors may come back; every other error of the disk retires it."""
        if is_transient(failure):
            _log.warning("the log files are kept later: %s", failure)
            self._put_off = True
            return
        _log.critical("the disk failed and is retired: %s", failure)
        self._core.fail(f"the disk failed: {failure}")
        self._on_change()
