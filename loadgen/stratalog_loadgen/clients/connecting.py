"""Idle connections: opens many, sends ApiVersions on each, keeps them open, and measures requests on them."""

from __future__ import annotations

import asyncio
import itertools
import resource
import struct
import time

from stratalog_core.errors import Invalid
from stratalog_core.rpc.addresses import split_address
from stratalog_loadgen.processes.control import Control, cpu_s, resident_bytes
from stratalog_loadgen.processes.loads import ConnectionLoad, Counted
from stratalog_loadgen.results.histogram import Histogram

_API_VERSIONS_V0 = struct.pack(">hhih", 18, 0, 1, 5) + b"bench"
_REQUEST = struct.pack(">i", len(_API_VERSIONS_V0)) + _API_VERSIONS_V0
_CONNECTING_AT_ONCE = 64
_ANSWER_TIMEOUT_S = 30.0
_PROBE_INTERVAL_S = 0.02
_SPARE_DESCRIPTORS = 64

# One source address has a limited number of ports for connections to one server.
_CONNECTIONS_PER_SOURCE = 10_000

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run_connections(load: ConnectionLoad, control: Control) -> Counted:
    """Open, hold and close connections. ``latency`` is that of requests on one connection after another while all are open."""
    allow_descriptors(load.connections + _SPARE_DESCRIPTORS)
    control.wait_for_go()
    return asyncio.run(_Connections(load, control).run())


def allow_descriptors(wanted: int) -> None:
    """Raise this process's limit on open files. Raises ``Invalid`` if the machine allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < wanted:
        raise Invalid(f"{wanted} connections need {wanted} open files, but the limit is {hard}: raise it with `ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Connections:
    def __init__(self, load: ConnectionLoad, control: Control) -> None:
        self._load = load
        self._control = control
        self._limit = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._latency = Histogram()
        self._opening = Histogram()
        self._streams: list[_Stream] = []
        self._failed = 0
        self._failure = ""

    async def run(self) -> Counted:
        addresses = itertools.islice(itertools.cycle(self._load.addresses), self._load.connections)
        await asyncio.gather(*(self._open(number, address) for number, address in enumerate(addresses)))
        opened_s = self._control.elapsed_s()
        cpu = cpu_s()
        await self._hold()
        lost = sum(reader.at_eof() for reader, _ in self._streams)
        for _, writer in self._streams:
            writer.close()
        return self._counted(opened_s, lost, cpu_s() - cpu)

    async def _open(self, number: int, address: str) -> None:
        host, port = split_address(address)
        async with self._limit:
            began_ns = time.monotonic_ns()
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    stream = await asyncio.open_connection(host, port, local_addr=source_of(host, number))
                    await _ask(stream)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as failure:
                self._failed += 1
                self._failure = f"{address}: {failure or type(failure).__name__}"
                return
            self._opening.record((time.monotonic_ns() - began_ns) // 1000)
            self._streams.append(stream)
            self._control.running(len(self._streams))

    async def _hold(self) -> None:
        until = time.monotonic() + self._load.duration_s
        for stream in itertools.cycle(self._streams):
            if time.monotonic() >= until or not self._control.running(len(self._streams)):
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)
            if not stream[0].at_eof():
                await self._probe(stream)

    async def _probe(self, stream: _Stream) -> None:
        began_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await _ask(stream)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as failure:
            self._failure = str(failure) or type(failure).__name__
            stream[1].close()
            return
        self._latency.record((time.monotonic_ns() - began_ns) // 1000)

    def _counted(self, opened_s: float, lost: int, cpu: float) -> Counted:
        return Counted(
            records=len(self._streams) - lost,
            record_bytes=0,
            began_at=self._control.began,
            ended_at=self._control.began + opened_s,
            sent=self._load.connections,
            failed=self._failed + lost,
            failure=self._failure,
            latency=self._latency.buckets(),
            latency_max_us=self._latency.maximum_us,
            behind=self._opening.buckets(),
            behind_max_us=self._opening.maximum_us,
            cpu_s=cpu,
            resident_bytes=resident_bytes(),
        )


def source_of(host: str, number: int) -> tuple[str, int] | None:
    """Return the source address of connection ``number``: 127.0.0.1, 127.0.0.2 … for loopback, else None (automatic)."""
    return (f"127.0.0.{1 + number // _CONNECTIONS_PER_SOURCE % 250}", 0) if host.startswith("127.") else None


async def _ask(stream: _Stream) -> None:
    reader, writer = stream
    writer.write(_REQUEST)
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    await reader.readexactly(size)
