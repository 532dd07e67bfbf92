"""Runs one role until SIGTERM or SIGINT: event loop, logging, orderly stop. The outermost shell of every process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import threading
import tomllib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from stratalog.exit_codes import ExitCode
from stratalog.roles.node import NodeSettings
from stratalog.roles.open_files import raise_open_files
from stratalog_core.config import load
from stratalog_core.errors import Conflict, Invalid, StratalogError, Unavailable
from stratalog_core.event_loop import run_server
from stratalog_core.files.directory_lock import lock_file
from stratalog_core.http.endpoints import Ready
from stratalog_core.http.service import HttpService
from stratalog_core.http.settings import SECTION as HTTP_SECTION
from stratalog_core.http.settings import HttpSettings
from stratalog_core.metrics.registry import Registry
from stratalog_core.ports import Background, Clock, Files, Random, Transport
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground, run_in_own_thread
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_tiering.store import STORE_THREADS, ObjectStore, check_store_url, open_store

Settings = TypeVar("Settings")
TABLES: Final = ("node", "metadata", "bookie", "ledgers", "broker", "cold", "tiering", HTTP_SECTION)
"""Tables of a configuration file. Several roles may share a file, and each reads its own tables."""
_WATCH_INTERVAL_S: Final = 1.0
LOCK_TIMEOUT_S: Final = 3.0
"""A killed process holds its locks until its last thread has left the kernel, which a disk write can delay."""
_LOCK_RETRY_S: Final = 0.1
_LOG_S_MAX: Final = 1.0
_log = logging.getLogger("stratalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One process's configuration: a file, overridden by the environment, overridden by the command line."""

    file: Path | None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)

    def section(self, cls: type[Settings], section: str) -> Settings:
        """Load one section. Raises ``Invalid`` that names source, field, limit and remedy."""
        return load(cls, section=section, file=self.file, environ=os.environ, overrides=self.overrides.get(section))

    def check_tables(self) -> None:
        """Raise ``Invalid`` if the file, which ``section`` has read, has a table or a setting that no process reads."""
        if self.file is None:
            return
        for name in tomllib.loads(self.file.read_text()):
            if name not in TABLES:
                near = get_close_matches(name, TABLES, 1)
                remedy = f"did you mean [{near[0]}]?" if near else f"settings are in the tables [{'], ['.join(TABLES)}]"
                raise Invalid(f"{self.file}: unknown table {name!r}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """A process's network, disks and clock. Tests of faults pass their own."""

    transport: Callable[[], Transport] = TcpTransport
    files: Callable[[Path], Files] = SystemFiles
    clock: Callable[[], Clock] = SystemClock


SYSTEM_BORDERS = Borders()


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class Node:
    """The real ports of one process, and the components on it, closed in reverse order."""

    def __init__(
        self, configuration: Configuration, stack: AsyncExitStack, borders: Borders = SYSTEM_BORDERS, role: str = "node"
    ) -> None:
        self.configuration = configuration
        self.settings = configuration.section(NodeSettings, "node")
        for url in (self.settings.store, self.settings.second_store):
            if url:
                check_store_url(url)
        if self.settings.second_store and self.settings.second_store == self.settings.store:
            raise Invalid("[node] second_store is the same as store: name another bucket, prefix or directory")
        self.clock = borders.clock()
        self.random: Random = random.Random(os.urandom(32))
        self.transport = borders.transport()
        self._files = borders.files
        self._stack = stack
        self._metadata: QuorumClient | None = None
        self._failures: list[Callable[[], StratalogError | None]] = []
        self._http_settings = configuration.section(HttpSettings, HTTP_SECTION)
        self.metrics = Registry(self._http_settings.label_sets_max)
        self._http = HttpService(self._http_settings, role, self.metrics, self.check_serving, self.clock)
        self._is_http_started = False
        self.phase = Phase.STARTING
        self._checks: list[Ready] = []
        self.closing(self.transport.close)

    def watching(self, failure: Callable[[], StratalogError | None]) -> None:
        """End the process when ``failure`` returns an error: a supervisor restarts a dead process, not a stuck one."""
        self._failures.append(failure)

    def failure(self) -> StratalogError | None:
        """Return the first failure of the watched components, or None."""
        return next((found for failure in self._failures if (found := failure()) is not None), None)

    @property
    def http_address(self) -> str:
        """``host:port`` of metrics and health; empty if they are not served."""
        return self._http.address

    async def serve_http(self) -> None:
        """Serve metrics and health until the node stops. Does nothing if they are served already.

        A role calls it when it has locked its directories: a second start is refused with the holder of the directory, not with
        a port in use. Raises ``Conflict``, ``Invalid`` or ``OSError``.
        """
        if self._is_http_started:
            return
        self._is_http_started = True
        self.closing(self._http.close)
        await self._http.start()

    def serving_when(self, check: Ready) -> None:
        """Add a check. The process is ready only while all checks pass."""
        self._checks.append(check)

    async def check_serving(self, timeout_s: float) -> str:
        """Return what the process serves as. Raises ``Unavailable`` with the reason if it does not, and what a check raises."""
        if self.phase is not Phase.SERVING:
            raise Unavailable(self.phase.value)
        return "; ".join([await check(timeout_s) for check in self._checks])

    def closing(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have ``close`` awaited when the node stops, before what was registered earlier."""
        self._stack.push_async_callback(close)

    def background(self, threads: int, name: str) -> Background:
        """Return a new thread pool that is shut down when the node stops."""
        pool = ThreadBackground(threads, name)
        self._stack.callback(pool.close)
        return pool

    async def files(self, directory: Path) -> Files:
        """Lock a directory until this process ends. Raises ``Conflict`` if another process has the lock, or ``OSError``.

        If its disk hangs, this waits, and the event loop goes on.
        """
        files = await run_in_own_thread(partial(self._files, directory))
        await self._lock(files.lock)
        return files

    async def file(self, path: Path) -> Files:
        """Lock the file at ``path`` until this process ends; return the files of its directory. Raises as ``files`` does."""
        files = await run_in_own_thread(partial(self._files, path.parent))
        await self._lock(partial(lock_file, path))
        return files

    async def _lock(self, lock: Callable[[], Callable[[], None]]) -> None:
        deadline = self.clock.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                self._stack.callback(await run_in_own_thread(lock))
                return
            except Conflict:
                if self.clock.monotonic() > deadline:
                    raise
            await asyncio.sleep(_LOCK_RETRY_S)

    def find_metadata_at(self, address: str) -> None:
        """Use the single metadata node at ``address``, which runs in this process."""
        self.settings = replace(self.settings, metadata=(address,))

    async def metadata(self) -> QuorumClient:
        """Return this process's client of the metadata quorum, with its view loaded."""
        if self._metadata is None:
            if not self.settings.metadata:
                raise Invalid("[node] metadata is empty: list the metadata nodes as HOST:PORT")
            self._metadata = QuorumClient(self.settings.metadata, self.transport, self.clock, self.random)
            self.closing(self._metadata.close)
            client = self._metadata
            self.watching(lambda: client.failure)
            await self._metadata.start()
        return self._metadata

    async def read_record(self, key: str, timeout_s: float) -> object:
        """Return the metadata record under ``key``, or None, by a linearizable read."""
        (found,) = await (await self.metadata()).read([key], timeout_s)
        return found.record if found is not None else None

    def store(self) -> ObjectStore:
        """Return the object store of ``[node] store``. It is closed when the node stops."""
        if not self.settings.store:
            raise Invalid(
                "[node] store is empty: set it to a directory, s3://bucket/prefix?endpoint=URL, az://container?account=NAME or"
                " gs://bucket"
            )
        return self._opened(self.settings.store, "store")

    def second_store(self) -> ObjectStore | None:
        """Return the store of ``[node] second_store``, None without one. It is closed when the node stops."""
        return self._opened(self.settings.second_store, "second-store") if self.settings.second_store else None

    def _opened(self, url: str, name: str) -> ObjectStore:
        background = self.background(STORE_THREADS, name)
        store = open_store(url, background=background, clock=self.clock, random=self.random)
        self.closing(store.close)
        return store


_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread that returns from the disk may wait for the event loop. The interpreter's default of 5 ms would delay every
acknowledgement of a busy bookie."""

_YOUNG_OBJECTS_MAX: Final = 20_000
"""New objects after which the garbage collector runs. At the interpreter's default of 700 it runs every few batches and finds
nothing: a broker's own code took 3 to 8 % less time without collections."""

Start = Callable[[Node], Awaitable[str]]


def run(configuration: Configuration, name: str, start: Start, borders: Borders = SYSTEM_BORDERS) -> None:
    """Run ``start``, which returns the address, and serve until a signal. Raises the error that ended the role."""
    settings = configuration.section(NodeSettings, "node")
    _configure_logging(settings)
    raise_open_files()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.set_threshold(_YOUNG_OBJECTS_MAX)
    limit = _StopLimit(name, settings.stop_timeout_s)
    try:
        run_server(_serve(configuration, name, start, borders, limit))
    finally:
        limit.end()


class _StopLimit:
    """Ends the process if it has not stopped in time. Threads that wait for a disk can block the event loop meanwhile."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._timeout_s, self._exit)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _exit(self) -> None:
        says = "%s did not stop within %s s (stop_timeout_s) and exits as in a crash"
        # The log may be on the disk that hangs.
        logging_thread = threading.Thread(target=_log.warning, args=(says, self._name, self._timeout_s), daemon=True)
        logging_thread.start()
        logging_thread.join(_LOG_S_MAX)
        os._exit(ExitCode.FAILED)


async def _serve(configuration: Configuration, name: str, start: Start, borders: Borders, limit: _StopLimit) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        limit.begin()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    stack = AsyncExitStack()
    try:
        node = Node(configuration, stack, borders, name)
        address = await _unless_stopped(start(node), stopped)
        if address is not None:
            node.phase = Phase.SERVING
            _log.info("%s serves at %s", name, address)
            # Modules and the objects of the start live as long as the process: exclude them from collections.
            gc.collect()
            gc.freeze()
            await _until_stopped(node, stopped)
            node.phase = Phase.STOPPING
            # Handing over thousands of partitions creates much garbage, and a full collection would take a second.
            gc.freeze()
    except StratalogError as failure:
        _log.error("%s failed: %s", name, failure.message)
        raise
    finally:
        limit.begin()
        await stack.aclose()
        _log.info("%s stopped", name)


async def _until_stopped(node: Node, stopped: asyncio.Event) -> None:
    """Return at a signal. Raises the first failure of a watched component."""
    while not stopped.is_set():
        failure = node.failure()
        if failure is not None:
            raise failure
        with suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_INTERVAL_S):
                await stopped.wait()


async def _unless_stopped(starting: Awaitable[str], stopped: asyncio.Event) -> str | None:
    """Return the address, or ``None`` if a signal came first."""
    start = asyncio.ensure_future(starting)
    stop = asyncio.ensure_future(stopped.wait())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if start.done():
        return start.result()
    start.cancel()
    await asyncio.wait((start,))
    return None


def _configure_logging(settings: NodeSettings) -> None:
    handler = logging.FileHandler(settings.log_file) if settings.log_file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for chatty in ("botocore", "boto3", "urllib3", "aiobotocore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
