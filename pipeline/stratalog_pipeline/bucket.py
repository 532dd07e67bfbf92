"""Blocking reads of one object store, for callers without an event loop: Spark's planner and tasks.

The store is tiering's, with its retries and errors. Its event loop runs in its own thread because the caller may pause for
minutes between two rows (Spark takes none while it spills or shuffles): meanwhile, running fetches must continue and their
timeouts must see the replies. ``get_ranges`` fetches a bounded number of bytes ahead of the caller, so that decoding and
fetching overlap. Nothing is written but the leases of readers.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from stratalog_core.errors import Invalid
from stratalog_core.ports import Background
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.archive import live_topics
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.footer import SegmentFooter
from stratalog_tiering.store import ObjectStore, StoreWithCopy, open_store, read_verified

THREADS: Final = 4
AHEAD_BYTES_MAX: Final = 32 * 1024 * 1024
Range = tuple[str, int, int]
"""``(key, start, length)``."""
Result = TypeVar("Result")


class Bucket:
    """One open store. Not thread-safe. Usable until ``close``."""

    def __init__(self, url: str, second_url: str = "") -> None:
        """``second_url`` is the store of a second copy, read where the first one fails or is damaged; empty: none."""
        if not second_url:
            _check_exists(url)
        self._loop = asyncio.new_event_loop()
        self._background = ThreadBackground(THREADS, "stratalog-bucket")
        self._clock = SystemClock()
        self._store: ObjectStore = self._opened(url)
        if second_url:
            self._store = StoreWithCopy(self._store, self._opened(second_url), self._clock)
        self._source = ManifestSource(self._store)
        self._thread = threading.Thread(target=self._loop.run_forever, name="stratalog-bucket-loop", daemon=True)
        self._thread.start()

    def __enter__(self) -> Bucket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _opened(self, url: str) -> ObjectStore:
        return open_store(
            url, background=self._background, clock=self._clock, random=random.SystemRandom(), threads=THREADS
        )  # fmt: skip

    @property
    def store(self) -> ObjectStore:
        """The store itself. Await its methods within :meth:`run`."""
        return self._store

    @property
    def has_second_copy(self) -> bool:
        return isinstance(self._store, StoreWithCopy)

    @property
    def background(self) -> Background:
        """Threads for work that would block the bucket's event loop."""
        return self._background

    @property
    def source(self) -> ManifestSource:
        """Manifests, pages and footers, checked against their digests. Await its methods within :meth:`run`."""
        return self._source

    def cipher(self, footer: SegmentFooter) -> BlockCipher | None:
        """Return the cipher of a segment's blocks; None if they are not encrypted. Raises as :meth:`ManifestSource.cipher`."""
        return self.run(self._source.cipher(footer)) if footer.is_encrypted else None

    def run(self, awaited: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine that uses this store and return its result. Raises its error."""
        future = self._begin(awaited)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _begin(self, awaited: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop)

    @contextmanager
    def running(self, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Run ``work``, which uses this store, while the block runs; cancel it at the end."""
        future = self._begin(work)
        try:
            yield
        finally:
            future.cancel()

    def topics(self) -> list[TopicDescriptor]:
        """Return the topics that are not deleted, sorted by name. Several topics may share a name."""
        return self.run(live_topics(self._store))

    async def offset_at(self, pointer: ManifestPointer, timestamp_ms: int) -> int | None:
        """Return the offset of the first record at or after ``timestamp_ms``, as ListOffsets does; None if there is none."""
        reader = ColdReader(self._store, ColdReaderSettings(), self._clock)
        try:
            found = await reader.offset_for_timestamp(pointer, timestamp_ms)
        finally:
            await reader.close()
        return None if found is None else found.offset

    def get_ranges(self, ranges: Iterable[Range]) -> Generator[memoryview, None, None]:
        """Yield the content of each range, in order. Fetch up to ``AHEAD_BYTES_MAX`` ahead while the caller works on one."""
        waiting: deque[tuple[Future[memoryview], int]] = deque()
        ahead_bytes = 0
        coming = iter(ranges)
        wanted = next(coming, None)
        try:
            while waiting or wanted is not None:
                while wanted is not None and (not waiting or ahead_bytes + wanted[2] <= AHEAD_BYTES_MAX):
                    waiting.append((self._begin(self._fetch(wanted)), wanted[2]))
                    ahead_bytes += wanted[2]
                    wanted = next(coming, None)
                fetched, length = waiting.popleft()
                ahead_bytes -= length
                yield fetched.result()
        finally:
            for fetched, _ in waiting:
                fetched.cancel()

    def read_verified(self, read: Callable[[ObjectStore], Awaitable[Result]]) -> Result:
        """Return the result of ``read``, which verifies it, from the second copy if the first is damaged."""
        return self.run(_await(read_verified(self._store, read)))

    async def _fetch(self, wanted: Range) -> memoryview:
        return await self._store.get_range(*wanted)

    def close(self) -> None:
        """Cancel running fetches and close the store."""
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._background.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()
        await self._loop.shutdown_asyncgens()


async def _await(awaited: Awaitable[Result]) -> Result:
    return await awaited


def _check_exists(url: str) -> None:
    """Raise ``Invalid`` for a missing directory: opening the store would create a mistyped one, empty."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file") and not Path(parts.path).is_dir():
        raise Invalid(f"store {url!r}: there is no directory {parts.path!r}")
