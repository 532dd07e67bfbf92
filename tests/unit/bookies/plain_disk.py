"""One disk of a bookie without an event loop: the core and its files; a test takes each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.disk_core import DiskCore, add_room, control_room
from stratalog_bookies.disk.core.lookup import Budget, RunsNeeded, locate
from stratalog_bookies.disk.log_files import STATE, LogFiles
from stratalog_bookies.disk.reads import read_places
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import ENTRY_HEADER_BYTES, Range, Status
from stratalog_core.ports import Files

KEY = b"0123456789abcdef"
Entry = tuple[int, int, bytes]
"""Ledger id, entry id, payload."""


class PlainDisk:
    """``Disk`` in single steps. Recovers what is on ``files`` when constructed."""

    def __init__(
        self, files: Files, *, file_bytes: int = 64 * 1024, index_bytes_max: int = 1 << 20, spares_max: int = 2
    ) -> None:
        self.store = LogFiles(files, KEY, file_bytes)
        self.spares_max = spares_max
        if not files.exists(STATE):
            recovery.create(self.store)
        contents = Contents(index_bytes_max=index_bytes_max, tombstones_max=100)
        self.core: DiskCore = recovery.recover(self.store, contents, KEY, ledgers_max=1000)

    @property
    def contents(self) -> Contents:
        return self.core.contents

    def add(self, *entries: Entry, flags: int = 0, lac_lag: int = 1) -> list[Status]:
        """Add entries in one request; nothing is durable yet."""
        headers = [messages.pack_entry(ledger, entry, entry - lac_lag, (payload,), flags) for ledger, entry, payload in entries]
        body = memoryview(b"".join(messages.encode_add(headers, [payload for *_, payload in entries])))
        return self.add_body(body)

    def add_body(self, body: memoryview) -> list[Status]:
        headers = messages.decode_add(body)
        self.make_room(add_room(len(headers), len(body)))
        start = messages.payloads_start(len(headers))
        added = self.core.add(headers, body, messages.COUNT_BYTES, start)
        for index, run in added.deferred:
            self.load([run])
            at = start + sum(header[3] for header in headers[:index])
            again = self.core.add(headers[index : index + 1], body, 4 + index * ENTRY_HEADER_BYTES, at)
            assert not again.deferred
            added.statuses[index] = again.statuses[0]
        return [Status(status) for status in added.statuses]

    def fence(self, *ledger_ids: int) -> None:
        self.make_room(control_room(len(ledger_ids)))
        self.core.fence(ledger_ids)

    def delete(self, *ledger_ids: int) -> None:
        self.make_room(control_room(len(ledger_ids)))
        self.core.delete(ledger_ids)

    def write_lac(self, ledger_id: int, lac: int) -> Status:
        self.make_room(control_room(1))
        return Status(self.core.write_lacs([(ledger_id, lac)])[0][0])

    def make_room(self, needed: int) -> None:
        if not self.core.takes(needed):
            generation = self.core.log.generation + 1
            self.store.prepare(generation)
            self.core.log.prepared_generation = generation

    def commit(self) -> None:
        """Make everything that was placed durable."""
        while (write := self.core.take()) is not None:
            self.store.write(write)
            self.core.written(write.sequence)

    def close_full(self) -> None:
        """Checkpoint every file that is full and durable."""
        while (generation := self.core.next_to_close()) is not None:
            self.store.save_index(generation, list(self.contents.files[generation].runs.values()))
            self.store.save_state(self.contents.state(generation + 1))
            self.contents.file_closed(generation)
            self.store.finish(generation)

    def free_dead(self) -> None:
        """Recycle empty closed files."""
        dead = frozenset(file.generation for file in self.contents.dead_files())
        if dead:
            first_open = min(file.generation for file in self.contents.files.values() if not file.closed)
            self.store.save_state(self.contents.state(first_open, without=dead))
            for generation in sorted(dead):
                self.contents.drop_file(generation)
                self.store.recycle(generation, self.spares_max)

    def compact(self, generation: int) -> None:
        """Copy the live entries of a closed file, without freeing it."""
        for run in list(self.contents.files[generation].runs.values()):
            self.load([run])
            for row in list(run.between(run.first, run.last)):
                payload = self.store.open_log(generation).pread(row.payload_bytes, row.position)
                self.make_room(add_room(1, ENTRY_HEADER_BYTES + row.payload_bytes))
                self.core.move(run.ledger_id, row, payload, generation)

    def load(self, runs: Sequence[object]) -> None:
        for run in itertools.chain(*(file.runs.values() for file in self.contents.files.values())):
            if run in runs and run.rows is None:
                self.contents.cache.keep(run, self.store.load_rows(run))

    def read(self, ledger_id: int, first: int = 0, last: int = 1 << 40, max_bytes: int = 1 << 30) -> dict[int, bytes | None]:
        """All visible entries of a range; None for those that cannot be read."""
        budget = Budget(max_bytes, messages.ENTRIES_MAX)
        while isinstance(found := locate(self.core, [Range(ledger_id, first, last)], budget), RunsNeeded):
            self.load(found.runs)
        places = found[0].places
        pieces = read_places(self.store, places, None)
        return {place.row.entry_id: piece for place, piece in zip(places, pieces, strict=True)}
