"""Counts what a cluster in this process does: system calls, calls of our own functions, futures, tasks, frames, files.

The interpreter's profiling hook sees every call in every thread; transports and files are counted at their ports. While a
scenario runs, the event loop's time stands still, so that no heartbeat and no other timer takes part in it, however slow the
machine is. Timers that are due run first. Work in progress may still end, so a scenario is repeated and the smallest
count taken: always the same.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from stratalog_core.files.open_files import SystemFile
from stratalog_core.ports import BeginsWrites, Buffer, Channel, File, OnReply, OnWritten
from stratalog_core.rpc.tcp import TcpChannel, TcpTransport
from stratalog_core.system import SystemFiles

_SYSTEM_CALLS = {"send", "sendmsg", "recv", "recv_into"}
_SYSTEM_CALLS |= {"pwrite", "pwritev", "pread", "preadv", "fdatasync", "fsync", "ftruncate"}
_LOOP_CALLS = {"create_future", "create_task", "call_soon", "call_later", "call_at", "call_soon_threadsafe", "run_in_executor"}
_PACKAGES = ("stratalog_broker", "stratalog_bookies", "stratalog_core")
_LARGE_BYTES = 4096
_CLIENT = "test client"
_TURNS = 100
"""Of the event loop: enough for a request and its answer between two parts of this process."""


class Tally:
    """Counts by name while :meth:`counting`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_on = False
        self._kinds: dict[str, str | None] = {}
        self.large_buffers: dict[int, Any] = {}
        """Payload buffers that were handed to the network between our processes, by identity: kept, so that none is reused."""

    def note(self, name: str, count: int = 1) -> None:
        if self._is_on:
            self._counts[name] += count

    def note_parts(self, parts: Sequence[Buffer]) -> None:
        """Buffers of a frame: bytes in all, and which memory the large ones lie in."""
        self.note("frame bytes", sum(map(len, parts)))
        for part in parts:
            if self._is_on and len(part) >= _LARGE_BYTES:
                owner = memoryview(part).obj
                self.large_buffers[id(owner)] = owner

    async def of(self, scenario: Callable[[], Awaitable[None]], *, repetitions: int = 7) -> dict[str, int]:
        """The smallest count of each name over ``repetitions``."""
        seen: list[Counter[str]] = []
        for _ in range(repetitions):
            with _time_stands_still():
                await _what_is_due()
                self._counts, self._is_on = Counter(), True
                self.large_buffers.clear()
                await scenario()
                self._is_on = False
            self._counts["payload buffers sent"] = len(self.large_buffers)
            seen.append(self._counts)
        return {name: min(counts[name] for counts in seen) for name in set().union(*seen)}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """With the profiling hook in this thread and in those started meanwhile."""
        before = sys.getprofile()
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._is_on:
            return
        if event == "c_call":
            if argument.__name__ in _SYSTEM_CALLS:
                self._counts[f"{argument.__name__} ({_side(frame)})"] += 1
        elif event == "call":
            name = frame.f_code.co_name
            if name in _LOOP_CALLS and "asyncio" in frame.f_code.co_filename and _side(frame) != _CLIENT:
                self._counts[name] += 1
            package = self._package(frame.f_code.co_filename)
            if package is not None:
                self._counts[f"calls in {package}"] += 1

    def _package(self, file: str) -> str | None:
        if file not in self._kinds:
            self._kinds[file] = next((package for package in _PACKAGES if package in Path(file).parts), None)
        return self._kinds[file]


@contextmanager
def _time_stands_still() -> Iterator[None]:
    """For the running loop: timers neither fire nor are missed; sockets go on."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now)
        yield


async def _what_is_due() -> None:
    """Timers that came due on a slow machine fire, and what they set off ends: each repetition would count them otherwise."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _side(frame: FrameType | None) -> str:
    """Classify a call: between our processes, between broker and client, other calls of ours, or the client's own."""
    name = ""
    while frame is not None and not name.startswith(("stratalog", "unit.", "asyncio.streams")):
        # A socket that is read belongs to the protocol that the loop will hand the bytes to.
        owner = frame.f_locals.get("self") if frame.f_code.co_name.startswith("_read_ready") else None
        protocol = getattr(owner, "_protocol", None)
        name = type(protocol).__module__ if protocol is not None else frame.f_globals.get("__name__", "")
        frame = frame.f_back
    if name.startswith("stratalog_broker"):
        return "client's connection"
    if name in ("stratalog_core.rpc.tcp", "stratalog_core.rpc.frame_protocol"):
        return "between ours"
    return "others" if name.startswith("stratalog") else _CLIENT


class CountingTransport(TcpTransport):
    """TCP whose requests are counted by method."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def channel(self, address: str) -> TcpChannel:
        return _CountingChannel(super().channel(address), self._tally)  # type: ignore[return-value]


class _CountingChannel:
    def __init__(self, channel: Channel, tally: Tally) -> None:
        self._channel = channel
        self._tally = tally

    def send(self, method: int, parts: Sequence[Buffer], on_reply: OnReply, timeout_s: float) -> None:
        self._tally.note(f"request 0x{method:04x}")
        self._tally.note_parts(parts)
        self._channel.send(method, parts, on_reply, timeout_s)

    async def call(self, method: int, parts: Sequence[Buffer], timeout_s: float) -> memoryview:
        self._tally.note(f"request 0x{method:04x}")
        return await self._channel.call(method, parts, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class CountingFiles(SystemFiles):
    """Files whose writes and syncs are counted."""

    def __init__(self, root: Path, tally: Tally) -> None:
        super().__init__(root)
        self._tally = tally

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> SystemFile:
        return _CountingFile(super().open(path, create=create, direct=direct), self._tally)  # type: ignore[return-value]


class _CountingFile:
    def __init__(self, file: File, tally: Tally) -> None:
        self._file = file
        self._tally = tally

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        self._tally.note("writes")
        self._tally.note("written bytes", sum(map(len, buffers)))
        self._file.pwritev(buffers, position)

    def begin_write(self, buffers: Sequence[Buffer], position: int, done: OnWritten) -> bool:
        begun = isinstance(self._file, BeginsWrites) and self._file.begin_write(buffers, position, done)
        if begun:
            self._tally.note("writes without a thread")
            self._tally.note("written bytes", sum(map(len, buffers)))
        return begun

    def datasync(self) -> None:
        self._tally.note("datasyncs")
        self._file.datasync()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
