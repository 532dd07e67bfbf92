"""Measures the ledger client: entries/s, MB/s, latency and client CPU over real bookies on loopback, each in its own process.

    PYTHONPATH=tests:. python benchmarks/ledger_client.py --data DIR [--bookies 3] [--seconds 3] [--profile]

Each case keeps a window of unconfirmed entries on some writers (RF 3, acks of 2, fdatasync before each ack) and counts what is
confirmed. CPU is of the client's process alone; latency is from append to on_confirmed.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from uuid import UUID

import uvloop
from support.embedded_quorum import embedded_quorum

from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_core.errors import Overloaded, StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import CLUSTER_KEY, Bookie


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``window`` entries of ``entry_bytes`` are unconfirmed on each of ``writers``."""

    name: str
    entry_bytes: int
    writers: int
    window: int


CASES = (
    Case(name="1 KiB, one outstanding", entry_bytes=1024, writers=1, window=1),
    Case(name="1 KiB, 50 partitions x 4", entry_bytes=1024, writers=50, window=4),
    Case(name="1 KiB, 50 partitions x 64", entry_bytes=1024, writers=50, window=64),
    Case(name="16 KiB, 12 partitions x 8", entry_bytes=16 * 1024, writers=12, window=8),
    Case(name="128 KiB, 12 partitions x 5", entry_bytes=128 * 1024, writers=12, window=5),
    Case(name="1 MiB, 12 partitions x 2", entry_bytes=1024 * 1024, writers=12, window=2),
)


@dataclass(slots=True)
class Load:
    """Listener and source of one writer: each confirmed entry is followed by another."""

    payload: memoryview
    window: int
    writer: LedgerWriter | None = None
    lac: int = -1
    sent_at: dict[int, float] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    running: bool = True

    def fill(self) -> None:
        writer = self.writer
        assert writer is not None
        while self.running and writer.next_entry_id - 1 - self.lac < self.window:
            try:
                self.sent_at[writer.append(self.payload)] = time.perf_counter()
            except Overloaded:
                # The slowest bookie lags by the bound on held bytes: its pace is everybody's now.
                asyncio.get_running_loop().call_later(0.005, self.fill)
                return

    def on_first_copy(self, entry_id: int) -> None:
        pass

    def on_confirmed(self, lac: int) -> None:
        now = time.perf_counter()
        for entry_id in range(self.lac + 1, lac + 1):
            self.latencies_s.append(now - self.sent_at.pop(entry_id))
        self.lac = lac
        self.fill()

    def on_failed(self, error: StratalogError) -> None:
        raise SystemExit(f"the writer failed: {error}")


async def run_case(client: LedgerClient, case: Case, seconds: float) -> str:
    payload = memoryview(bytes(case.entry_bytes))
    loads = [Load(payload=payload, window=case.window) for _ in range(case.writers)]
    for number, load in enumerate(loads):
        spec = LedgerSpec(
            topic_id=UUID(int=1), partition=number, base_offset=0, leader_epoch=1, ensemble_size=3, write_quorum=3, ack_quorum=2
        )  # fmt: skip
        load.writer = await client.create(spec, updates=lambda ledger: (), listener=load)
    for load in loads:
        load.fill()
    await asyncio.sleep(seconds / 4)
    for load in loads:
        load.latencies_s.clear()
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu, elapsed = time.process_time() - cpu, time.perf_counter() - began
    latencies_s = sorted(latency for load in loads for latency in load.latencies_s)
    for load in loads:
        load.running = False
    for load in loads:
        assert load.writer is not None
        await load.writer.seal(0)
    entries = len(latencies_s)
    gigabytes = entries * case.entry_bytes / 1e9
    return (
        f"{case.name:28} {entries / elapsed:9,.0f} entries/s {gigabytes * 1000 / elapsed:8,.0f} MB/s"
        f"  CPU {cpu / elapsed:5.0%} {cpu / max(gigabytes, 1e-9):7.2f} s/GB {cpu / max(entries, 1) * 1e6:7.1f} us/entry"
        f"  p50 {latencies_s[entries // 2] * 1000:7.2f} ms  p99 {latencies_s[entries * 99 // 100] * 1000:7.2f} ms"
    )


async def serve_bookie(name: str, directory: Path, metadata_address: str) -> None:
    """One bookie, until its standard input closes."""
    transport, clock, random = TcpTransport(), SystemClock(), Random()
    settings = BookieSettings(bookie_id=name, data_dirs=(str(directory),), scrub_bytes_per_s=0, lease_ms=60_000)
    metadata = QuorumClient([metadata_address], transport, clock, random)
    await metadata.start()
    background = ThreadBackground(settings.threads, name)
    server = BookieServer(settings, metadata, transport, (SystemFiles(directory),), clock, random, background)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()
    await metadata.close()
    await transport.close()


async def serve_metadata(directory: Path) -> None:
    """A quorum of one; prints its address; runs until its standard input closes."""
    transport = TcpTransport()
    async with embedded_quorum(directory, transport) as quorum:
        while quorum.client.view.get(CLUSTER_KEY) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        print(quorum.addresses[0], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def measure(options: argparse.Namespace, metadata_address: str) -> None:
    transport, clock, random = TcpTransport(), SystemClock(), Random()
    metadata = QuorumClient([metadata_address], transport, clock, random)
    await metadata.start()
    while len(list(metadata.view.all(Bookie))) < options.bookies:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    client = LedgerClient(metadata, transport, clock, random, LedgerClientSettings(bookie_silence_ms=5000))
    for case in CASES:
        if options.case in case.name:
            print(await run_case(client, case, options.seconds), flush=True)
    await client.close()
    await metadata.close()
    await transport.close()


def spawn(role: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--role", role, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_all(options: argparse.Namespace) -> None:
    data = Path(options.data)
    metadata = spawn("metadata", "--data", str(data / "metadata"))
    assert metadata.stdout is not None
    address = metadata.stdout.readline().strip()
    processes = [metadata]
    processes += [
        spawn("bookie", "--name", f"b{number}", "--data", str(data / f"b{number}"), "--metadata", address)
        for number in range(options.bookies)
    ]
    try:
        profile = cProfile.Profile() if options.profile else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if profile is not None:
                profile.enable()
            runner.run(measure(options, address))
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    finally:
        for process in reversed(processes):
            process.communicate()
        shutil.rmtree(data, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory for the run; removed afterwards")
    parser.add_argument("--bookies", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="measured for so long in each case")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--metadata", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    roles: dict[str, Callable[[], Awaitable[None]]] = {
        "bookie": lambda: serve_bookie(options.name, Path(options.data), options.metadata),
        "metadata": lambda: serve_metadata(Path(options.data)),
    }
    if not options.role:
        run_all(options)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(roles[options.role]())  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
