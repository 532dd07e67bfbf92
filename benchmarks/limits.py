"""Measures the limits of this machine: `python -m benchmarks.limits [--directory DIR]`.

Copying, checksums, the loopback interface, and durable writes in the sizes that a log has. One core, no queueing; medians of
several runs. Figures of any benchmark here are to be read beside these.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c

from stratalog_core.files.open_files import open_file

_MIB = 1024 * 1024
_RUNS = 5
_FILE_BYTES = 256 * _MIB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        limits = measure(Path(directory))
    if arguments.json:
        print(json.dumps(limits, indent=2))
        return
    for name, value in limits.items():
        print(f"{name:56} {value:10.2f}")


def measure(directory: Path) -> dict[str, float]:
    """Name with unit to median."""
    limits = {
        "copy in memory, 1 MiB, GB/s": _median(_copy),
        "CRC32C, 128 KiB, GB/s": _median(_checksum),
        "loopback, 128 KiB sends, GB/s": _median(lambda: _loopback(128 * 1024, 4000)),
        "loopback, 1 KiB there and back, µs": _median(lambda: _round_trips(2000)),
    }
    for label, direct in (("page cache and fdatasync", False), ("direct and synchronous", True)):
        for size in (4096, 128 * 1024, 4 * _MIB):
            limits |= _durable_writes(directory, label, size, direct=direct)
    return limits


def _median(run: Callable[[], float]) -> float:
    return statistics.median([run() for _ in range(_RUNS)])


def _copy() -> float:
    source, target = memoryview(os.urandom(_MIB)), memoryview(bytearray(_MIB))
    begun = time.perf_counter()
    for _ in range(1000):
        target[:] = source
    return 1000 * _MIB / (time.perf_counter() - begun) / 1e9


def _checksum() -> float:
    content = os.urandom(128 * 1024)
    begun = time.perf_counter()
    for _ in range(8000):
        crc32c(content)
    return 8000 * len(content) / (time.perf_counter() - begun) / 1e9


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for each in (near, far):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _loopback(send_bytes: int, count: int) -> float:
    near, far = _pair()

    def drain() -> None:
        into = bytearray(4 * _MIB)
        while far.recv_into(into):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    content = os.urandom(send_bytes)
    begun = time.perf_counter()
    for _ in range(count):
        near.sendall(content)
    near.close()
    reader.join()
    far.close()
    return count * send_bytes / (time.perf_counter() - begun) / 1e9


def _round_trips(count: int) -> float:
    near, far = _pair()

    def echo() -> None:
        while content := far.recv(65536):
            far.sendall(content)

    answering = threading.Thread(target=echo)
    answering.start()
    content = os.urandom(1024)
    begun = time.perf_counter()
    for _ in range(count):
        near.sendall(content)
        near.recv(65536)
    elapsed = time.perf_counter() - begun
    near.close()
    answering.join()
    far.close()
    return elapsed / count * 1e6


def _durable_writes(directory: Path, label: str, size: int, *, direct: bool) -> dict[str, float]:
    """Writes one behind the other into a file that exists, each durable before the next: time and CPU of one."""
    count = max(8, min(500, 64 * _MIB // size))
    content = os.urandom(size)
    file = open_file(directory / f"{size}-{direct}", create=True, direct=False)
    file.pwritev([bytes(_MIB)] * (_FILE_BYTES // _MIB), 0)
    file.datasync()
    file.close()
    elapsed, used = [], []
    for _ in range(_RUNS):
        file = open_file(directory / f"{size}-{direct}", create=False, direct=direct)
        file.datasync()
        begun, cpu = time.perf_counter(), time.process_time()
        for number in range(count):
            file.pwritev((content,), number * size)
            file.datasync()
        elapsed.append((time.perf_counter() - begun) / count)
        used.append((time.process_time() - cpu) / count)
        file.close()
    what = f"durable write of {size // 1024} KiB, {label}"
    return {f"{what}, µs": statistics.median(elapsed) * 1e6, f"{what}, CPU µs": statistics.median(used) * 1e6}


if __name__ == "__main__":
    main()
