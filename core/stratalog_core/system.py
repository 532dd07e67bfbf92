"""The real clock, files and background threads behind ``stratalog_core.ports``."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stratalog_core.files.directory_lock import lock_directory
from stratalog_core.files.open_files import DirectFile, SystemFile, open_file

Result = TypeVar("Result")


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc only; other C libraries return memory by themselves."""


def return_free_memory() -> None:
    """Return the allocator's free memory to the system. Takes up to a tenth of a second after a large peak."""
    if _trim is not None:
        _trim(0)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not have Linux's ``/proc``."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class SystemClock:
    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


class SystemFiles:
    """Files below one root directory; see :class:`stratalog_core.ports.Files`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def lock(self) -> Callable[[], None]:
        return lock_directory(self._root)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> SystemFile | DirectFile:
        return open_file(self._root / path, create=create, direct=direct)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write_atomic(self, path: str, content: bytes) -> None:
        target = self._root / path
        aside = target.with_name(target.name + ".tmp")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        os.replace(aside, target)
        sync_directory(target.parent)

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def list(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / directory))
        except FileNotFoundError:
            return []

    def rename(self, source: str, target: str) -> None:
        os.replace(self._root / source, self._root / target)

    def remove(self, path: str) -> None:
        os.unlink(self._root / path)

    def make_directory(self, path: str) -> None:
        (self._root / path).mkdir(parents=True, exist_ok=True)

    def sync_directory(self, path: str) -> None:
        sync_directory(self._root / path)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Blocks; raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ThreadBackground:
    """Blocking calls in a bounded number of threads; see :class:`stratalog_core.ports.Background`.

    Group commits may make one call each, so the cost matters: a call that does nothing takes 30 µs of CPU with a plain queue
    and one future, and 60 µs with the standard executor and its two chained futures.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads_max = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closed = False
        _open_pools.add(self)

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]:
        if self._closed:
            raise RuntimeError(f"the threads of {self._name} were closed")
        if len(self._threads) < self._threads_max:
            self._start_thread()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._calls.put((loop, future, call))
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and wait for the others."""
        self._closed = True
        _open_pools.discard(self)
        with contextlib.suppress(queue.Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                loop, future, _ = waiting
                _tell(loop, future.cancel)
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        """Start one more, or leave the calls to those that run if the system has none left. Raises if none runs."""
        thread = threading.Thread(target=_work, args=(self._calls,), name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)


async def run_in_own_thread(call: Callable[[], Result]) -> Result:
    """Run a call that may never return in a new thread, for which nothing waits at the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    calls.put((loop, future, call))
    calls.put(None)
    threading.Thread(target=_work, args=(calls,), name="call", daemon=True).start()
    return await future


_open_pools: weakref.WeakSet[ThreadBackground] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop all threads: native libraries abort the process if a thread is inside them while the interpreter shuts down."""
    for pool in list(_open_pools):
        pool.close()


_Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (taken := calls.get()) is not None:
        loop, future, call = taken
        if future.cancelled():
            continue
        try:
            result = call()
        except BaseException as failure:  # The caller that awaits the future gets it.
            _tell(loop, partial(_settle, future, None, failure))
        else:
            _tell(loop, partial(_settle, future, result, None))
        # Keep no reference to a call while waiting for the next one.
        taken = loop = future = call = result = None  # type: ignore[assignment]


def _settle(future: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed, so no caller is left.
        loop.call_soon_threadsafe(call)
