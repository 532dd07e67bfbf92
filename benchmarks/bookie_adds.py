"""How fast one bookie takes entries, over its real protocol: throughput with many outstanding, latency with one.

The bookie runs in a process of its own, on a directory given on the command line, so that its CPU time can be told from the
client's. Ledgers are left behind and deleted after so many bytes, as after an offload, so that log files are recycled; with
``--keep`` nothing is deleted. Prints MB/s, entries/s, CPU seconds per GB of both, and p50/p99 of single adds::

    PYTHONPATH=tests:. python benchmarks/bookie_adds.py --directory /tmp/bookie-bench --seconds 5
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from time import perf_counter

import psutil
import uvloop

from stratalog_bookies.protocol import messages
from stratalog_core.ports import Channel
from stratalog_core.rpc.tcp import TcpTransport

TIMEOUT_S = 30.0
LEDGER_MILLIONS = 8
ROLL_BYTES = 128 * 1024 * 1024


async def serve(directory: Path) -> None:
    """The server's side: an embedded metadata node and one bookie, until SIGTERM."""
    from random import Random

    from support.embedded_quorum import embedded_quorum

    from stratalog_bookies.config import BookieSettings
    from stratalog_bookies.node.server import BookieServer
    from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
    from stratalog_metadata.records import LEDGER_IDS
    from stratalog_metadata.state.commands import Allocate, Command

    transport = TcpTransport()
    async with embedded_quorum(directory / "metadata", transport) as quorum:
        # Ledgers whose ids were never handed out are not deleted: metadata would have lost its memory.
        for _ in range(LEDGER_MILLIONS):
            await quorum.client.propose(Command(updates=(Allocate(counter=LEDGER_IDS, count=1_000_000),)))
        data = directory / "bookie"
        settings = BookieSettings(bookie_id="bench", data_dirs=(str(data),))
        background = ThreadBackground(settings.threads, "bookie")
        server = BookieServer(settings, quorum.client, transport, [SystemFiles(data)], SystemClock(), Random(), background)
        await server.start()
        (directory / "address").write_text(server.address)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await server.close()
        background.close()
    await transport.close()


class Load:
    """Adds of ``batch`` entries to ``ledgers`` ledgers in turn, ``outstanding`` at a time."""

    def __init__(
        self, channel: Channel, entry_bytes: int, batch: int, first_ledger: int, ledgers: int, *, keep: bool = False
    ) -> None:
        self._channel = channel
        self._keep = keep
        self._bytes_left = ROLL_BYTES
        self._rolling: set[asyncio.Task[memoryview]] = set()
        self._payload = os.urandom(entry_bytes)
        self._batch = batch
        self._ledgers = [[first_ledger + index, 0] for index in range(ledgers)]
        self._turn = 0
        self.entries = 0
        self.latencies_s: list[float] = []

    def parts(self) -> list[bytes | bytearray | memoryview]:
        headers = []
        for _ in range(self._batch):
            ledger = self._ledgers[self._turn % len(self._ledgers)]
            self._turn += 1
            headers.append(messages.pack_entry(ledger[0], ledger[1], ledger[1] - 1, (self._payload,)))
            ledger[1] += 1
        return messages.encode_add(headers, [self._payload] * self._batch)

    def roll(self) -> None:
        """Go on in new ledgers, and have the old ones deleted when what is under way has arrived."""
        self._bytes_left += ROLL_BYTES
        old = [ledger_id for ledger_id, _ in self._ledgers]
        self._ledgers = [[ledger_id + len(old), 0] for ledger_id in old]
        left = tuple(ledger_id - len(old) for ledger_id in old)
        if not self._keep and left[0] > 0:
            body = messages.encode(messages.LedgerIds(ledger_ids=left))
            task = asyncio.get_running_loop().create_task(self._channel.call(messages.DELETE, [body], TIMEOUT_S))
            self._rolling.add(task)
            task.add_done_callback(self._rolling.discard)

    async def one(self) -> None:
        self._bytes_left -= self._batch * len(self._payload)
        if self._bytes_left < 0:
            self.roll()
        parts = self.parts()
        start = perf_counter()
        answer = await self._channel.call(messages.ADD, parts, TIMEOUT_S)
        self.latencies_s.append(perf_counter() - start)
        statuses = messages.decode_statuses(answer)
        assert not any(statuses), f"statuses {statuses!r}"
        self.entries += self._batch

    async def run(self, outstanding: int, seconds: float) -> float:
        start = perf_counter()

        async def lane() -> None:
            while perf_counter() - start < seconds:
                await self.one()

        await asyncio.gather(*(lane() for _ in range(outstanding)))
        return perf_counter() - start


async def measure(address: str, server: psutil.Process, seconds: float, *, keep: bool) -> None:
    transport = TcpTransport()
    channel = transport.channel(address)
    client = psutil.Process()
    cases = [
        ("128 KiB, 64 outstanding", 131_072, 1, 64),
        ("128 KiB x 8, 8 outstanding", 131_072, 8, 8),
        ("1 KiB, 256 outstanding", 1024, 1, 256),
        ("1 KiB x 100, 16 outstanding", 1024, 100, 16),
        ("128 KiB, one outstanding", 131_072, 1, 1),
        ("1 KiB, one outstanding", 1024, 1, 1),
    ]
    print(f"{'load':30}{'MB/s':>8}{'entries/s':>11}{'bookie s/GB':>13}{'client s/GB':>13}{'p50 ms':>9}{'p99 ms':>9}")
    for number, (name, entry_bytes, batch, outstanding) in enumerate(cases):
        load = Load(channel, entry_bytes, batch, 1_000_000 * (1 + number), 24, keep=keep)
        await load.run(outstanding, 0.3)
        load.entries, load.latencies_s = 0, []
        before_server, before_client = server.cpu_times(), client.cpu_times()
        elapsed_s = await load.run(outstanding, seconds)
        after_server, after_client = server.cpu_times(), client.cpu_times()
        gigabytes = load.entries * entry_bytes / 1e9
        latencies_ms = sorted(latency * 1e3 for latency in load.latencies_s)
        print(
            f"{name:30}{gigabytes * 1e3 / elapsed_s:8.0f}{load.entries / elapsed_s:11.0f}"
            f"{_cpu_s(before_server, after_server) / gigabytes:13.2f}{_cpu_s(before_client, after_client) / gigabytes:13.2f}"
            f"{latencies_ms[len(latencies_ms) // 2]:9.2f}{latencies_ms[int(len(latencies_ms) * 0.99)]:9.2f}"
        )
    await transport.close()


def _cpu_s(before: psutil._ntuples.pcputimes, after: psutil._ntuples.pcputimes) -> float:
    return float(after.user + after.system - before.user - before.system)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/bookie-bench"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--keep", action="store_true", help="delete nothing: the log only grows")
    parser.add_argument("--serve", action="store_true", help="internal: be the bookie")
    options = parser.parse_args()
    if options.serve:
        await serve(options.directory)
        return
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", "--directory", str(options.directory))
    try:
        address = options.directory / "address"
        async with asyncio.timeout(TIMEOUT_S):
            while not address.exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.05)
        await measure(address.read_text(), psutil.Process(process.pid), options.seconds, keep=options.keep)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        shutil.rmtree(options.directory, ignore_errors=True)


if __name__ == "__main__":
    uvloop.run(main())
