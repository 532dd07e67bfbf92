"""Where each entry is stored: (ledger, entry) → (file, position, length, CRC, LAC).

A ledger's entries in one log file are a ``Run``: rows of 32 bytes in one buffer, ascending by entry id. The run of the open
file grows. When the file is closed its runs are stored beside it (``checkpoint.py``), and their rows may then be evicted and
loaded again (``RunCache``). One small object per ledger and file always stays in memory. While compaction moves an entry, two
runs hold it; both are valid until the older file is freed. It does no I/O.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

ROW: Final = struct.Struct(">QIIIqI")
"""Entry id, position of the payload, payload bytes, entry CRC, LAC, CRC of the payload's head. Stored in this form; permanent.
"""
ROW_BYTES: Final = ROW.size
SMALL_BYTES_MAX: Final = 4096
"""Maximum payload without a head CRC. A read of such a head reads and checks the whole payload, one or two pages, so that adds
of small entries, which arrive at the highest rate, do not pay for head CRCs.
"""
_ENTRY_ID = struct.Struct(">Q")


class Row(NamedTuple):
    """Where one entry is in a file."""

    entry_id: int
    position: int
    payload_bytes: int
    crc: int
    lac: int
    head_crc: int
    """CRC32C of the first ``HEAD_BYTES_MAX`` bytes of a payload larger than ``SMALL_BYTES_MAX``; else 0."""


class Run:
    """Entries of one ledger in one log file. ``rows`` is None while they are evicted; ``stored_at`` is then their position in
    the index file.
    """

    __slots__ = ("count", "first", "generation", "last", "ledger_id", "payload_bytes", "rows", "stored_at", "stored_crc")

    def __init__(self, ledger_id: int, generation: int) -> None:
        self.ledger_id = ledger_id
        self.generation = generation
        self.first = 0
        self.last = -1
        self.count = 0
        self.payload_bytes = 0
        self.rows: bytearray | bytes | None = bytearray()
        self.stored_at = 0
        self.stored_crc = 0

    def add(self, entry_id: int, row: bytes) -> None:
        """Insert a packed row. ``DiskCore`` appends rows itself on the hot path."""
        assert isinstance(self.rows, bytearray), "only a run of the open file grows"
        if entry_id > self.last:
            self.rows += row
        else:
            slot = self._slot(entry_id) * ROW_BYTES
            self.rows[slot:slot] = row
        self.first = entry_id if self.count == 0 else min(entry_id, self.first)
        self.last = max(entry_id, self.last)
        self.count += 1

    def is_contiguous(self) -> bool:
        return self.count == self.last - self.first + 1

    def may_hold(self, entry_id: int) -> bool:
        return self.first <= entry_id <= self.last

    def find(self, entry_id: int) -> Row | None:
        """The row of an entry, or None. The rows must be in memory."""
        if not self.may_hold(entry_id):
            return None
        slot = self._slot(entry_id)
        row = self._row(slot)
        return row if row.entry_id == entry_id else None

    def between(self, first: int, last: int) -> Iterator[Row]:
        """Rows of the entries ``first`` to ``last``, ascending. The rows must be in memory."""
        for slot in range(self._slot(first), self.count):
            row = self._row(slot)
            if row.entry_id > last:
                return
            yield row

    def _row(self, slot: int) -> Row:
        assert self.rows is not None, "rows are loaded before they are read"
        return Row._make(ROW.unpack_from(self.rows, slot * ROW_BYTES))

    def _slot(self, entry_id: int) -> int:
        """Slot of the first row whose entry id is not less than ``entry_id``."""
        if entry_id <= self.first:
            return 0
        if self.is_contiguous():
            return min(entry_id - self.first, self.count)
        assert self.rows is not None, "rows are loaded before they are searched"
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if _ENTRY_ID.unpack_from(self.rows, middle * ROW_BYTES)[0] < entry_id:
                low = middle + 1
            else:
                high = middle
        return low


class Ledger:
    """The state of one ledger on this disk. ``last_entry`` is the greatest id ever placed, durable or not."""

    __slots__ = ("active", "fenced", "lac", "last_entry", "ledger_id", "runs")

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.fenced = False
        self.lac = -1
        self.last_entry = -1
        self.runs: list[Run] = []
        self.active: Run | None = None

    def runs_between(self, first: int, last: int) -> list[Run]:
        """Runs that may hold entries of the range, ascending by first entry; for equal first entries the newer file first."""
        runs = [run for run in self.runs if run.first <= last and run.last >= first and run.count]
        runs.sort(key=lambda run: (run.first, -run.generation))
        return runs


def clusters(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Split runs (ascending by first entry) into groups that do not overlap; nearly every group has one run."""
    cluster: list[Run] = []
    last = -1
    for run in runs:
        if cluster and run.first > last:
            yield cluster
            cluster = []
        cluster.append(run)
        last = max(last, run.last)
    if cluster:
        yield cluster


def merged(cluster: list[Run], first: int, last: int, is_visible: Callable[[Run, Row], bool]) -> Iterator[tuple[Run, Row]]:
    """Visible rows of a cluster in the range, ascending, each entry once; of two visible copies the one in the newer file.

    A copy made by compaction must not hide the original before it is durable.
    """
    if len(cluster) == 1:
        run = cluster[0]
        return ((run, row) for row in run.between(first, last) if is_visible(run, row))
    newest: dict[int, tuple[Run, Row]] = {}
    for run in sorted(cluster, key=lambda run: run.generation):
        newest.update((row.entry_id, (run, row)) for row in run.between(first, last) if is_visible(run, row))
    return (newest[entry_id] for entry_id in sorted(newest))


class RunCache:
    """Bounds the memory of stored runs' rows. Evicts the least recently used."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._loaded: OrderedDict[Run, None] = OrderedDict()
        self.bytes = 0

    def keep(self, run: Run, rows: bytes) -> None:
        """Cache the rows of a stored run."""
        self.drop(run)
        run.rows = rows
        self._loaded[run] = None
        self.bytes += len(rows)

    def touch(self, run: Run) -> None:
        if run in self._loaded:
            self._loaded.move_to_end(run)

    def drop(self, run: Run) -> None:
        """Evict the rows of a stored run, if cached."""
        if run in self._loaded:
            del self._loaded[run]
            self.bytes -= run.count * ROW_BYTES
            run.rows = None

    def trim(self) -> None:
        """Evict down to the bound. Called between operations, so that the rows an operation loaded stay while it runs."""
        while self.bytes > self._bytes_max:
            self.drop(next(iter(self._loaded)))
