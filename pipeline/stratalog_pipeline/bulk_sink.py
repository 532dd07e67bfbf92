"""Writes rows as sealed segments directly to the bucket, as a new topic that appears at once. Independent of Spark.

The driver reserves the topic (``begin``), tasks write segments (``write_rows``), the driver attaches them (``commit``) or
abandons them (``abandon``). One task writes all rows of a partition; offsets are contiguous, from 0 or ``firstOffsets``. A
retried task writes its segments again. Only the segments of the attempt that succeeded are attached; a tiering worker deletes
the others as orphans.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from stratalog_core.batches.compression import NAMES
from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_pipeline.options import check_known
from stratalog_tiering.attach.attachment import (
    AttachPorts,
    Reserved,
    SegmentPorts,
    SegmentsWriter,
    finish,
    give_up,
    new_topic,
    reserve,
)
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.core.attach_job import MadeSegment
from stratalog_tiering.core.restoring import PartitionHistory
from stratalog_tiering.store import ObjectStore, open_store

KNOWN: Final = ("store", "metadata", "topic", "partitions", "compression", "replicationFactor", "firstOffsets")
CONFIG: Final = "config."
RESERVED_MS: Final = 7 * 24 * 3_600_000
"""The longest time that a job may take. After it, a worker deletes the objects of a job that died."""
PARTITIONS_MAX: Final = 100_000
OFFSET_MAX: Final = 2**63 - 2**32
"""The largest offset that a batch may begin at."""
_THREADS: Final = 4
_PARTITIONS_AT_ONCE: Final = 8
_SETTINGS: Final = TieringSettings(worker_id="bulk-sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOptions:
    """The parsed options of one bulk write. ``codec`` is the number of a compression in batches.

    ``first_offsets`` are those of each partition's first row, in the order of their numbers.
    """

    store: str = field(repr=False)
    metadata: tuple[str, ...]
    topic: str
    partitions: int
    codec: int
    replication_factor: int | None
    configs: Mapping[str, str]
    first_offsets: tuple[int, ...]


def parse_bulk_options(given: Mapping[str, str]) -> BulkOptions:
    """Parse the options of a bulk write. Raises ``Invalid`` that names the option and the remedy."""
    options = {name.lower(): text.strip() for name, text in given.items()}
    configs = {name[len(CONFIG) :]: text for name, text in given.items() if name.lower().startswith(CONFIG)}
    for name in given:
        if not name.lower().startswith(CONFIG):
            check_known(name, KNOWN, ())
    for name, meaning in (
        ("topic", "the name of the new topic"),
        ("metadata", "the cluster's metadata nodes, as HOST:PORT,…"),
        ("partitions", "the number of the topic's partitions"),
    ):
        if not options.get(name):
            raise Invalid(f"option '{name}' is missing: {meaning}")
    compression = options.get("compression", "zstd").lower()
    if compression not in NAMES:
        raise Invalid(f"option 'compression' is {compression!r}; choose one of {', '.join(NAMES)}")
    factor = options.get("replicationfactor")
    partitions = _number("partitions", options["partitions"], PARTITIONS_MAX)
    return BulkOptions(
        store=options["store"],
        metadata=tuple(address.strip() for address in options["metadata"].split(",")),
        topic=options["topic"],
        partitions=partitions,
        codec=NAMES[compression],
        replication_factor=None if factor is None else _number("replicationFactor", factor, 100),
        configs=configs,
        first_offsets=_first_offsets(options.get("firstoffsets"), partitions),
    )


def _first_offsets(text: str | None, partitions: int) -> tuple[int, ...]:
    if text is None:
        return (0,) * partitions
    try:
        offsets = msgspec.json.decode(text, type=list[int])
    except MALFORMED as malformed:
        raise Invalid(f"option 'firstOffsets' must look like [0, 42]: {malformed}") from malformed
    if len(offsets) != partitions or any(not 0 <= offset <= OFFSET_MAX for offset in offsets):
        raise Invalid(f"option 'firstOffsets' must have {partitions} offsets from 0 to {OFFSET_MAX}, one for each partition")
    return tuple(offsets)


def _number(name: str, text: str, maximum: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise Invalid(f"option {name!r} is {text!r}; give a number from 1 to {maximum}")
    return int(text)


Written = dict[int, list[MadeSegment]]
"""The segments that a task wrote, by partition."""


def begin(options: BulkOptions) -> Reserved:
    """Reserve the topic. Raises ``Conflict`` if the name is taken, ``Invalid``, ``Unavailable``."""

    async def reserved() -> Reserved:
        async with _cluster(options) as ports:
            topic = new_topic(
                ports.metadata.view, options.topic, options.partitions, options.configs, options.replication_factor
            )
            return await reserve(ports, topic, RESERVED_MS)

    return asyncio.run(reserved())


def write_rows(batches: Iterable[pa.RecordBatch], options: BulkOptions, reserved: Reserved) -> Written:
    """Write all rows of a task. Rows of one partition must follow one another.

    Raises ``Invalid`` for a row without a partition, or partitions that are mixed, and what the store raises.
    """
    return asyncio.run(_write(_Runs(iter(batches), options.partitions), options, reserved))


async def _write(runs: _Runs, options: BulkOptions, reserved: Reserved) -> Written:
    written: Written = {}
    async with _bucket(options) as ports:
        writer = SegmentsWriter(ports, reserved)
        while (partition := await runs.next_partition()) is not None:
            if partition in written:
                raise Invalid(
                    f"rows of partition {partition} do not follow one another: sort each task's rows by column 'partition', as"
                    " `stratalog_pipeline.jobs.backfill.backfill` does"
                )
            first = options.first_offsets[partition]
            chunks = _encoded(runs, first, options.codec, ports.clock.wall_ms())
            written[partition] = [made async for made in writer.segments(partition, first, chunks)]
    return written


async def _encoded(runs: _Runs, offset: int, codec: int, now_ms: int) -> AsyncIterator[Sequence[Buffer]]:
    # Imported in tasks only: numba costs 0.6 s, and Spark starts a process for the plan of a write and one for its commit.
    from stratalog_pipeline.arrow.encode import encode_batches

    while (rows := await runs.next_rows()) is not None:
        yield await asyncio.to_thread(list, encode_batches(rows, offset, codec, now_ms))
        offset += rows.num_rows


class _Runs:
    """Cuts the batches of a task where the partition changes. The rows come from Spark, so waiting for them blocks a thread."""

    def __init__(self, batches: Iterator[pa.RecordBatch], partitions: int) -> None:
        self._batches = batches
        self._partitions = partitions
        self._waiting: list[tuple[int, pa.RecordBatch]] = []
        self._partition = -1

    async def next_partition(self) -> int | None:
        """The partition of the next rows, which ``next_rows`` returns then; None after the last."""
        await self._fill()
        self._partition = self._waiting[0][0] if self._waiting else -1
        return self._partition if self._waiting else None

    async def next_rows(self) -> pa.RecordBatch | None:
        """The next rows of this partition; None after its last."""
        await self._fill()
        if not self._waiting or self._waiting[0][0] != self._partition:
            return None
        return self._waiting.pop(0)[1]

    async def _fill(self) -> None:
        while not self._waiting:
            batch = await asyncio.to_thread(next, self._batches, None)
            if batch is None:
                return
            self._waiting = self._cut(batch)

    def _cut(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        if not batch.num_rows:
            return []
        column = batch.column("partition")
        if column.null_count:
            raise Invalid("a row has no partition; fill column 'partition'")
        values = column.to_numpy()
        if values.min() < 0 or values.max() >= self._partitions:
            wrong = values.min() if values.min() < 0 else values.max()
            raise Invalid(f"a row has partition {wrong}; the topic has {self._partitions}, from 0 on")
        starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), batch.num_rows]
        return [(int(values[first]), batch.slice(first, last - first)) for first, last in pairwise(starts)]


def commit(options: BulkOptions, reserved: Reserved, tasks: Sequence[Written]) -> int:
    """Attach the segments of all tasks, and return the number of records.

    Raises ``Invalid`` if two tasks wrote one partition, ``Conflict``, ``Unavailable``, and ``OutcomeUnknown``: the topic may
    exist then.
    """
    owners: dict[int, list[MadeSegment]] = {}
    for written in tasks:
        for partition, made in written.items():
            if partition in owners:
                raise Invalid(
                    f"rows of partition {partition} are in several tasks: repartition by column 'partition' first, as"
                    " `stratalog_pipeline.jobs.backfill.backfill` does"
                )
            owners[partition] = made

    async def attached() -> list[PartitionHistory]:
        async with _cluster(options) as ports:
            writer = SegmentsWriter(ports, reserved)

            async def partition(numbered: tuple[int, int]) -> PartitionHistory:
                index, first = numbered
                return await writer.finish(index, first, owners.get(index, ()))

            made = await bounded_map(partition, enumerate(options.first_offsets), _PARTITIONS_AT_ONCE)
            await finish(ports, reserved, made)
            return made

    return sum(partition.record_count for partition in asyncio.run(attached()))


def abandon(options: BulkOptions, reserved: Reserved) -> None:
    """Have a tiering worker delete what was written."""

    async def given_up() -> None:
        async with _cluster(options) as ports:
            await give_up(ports, reserved)

    asyncio.run(given_up())


@asynccontextmanager
async def _bucket(options: BulkOptions) -> AsyncIterator[SegmentPorts]:
    async with _store(options.store) as (store, background):
        yield SegmentPorts(
            store=store, clock=SystemClock(), random=random.SystemRandom(), background=background, settings=_SETTINGS
        )


@asynccontextmanager
async def _cluster(options: BulkOptions) -> AsyncIterator[AttachPorts]:
    transport = TcpTransport()
    client = QuorumClient(list(options.metadata), transport, SystemClock(), random.SystemRandom())
    try:
        await client.start()
        async with _store(options.store) as (store, background):
            yield AttachPorts(
                metadata=client, store=store, clock=SystemClock(), random=random.SystemRandom(), background=background,
                settings=_SETTINGS,
            )  # fmt: skip
    finally:
        await client.close()
        await transport.close()


@asynccontextmanager
async def _store(url: str) -> AsyncIterator[tuple[ObjectStore, ThreadBackground]]:
    background = ThreadBackground(_THREADS, "stratalog-bulk-sink")
    try:
        store = open_store(url, background=background, clock=SystemClock(), random=random.SystemRandom(), threads=_THREADS)
        try:
            yield store, background
        finally:
            await store.close()
    finally:
        background.close()
