"""The lifecycle of a disk's log files: prepare the next one, checkpoint full ones, recycle dead ones, keep some space free.

A checkpoint writes the index, then the state file. Freeing writes the state file, then recycles the log file. All of it runs
beside the group commit and delays it only if a whole file fills before the next one is ready.
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
from stratalog_bookies.metrics import Counters
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Background
from stratalog_core.transient_errors import is_transient

_log = logging.getLogger(__name__)
_IDLE_S = 0.5
_IDLE_BYTES = 1024 * 1024
"""A disk that wrote less than this since the last check is idle enough to prewrite spares."""


_ENOUGH_AGAIN = 1.25
"""A disk has enough space again when this multiple of ``free_bytes_low`` is free, so that its state does not flicker."""


class LogFileLifecycle:
    """The log files of one disk.

    ``on_change`` is called when room appears, and when the disk becomes or stops being writable or low on space (``is_low``).
    """

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
        self.is_low = False
        self.preparing: int | None = None
        """Generation of the file that is being prepared."""
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
        self._postponed = False
        self._task: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Prepare the next file. An error fails the disk."""
        await self.check_space()
        try:
            await self._prepare_next()
        except OSError as failure:
            self._failed(failure)

    def start(self) -> None:
        """Begin the work in the background."""
        self._wanted.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def advance(self) -> None:
        """Start preparation and checkpoints that are due. Cheap; called after every step that may have filled a file."""
        log = self._core.log
        if not log.has_next_file or log.durable_generation > self._first_open:
            self._wanted.set()

    def wake(self) -> None:
        """Start freeing files: something was deleted or emptied."""
        self._wanted.set()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._postponed = False
            try:
                await self._prepare_next()
                await self._close_full()
                await self._free_dead()
                await self._fill_spares()
            except OSError as failure:
                self._failed(failure)
            except Exception as failure:
                # Without this task the disk would stop silently when its file is full.
                _log.exception("preparing or freeing log files failed unexpectedly")
                self._failed(failure)

    # -- the next file

    async def _prepare_next(self) -> None:
        """Prepare the next file, or stop taking adds until there is space and a file descriptor for it."""
        log = self._core.log
        if self._core.failure or (log.has_next_file and not self._core.read_only):
            return
        self.preparing = log.generation + 1
        try:
            lack = await self._try_to_prepare()
        finally:
            self.preparing = None
        self._set_read_only(lack)

    async def _try_to_prepare(self) -> str:
        """Return why the disk takes no adds; empty if it does. Raises ``OSError``."""
        log = self._core.log
        # Measured now: between two calls of ``check_space`` a fast writer fills many files.
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
        return lack

    def _too_full(self) -> str:
        return f"{self.free_bytes} bytes are free; minimum is {self._settings.free_bytes_min} (free_bytes_min)"

    def _may_lend(self) -> bool:
        """Whether one file of the reserved space may be used: by compaction, which frees more than it takes, or by deletions
        and fences when what adds leave free for them is not whole any more.

        Without this, a full disk whose files are mostly dead, or could be deleted, would stay full.
        """
        if self.free_bytes < self._store.file_bytes:
            return False
        return not self._core.takes(0) or bool(self._core.contents.sparse_files(self._settings.compaction_live_ratio))

    def _may_grow(self) -> bool:
        return self.free_bytes - self._store.file_bytes >= self._settings.free_bytes_min

    def _set_read_only(self, reason: str) -> None:
        if bool(reason) != bool(self._core.read_only):
            _log.warning("the disk accepts no more adds: %s", reason) if reason else _log.info("the disk accepts adds again")
        self._core.read_only = reason
        self._on_change()

    async def check_space(self) -> None:
        """Measure the free space. A full disk becomes writable as soon as a file can be prepared."""
        try:
            self.free_bytes = await self._background.run(self._store.free_bytes)
        except OSError as failure:
            self._failed(failure)
            return
        self._note_low()
        core = self._core
        if not core.log.has_next_file or core.read_only or self._postponed:
            self._wanted.set()

    def _note_low(self) -> None:
        is_low = self.free_bytes < self._settings.free_bytes_low * (_ENOUGH_AGAIN if self.is_low else 1)
        if is_low != self.is_low:
            self.is_low = is_low
            _log.warning("the disk is %s on space: %d bytes are free", "low" if is_low else "no longer low", self.free_bytes)
            self._on_change()

    async def _fill_spares(self) -> None:
        """Prewrite spare files while the disk is idle: under load that would compete with the log."""
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
                await self._background.run(partial(self._store.fill_spare, lambda: not self._core.log.has_next_file))
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
            await self._prepare_next()

    async def _free_dead(self) -> None:
        """Recycle closed files that are empty. Raises ``OSError``."""
        await self._drop_dead()
        if not self._dropped:
            return
        while self._dropped and not self._core.failure:
            # Freeing thousands of files takes minutes, and adds must not wait for that.
            await self._prepare_next()
            self.free_bytes = await self._background.run(self._store.free_bytes)
            # Reserved space that was lent becomes free again: as a spare, the file would be used for adds.
            spares_max = self._settings.spare_files + 1 if self.free_bytes >= self._settings.free_bytes_min else 0
            async with self._lock:
                await self._background.run(partial(self._store.recycle, self._dropped[0], spares_max))
                del self._dropped[0]
                self._counters.files_recycled += 1
        await self.check_space()

    async def _drop_dead(self) -> None:
        """Remove closed files that are empty from the state file. Raises ``OSError``."""
        contents = self._core.contents
        async with self._lock:
            dead = frozenset(file.generation for file in contents.dead_files())
            if not dead or self._core.failure:
                return
            state = contents.state(self._first_open, without=dead)
            await self._background.run(partial(self._store.save_state, state))
            # A file that a read pinned while the state file was written is recycled next time.
            for file in contents.dead_files():
                if file.generation in dead:
                    contents.drop_file(file.generation)
                    self._dropped.append(file.generation)

    async def check_state(self) -> None:
        """Check the state file; rewrite it from memory if it is corrupt. A failed write fails the disk."""
        store = self._store
        async with self._lock:
            try:
                await self._background.run(store.load_state)
                return
            except (Corrupt, OSError) as lost:
                if is_transient(lost):
                    return
                _log.error("the state file is corrupt and is rewritten: %s", lost)
            state = self._core.contents.state(self._first_open)
            try:
                await self._background.run(partial(store.save_state, state))
            except OSError as failure:
                self._failed(failure)

    def _failed(self, failure: Exception) -> None:
        """Retry later after a lack of space or file descriptors; fail the disk after any other error."""
        if is_transient(failure):
            _log.warning("preparing or freeing log files failed and is retried: %s", failure)
            self._postponed = True
            return
        _log.critical("the disk failed and accepts no more writes: %s", failure)
        self._core.fail(f"the disk failed: {failure}")
        self._on_change()
