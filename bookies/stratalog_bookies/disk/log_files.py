"""The directory of a disk: log files, spares, index files, state file, cookie. All calls block. Only this module syncs.

::

    cookie                       the disk's owner (cookie.py)
    probe                        left by a slow start (hanging_disks.py)
    state                        the state file (checkpoint.py)
    log/<generation>.log         log files, hexadecimal
    log/<number>.spare           prewritten or recycled files that wait to become log files
    log/<number>.filling         a spare that is being prewritten; removed at the next start
    index/<generation>.idx       index of a closed log file

A log file is created by a rename, with its header durable, and removed by a rename to a spare. Spares have the size of the
setting: after a change of ``log_file_bytes``, files of another size are removed. An error of a write or sync is
passed on and never retried: the content of the file is then unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from stratalog_bookies.disk.core import checkpoint, log_format
from stratalog_bookies.disk.core.checkpoint import State
from stratalog_bookies.disk.core.index import ROW_BYTES, Run
from stratalog_bookies.disk.core.log import Write
from stratalog_core.ports import BeginsWrites, Buffer, File, Files, OnWritten
from stratalog_core.transient_errors import lacks_resources

STATE: Final = "state"
LOG: Final = "log"
INDEX: Final = "index"
_FILL_BYTES: Final = 1024 * 1024
_READING_MAX: Final = 16


def log_path(generation: int) -> str:
    return f"{LOG}/{generation:016x}.log"


def index_path(generation: int) -> str:
    return f"{INDEX}/{generation:016x}.idx"


class LogFiles:
    """The files of one disk. Writes are not thread-safe; reads may run in parallel to anything."""

    def __init__(self, files: Files, cookie: bytes, file_bytes: int, *, direct: bool = True) -> None:
        self.cookie = cookie
        self._files = files
        self._direct = direct
        self.file_bytes = file_bytes
        self._writing: dict[int, File] = {}
        self._beginning: dict[int, BeginsWrites] = {}
        files.make_directory(LOG)
        files.make_directory(INDEX)
        self._remove_unfinished()
        spares = self._numbers(".spare")
        self._spares = [number for number in spares if self._keep_spare(number)]
        self._next_spare = max(spares, default=0) + 1
        self._reading: dict[int, File] = {}

    @property
    def spare_files(self) -> int:
        return len(self._spares)

    def free_bytes(self) -> int:
        return self._files.free_bytes()

    # -- the file that is written

    def prepare(self, generation: int) -> None:
        """Make log file ``generation`` durable and empty: from a spare if there is one, else with reserved space only."""
        path = log_path(generation)
        if not self._spares:
            self._make_spare(prewrite=False)
        spare = self._spares[-1]
        file = self._files.open(_spare_path(spare), direct=self._direct)
        try:
            file.pwritev((log_format.pack_file_header(self.cookie, generation, self.file_bytes),), 0)
            file.datasync()
            self._files.rename(_spare_path(spare), path)
            self._sync_renamed(path, _spare_path(spare))
        except OSError:
            file.close()
            raise
        self._spares.remove(spare)
        self._writing[generation] = file
        if isinstance(file, BeginsWrites):
            self._beginning[generation] = file

    def _sync_renamed(self, path: str, before: str) -> None:
        """Make a new name durable, or restore the old one, so that the caller may retry after a lack of file descriptors."""
        try:
            self._files.sync_directory(LOG)
        except OSError:
            self._files.rename(path, before)
            raise

    def write(self, write: Write) -> None:
        """Write and sync one group. It is durable on return."""
        file = self._writing[write.generation]
        file.pwritev(write.buffers, write.position)
        file.datasync()

    def begin_write(self, write: Write, done: OnWritten) -> bool:
        """``write`` without blocking: ``done`` is called from the event loop. False if this write needs a thread."""
        file = self._beginning.get(write.generation)
        return file is not None and file.begin_write(write.buffers, write.position, done)

    def finish(self, generation: int) -> None:
        """Close a log file for writing."""
        self._beginning.pop(generation, None)
        file = self._writing.pop(generation, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for generation in list(self._writing):
            self.finish(generation)
        for generation in list(self._reading):
            self._forget(generation)

    # -- spares

    def fill_spare(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Prewrite one more spare: overwriting existing blocks is faster than appending. Stop once ``is_urgent`` returns true:
        the rest of its space is only reserved.
        """
        self._make_spare(prewrite=True, is_urgent=is_urgent)

    def _make_spare(self, *, prewrite: bool, is_urgent: Callable[[], bool] = lambda: False) -> None:
        number = self._next_spare
        self._next_spare += 1
        path = f"{LOG}/{number:016x}.filling"
        file = self._files.open(path, create=True, direct=self._direct)
        try:
            file.allocate(self.file_bytes)
            if prewrite:
                self._prewrite(file, is_urgent)
            file.datasync()
        except OSError:
            self._files.remove(path)
            raise
        finally:
            file.close()
        self._files.rename(path, _spare_path(number))
        self._spares.append(number)
        self._files.sync_directory(LOG)

    def _prewrite(self, file: File, is_urgent: Callable[[], bool]) -> None:
        zeros = memoryview(bytes(min(_FILL_BYTES, self.file_bytes)))
        for position in range(0, self.file_bytes, len(zeros)):
            if is_urgent():
                return
            file.pwritev((zeros[: self.file_bytes - position],), position)
            # In small chunks: a sync of the log waits for everything the disk has queued.
            file.datasync()

    def _is_whole(self, path: str) -> bool:
        """Whether the file has the size of a new log file: a smaller one would grow, in writes that must not lack space."""
        file = self._files.open(path)
        try:
            return file.size() == self.file_bytes
        finally:
            file.close()

    def _keep_spare(self, number: int) -> bool:
        if self._is_whole(_spare_path(number)):
            return True
        self._files.remove(_spare_path(number))
        return False

    def recycle(self, generation: int, spares_max: int) -> None:
        """Turn a log file that no state file lists into a spare. Remove it if there are ``spares_max``, or if its size is not
        that of new files. Idempotent.
        """
        self._forget(generation)
        if self._files.exists(index_path(generation)):
            self._files.remove(index_path(generation))
            self._files.sync_directory(INDEX)
        if not self._files.exists(log_path(generation)):
            self._files.sync_directory(LOG)
            return
        if len(self._spares) >= spares_max or not self._is_whole(log_path(generation)):
            self._files.remove(log_path(generation))
            self._files.sync_directory(LOG)
            return
        number = self._next_spare
        self._next_spare += 1
        self._files.rename(log_path(generation), _spare_path(number))
        self._spares.insert(0, number)
        self._files.sync_directory(LOG)

    # -- reading

    def generations(self) -> list[int]:
        """Existing log files, ascending."""
        return self._numbers(".log")

    def open_log(self, generation: int) -> File:
        """Open a log file for reading; the caller closes it."""
        return self._files.open(log_path(generation))

    def open_direct(self, generation: int) -> File:
        """Open a log file for ``keep_open``; its reads bypass the page cache if possible."""
        return self._files.open(log_path(generation), direct=self._direct)

    def kept_open(self, generation: int) -> File | None:
        """A log file that is open for reading; the caller does not close it."""
        return self._reading.get(generation)

    def keep_open(self, generation: int, file: File) -> None:
        """Keep a log file open for reading until it is removed or evicted. Event loop only: the files are used there."""
        self._forget(generation)
        self._reading[generation] = file
        while len(self._reading) > _READING_MAX:
            self._forget(next(iter(self._reading)))

    def _forget(self, generation: int) -> None:
        file = self._reading.pop(generation, None)
        if file is not None:
            file.close()

    def read_log(self, generation: int) -> bytes:
        """The whole content of a log file, its header checked."""
        file = self.open_log(generation)
        try:
            content = file.pread(file.size(), 0)
        finally:
            file.close()
        log_format.check_file_header(content[: log_format.PAGE_BYTES], self.cookie, generation)
        return content

    def write_again(self, generation: int, content: Buffer, position: int) -> None:
        """Make durable what was read at ``position`` of a log file: it may be in the page cache only.

        A sync alone is not enough: after one that failed, the kernel counts pages as clean that never reached the disk.
        """
        file = self.open_log(generation)
        try:
            file.pwritev((content,), position)
            file.datasync()
        finally:
            file.close()

    def seed(self, generation: int) -> int:
        """Seed of the CRCs of this file's frame headers."""
        return log_format.frame_seed(self.cookie, generation)

    def check_header(self, generation: int) -> None:
        """Raises ``Corrupt`` or ``OSError`` if the file's header is corrupt."""
        file = self.open_log(generation)
        try:
            log_format.check_file_header(file.pread(log_format.PAGE_BYTES, 0), self.cookie, generation)
        finally:
            file.close()

    # -- checkpoints

    def repair_file(self, path: str, content: bytes) -> bool:
        """Rewrite a small file unless it has ``content``. Returns whether that was necessary."""
        try:
            if self._files.read(path) == content:
                return False
        except OSError as failure:
            if lacks_resources(failure):
                raise
        self._files.write_atomic(path, content)
        return True

    def load_state(self) -> State:
        """Read the state file. Raises ``FileNotFoundError`` or ``Corrupt``."""
        return checkpoint.decode_state(self._files.read(STATE))

    def save_state(self, state: State) -> None:
        self._files.write_atomic(STATE, checkpoint.encode_state(state))

    def save_index(self, generation: int, runs: Sequence[Run]) -> None:
        """Store the runs of a closed file; records their positions in them."""
        self._files.write_atomic(index_path(generation), checkpoint.encode_index(generation, runs))

    def load_index(self, generation: int) -> list[Run]:
        """Runs of a closed file without their rows. Raises ``FileNotFoundError`` or ``Corrupt``."""
        file = self._files.open(index_path(generation))
        try:
            header = file.pread(checkpoint.INDEX_HEADER_BYTES, 0)
            table_bytes = checkpoint.index_table_bytes(header, generation)
            table = file.pread(table_bytes, checkpoint.INDEX_HEADER_BYTES)
        finally:
            file.close()
        return checkpoint.decode_index_table(header, table, generation)

    def load_rows(self, run: Run) -> bytes:
        """Rows of one stored run. Raises ``OSError`` or ``Corrupt``."""
        file = self._files.open(index_path(run.generation))
        try:
            return checkpoint.check_rows(run, file.pread(run.count * ROW_BYTES, run.stored_at))
        finally:
            file.close()

    def _numbers(self, suffix: str) -> list[int]:
        return sorted(int(name.removesuffix(suffix), 16) for name in self._files.list(LOG) if name.endswith(suffix))

    def _remove_unfinished(self) -> None:
        for name in self._files.list(LOG):
            if name.endswith(".filling"):
                self._files.remove(f"{LOG}/{name}")


def _spare_path(number: int) -> str:
    return f"{LOG}/{number:016x}.spare"
