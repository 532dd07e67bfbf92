"""The controls: a process that uses the store as a broker or a worker does, and does nothing else with the bytes.

``python -m benchmarks.cold.store_work`` takes a ``Plan`` as JSON, prints ``ready``, begins at ``go``, and prints a ``Done``.
Ranged GETs are those of the blocks that a broker reads, in the same order: partitions in turns, each from its beginning. They
are sent by obstore, a client that is not ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Final, Literal, cast

import msgspec
import uvloop

from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_loadgen.processes.control import cpu_s
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.store import STORE_THREADS, ObjectStore, UploadedPart, open_store

Range = tuple[str, int, int]
_PART_BYTES: Final = 8 * 1024 * 1024
_READ_BACK_BYTES: Final = 1024 * 1024
_AT_ONCE: Final = 4


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``read`` gets every block of ``topic`` once, ``repeat`` again and again until its standard input ends, ``sample`` gets
    ``count`` random blocks one after the other, ``write`` puts ``size`` bytes in parts and reads them back.
    """

    store: str
    kind: Literal["read", "repeat", "sample", "write"]
    topic: str = ""
    at_once: int = 1
    count: int = 0
    size: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """``began_at`` and ``ended_at`` are of the machine's monotonic clock, in seconds."""

    size: int
    began_at: float
    ended_at: float
    cpu_s: float
    seconds_each: list[float] = []

    @property
    def elapsed_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def window(self) -> tuple[float, float]:
        return self.began_at, self.ended_at


class StoreWork:
    """The process, ready to begin."""

    def __init__(self, plan: Plan, credentials: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.cold.store_work", msgspec.json.encode(plan).decode()]
        environ = {**os.environ, **credentials}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, process_group=0)
        if self._output.readline() != b"ready\n":
            raise RuntimeError(f"the control ended with {self._process.wait()} before it began; its errors are above")

    @property
    def _output(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdout)

    def begin(self) -> None:
        pipe = cast(IO[bytes], self._process.stdin)
        pipe.write(b"go\n")
        pipe.flush()

    def stop(self) -> Done:
        """End a ``repeat`` and return what it did."""
        cast(IO[bytes], self._process.stdin).close()
        return self.finish()

    def finish(self) -> Done:
        """Wait for the result. Raises ``RuntimeError`` if the process failed."""
        line = self._output.readline()
        if not line:
            raise RuntimeError(f"the control ended with {self._process.wait()}; its errors are above")
        return msgspec.json.decode(line, type=Done)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()


@contextmanager
def working(plan: Plan, credentials: Mapping[str, str]) -> Iterator[StoreWork]:
    """A process that is ready to work on ``plan``; it is gone at the end."""
    work = StoreWork(plan, credentials)
    try:
        yield work
    finally:
        work.end()


def run(plan: Plan, credentials: Mapping[str, str]) -> Done:
    """Carry out a plan that ends by itself."""
    with working(plan, credentials) as work:
        work.begin()
        return work.finish()


# -- in the process


async def block_ranges(store: ObjectStore, topic: str) -> list[Range]:
    """Every block of a topic: partitions in turns."""
    archive = Archive(store)
    descriptor = await archive.topic(topic)
    partitions: list[list[Range]] = []
    for partition in range(descriptor.partition_count):
        pointer = await archive.pointer(descriptor, partition)
        ranges: list[Range] = []
        if pointer is not None:
            async for entry in archive.segments(await archive.manifest(pointer)):
                footer = await archive.footer(entry)
                ranges += [(entry.key, entry.data_position + block.position, block.length) for block in footer.blocks]
        partitions.append(ranges)
    return in_turns(partitions)


def in_turns(partitions: Sequence[Sequence[Range]]) -> list[Range]:
    """The first of each, then the second of each …"""
    return [found for each in itertools.zip_longest(*partitions) for found in each if found is not None]


async def _get_all(store: ObjectStore, ranges: Iterator[Range], at_once: int) -> int:
    """Get all ranges with ``at_once`` requests in flight. Returns their bytes."""

    async def work() -> int:
        size = 0
        for key, start, length in ranges:
            size += len(await store.get_range(key, start, length))
        return size

    return sum(await asyncio.gather(*(work() for _ in range(at_once))))


def _until_input_ends(ranges: Sequence[Range], ended: asyncio.Event) -> Iterator[Range]:
    return itertools.takewhile(lambda _: not ended.is_set(), itertools.cycle(ranges))


async def _sample(store: ObjectStore, ranges: Sequence[Range], count: int) -> list[float]:
    """Seconds of each of ``count`` GETs of random blocks."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await store.get_range(*random.choice(ranges))
        seconds.append(time.perf_counter() - began)
    return seconds


async def _write(store: ObjectStore, size: int) -> int:
    """Put ``size`` bytes as one object in parts, and read it back. Returns the bytes written."""
    key = f"control/{random.getrandbits(64):016x}"
    content = memoryview(os.urandom(_PART_BYTES))
    upload = await store.create_upload(key, _PART_BYTES)
    numbers = iter(range(1, max(1, size // _PART_BYTES) + 1))

    async def work() -> list[UploadedPart]:
        return [await store.put_part(upload, number, [content]) for number in numbers]

    parts = [part for share in await asyncio.gather(*(work() for _ in range(_AT_ONCE))) for part in share]
    await store.complete_upload(upload, sorted(parts, key=lambda part: part.number))
    whole = len(parts) * _PART_BYTES
    await _get_all(store, ((key, start, _READ_BACK_BYTES) for start in range(0, whole, _READ_BACK_BYTES)), _AT_ONCE)
    await store.delete([key])
    return whole


async def _carry_out(plan: Plan) -> Done:
    background = ThreadBackground(STORE_THREADS, "store")
    store = open_store(f"{plan.store}&read_engine=obstore", background=background, clock=SystemClock(), random=random.Random())
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    ranges = await block_ranges(store, plan.topic) if plan.topic else []
    print("ready", flush=True)
    if await loop.run_in_executor(None, sys.stdin.readline) != "go\n":
        raise SystemExit(1)
    began, cpu, seconds = time.monotonic(), cpu_s(), []
    if plan.kind == "read":
        size = await _get_all(store, iter(ranges), plan.at_once)
    elif plan.kind == "repeat":
        waiting = loop.run_in_executor(None, sys.stdin.readline)
        waiting.add_done_callback(lambda _: ended.set())
        size = await _get_all(store, _until_input_ends(ranges, ended), plan.at_once)
    elif plan.kind == "sample":
        seconds = await _sample(store, ranges, plan.count)
        size = 0
    else:
        size = await _write(store, plan.size)
    done = Done(size=size, began_at=began, ended_at=time.monotonic(), cpu_s=cpu_s() - cpu, seconds_each=seconds)
    await store.close()
    background.close()
    return done


def main() -> None:
    plan = msgspec.convert(json.loads(sys.argv[1]), Plan)
    print(msgspec.json.encode(uvloop.run(_carry_out(plan))).decode(), flush=True)


if __name__ == "__main__":
    main()
