"""Interfaces to time, randomness, network, files and blocking work.

Every shell takes them as arguments. The real implementations are in ``system.py`` and ``rpc/``; the simulator has its own,
which pass the same contract tests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from stratalog_core.errors import StratalogError

Buffer = bytes | bytearray | memoryview
Result = TypeVar("Result")


class Clock(Protocol):
    """Time. Leases, timeouts and intervals use ``monotonic``; ``wall_ms`` is for records and for display."""

    def monotonic(self) -> float:
        """Seconds that never decrease; comparable within one process only."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump either way."""
        ...


class Random(Protocol):
    """Randomness: the methods of :class:`random.Random` that are used."""

    def random(self) -> float: ...
    def randrange(self, stop: int, /) -> int: ...
    def getrandbits(self, bits: int, /) -> int: ...
    def shuffle(self, items: list[Result], /) -> None: ...


OnReply = Callable[[memoryview | StratalogError], None]


class Channel(Protocol):
    """Requests to one peer: pipelined, multiplexed, connecting on demand, bounded.

    A request that was not sent fails with ``Unavailable``, or with ``Overloaded`` at the bound on bytes in flight. One that was
    sent and not answered in time, or whose connection broke, fails with ``OutcomeUnknown``, any other with the peer's error.
    """

    @property
    def address(self) -> str: ...

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        """Queue one request; ``on_reply`` is called exactly once, from the event loop, never from within this call."""
        ...

    async def call(self, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
        """Send a request and return its reply. Raises the error that ``send`` would pass to ``on_reply``."""
        ...

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back each time an established connection breaks, but not on ``close``. Returns a function that cancels this."""
        ...

    async def close(self) -> None: ...


class Connection(Protocol):
    """One client's connection to a server. A killed process loses all of its connections at once."""

    def on_lost(self, callback: Callable[[Connection], None]) -> Callable[[], None]:
        """Call back once when the connection has ended, whichever side ended it. Returns a function that cancels this."""
        ...


class Request(Protocol):
    """One request as a server sees it; answer it exactly once, now or later."""

    @property
    def method(self) -> int: ...

    @property
    def body(self) -> memoryview:
        """The request's bytes; owned by the request, so views of it may be kept."""
        ...

    @property
    def connection(self) -> Connection:
        """The connection of the request: the same object for all requests of one connection."""
        ...

    def reply(self, *parts: Buffer) -> None: ...
    def fail(self, error: StratalogError) -> None: ...


Handler = Callable[[Request], None]


class Listener(Protocol):
    @property
    def address(self) -> str:
        """The ``host:port`` that was bound; with port 0 the system chooses the port."""
        ...

    async def close(self) -> None: ...


class Bound(Protocol):
    """A port that is bound and does not accept connections yet."""

    @property
    def address(self) -> str:
        """The ``host:port`` that was bound; with port 0 the system chooses the port."""
        ...

    async def listen(self, handler: Handler) -> Listener:
        """Accept connections from now on; the listener owns the port. Raises ``Conflict`` or ``OSError``."""
        ...

    def close(self) -> None:
        """Release the port, unless a listener owns it."""
        ...


class Transport(Protocol):
    """The network between Stratalog's processes. Addresses are ``host:port``."""

    def channel(self, address: str) -> Channel:
        """Return the channel to ``address``, which all callers share."""
        ...

    async def bind(self, address: str) -> Bound:
        """Bind ``address``. Raises ``Conflict`` if another process has it, ``OSError`` if it cannot be bound."""
        ...

    async def close(self) -> None: ...


class File(Protocol):
    """An open file with positional access. Every method blocks."""

    def size(self) -> int: ...
    def pread(self, length: int, position: int) -> bytes:
        """Return ``length`` bytes; fewer only at the end of the file."""
        ...

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers. Raises ``OSError``; the range's content is undefined then."""
        ...

    def datasync(self) -> None:
        """``fdatasync``: make content and size durable. After a failure the file's content is undefined."""
        ...

    def allocate(self, size: int) -> None:
        """Reserve space and grow the file, with zeros, to ``size``; later writes below that do not run out of space."""
        ...

    def truncate(self, size: int) -> None: ...
    def close(self) -> None: ...


OnWritten = Callable[[OSError | None], None]


@runtime_checkable
class BeginsWrites(Protocol):
    """A file with asynchronous writes."""

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        """Start to write all of it from the event loop, which later calls ``done`` with None when it is durable, or with the
        error, after which the range's content is undefined. Returns False if nothing was started: use ``pwritev`` and
        ``datasync``. One write of a file at a time. The buffers may be reused on return.
        """
        ...


OnRead = Callable[["list[memoryview] | OSError"], None]


class Extent(NamedTuple):
    """``length`` bytes of a file from ``position`` on."""

    position: int
    length: int


@runtime_checkable
class BeginsReads(Protocol):
    """A file with asynchronous large reads."""

    def begin_reads(self, extents: Sequence[Extent], done: OnRead) -> bool:
        """Start to read all of them concurrently from the event loop, which later calls ``done`` with a view of each, or with
        the error. Returns False if nothing was started: use ``pread``.
        """
        ...


class Files(Protocol):
    """A directory tree. Paths are relative, with ``/``. Every method blocks."""

    def lock(self) -> Callable[[], None]:
        """Lock the tree for this process, until it ends or calls the returned function.

        Raises ``Conflict``, which names the process that holds the lock.
        """
        ...

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        """Open a file. ``direct``: writes bypass the page cache, for a log with one appending writer and few readers."""
        ...

    def read(self, path: str) -> bytes:
        """Return the whole file. Raises ``FileNotFoundError``."""
        ...

    def write_atomic(self, path: str, content: bytes) -> None:
        """Replace or create a file durably: write a temporary file, sync, rename, sync the directory."""
        ...

    def exists(self, path: str) -> bool: ...
    def list(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted; empty if it does not exist."""
        ...

    def rename(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def free_bytes(self) -> int: ...


class Background(Protocol):
    """Runs blocking calls, so that the event loop never waits for a disk."""

    def run(self, call: Callable[[], Result]) -> Awaitable[Result]: ...
    def close(self) -> None: ...
