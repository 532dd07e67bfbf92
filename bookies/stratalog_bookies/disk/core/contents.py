"""The contents of one disk: its ledgers, its log files, and which entries of which ledger are in which file.

The log is the source of truth. At start this is built from checkpoints and the tail of the log, and then kept in step. A run is
in two places, its ledger's list and its file's map, until the ledger is deleted or the file dropped. A deleted ledger leaves a
tombstone. The oldest tombstones beyond ``tombstones_max`` are dropped; if a late add then recreates such a ledger, nothing
reads it and the collector deletes it again. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stratalog_bookies.disk.core.checkpoint import (
    ClosedFile,
    LedgerState,
    State,
    pack_ledgers,
    pack_tombstones,
    unpack_ledgers,
    unpack_tombstones,
)
from stratalog_bookies.disk.core.index import Ledger, Row, Run, RunCache


@dataclass(slots=True, eq=False)
class LogFile:
    """One log file. ``end`` is -1 while it is written; ``closed`` means that its checkpoint is durable; ``pins`` counts its
    readers.
    """

    generation: int
    end: int = -1
    closed: bool = False
    pins: int = 0
    unmovable: bool = False
    runs: dict[int, Run] = field(default_factory=dict)

    @property
    def live_bytes(self) -> int:
        """Payload bytes of ledgers that are not deleted."""
        return sum([run.payload_bytes for run in self.runs.values()])


class Contents:
    """The ledgers and files of one disk."""

    def __init__(self, *, index_bytes_max: int, tombstones_max: int) -> None:
        self.ledgers: dict[int, Ledger] = {}
        self.tombstones: dict[int, None] = {}
        self.files: dict[int, LogFile] = {}
        self.cache = RunCache(index_bytes_max)
        self.greatest_ledger_id = -1
        """Greatest id of a ledger that this disk has ever held or deleted; -1 if there was none."""
        self._tombstones_max = tombstones_max

    # -- ledgers

    def ledger(self, ledger_id: int) -> Ledger:
        """The ledger, created if it is new. It must not have a tombstone."""
        assert ledger_id not in self.tombstones, "a deleted ledger is not recreated"
        ledger = self.ledgers.get(ledger_id)
        if ledger is None:
            ledger = self.ledgers[ledger_id] = Ledger(ledger_id)
            self.greatest_ledger_id = max(self.greatest_ledger_id, ledger_id)
        return ledger

    def delete(self, ledger_id: int) -> None:
        """Remove a ledger's entries and record its tombstone."""
        self.greatest_ledger_id = max(self.greatest_ledger_id, ledger_id)
        self.tombstones.pop(ledger_id, None)
        self.tombstones[ledger_id] = None
        while len(self.tombstones) > self._tombstones_max:
            del self.tombstones[next(iter(self.tombstones))]
        ledger = self.ledgers.pop(ledger_id, None)
        for run in ledger.runs if ledger else ():
            self.cache.drop(run)
            self.files[run.generation].runs.pop(ledger_id, None)

    def open_run(self, ledger: Ledger, generation: int) -> Run:
        """The run that takes a ledger's entries in the open file."""
        run = ledger.active
        if run is None or run.generation != generation:
            run = ledger.active = Run(ledger.ledger_id, generation)
            ledger.runs.append(run)
            self.files[generation].runs[ledger.ledger_id] = run
        return run

    def holds(self, run: Run) -> bool:
        """Whether the run still exists: its ledger is not deleted, its file neither emptied nor dropped. A removed run never
        returns.
        """
        file = self.files.get(run.generation)
        return file is not None and file.runs.get(run.ledger_id) is run

    def find(self, ledger: Ledger, entry_id: int) -> Row | Run | None:
        """The row of an entry; None if the entry does not exist; the run to load if that is needed to decide."""
        if entry_id > ledger.last_entry:
            return None
        for run in ledger.runs_between(entry_id, entry_id):
            if run.rows is None:
                return run
            row = run.find(entry_id)
            if row is not None:
                return row
        return None

    # -- files

    def open_file(self, generation: int) -> LogFile:
        file = self.files[generation] = LogFile(generation)
        return file

    def end_file(self, generation: int, end: int) -> None:
        """Mark a file as full."""
        self.files[generation].end = end

    def empty_file(self, generation: int) -> None:
        """Remove the runs of a file whose entries have all been copied to newer files."""
        runs = self.files[generation].runs
        for ledger_id, run in runs.items():
            self.cache.drop(run)
            self.ledgers[ledger_id].runs.remove(run)
        runs.clear()

    def drop_file(self, generation: int) -> None:
        """Remove an empty file."""
        file = self.files[generation]
        assert not file.pins, "a pinned file is not dropped"
        assert not file.runs, "a dropped file is empty"
        del self.files[generation]

    def file_closed(self, generation: int) -> None:
        """Mark a file's checkpoint as durable: its rows may be evicted from memory."""
        file = self.files[generation]
        file.closed = True
        for run in file.runs.values():
            assert run.rows is not None, "rows are in memory until they are stored"
            ledger = self.ledgers[run.ledger_id]
            if ledger.active is run:
                ledger.active = None
            self.cache.keep(run, bytes(run.rows))
        self.cache.trim()

    def dead_files(self) -> list[LogFile]:
        """Closed files that are empty and not being read."""
        return [file for file in self.files.values() if file.closed and not file.runs and not file.pins]

    def sparse_files(self, live_ratio: float) -> list[LogFile]:
        """Closed files with a share of live bytes below ``live_ratio``, sparsest first."""
        sparse = [
            (file.live_bytes / file.end, file.generation)
            for file in self.files.values()
            if file.closed and file.runs and not file.unmovable
        ]
        return [self.files[generation] for share, generation in sorted(sparse) if share < live_ratio]

    def pin(self, generations: Sequence[int]) -> None:
        """Keep files from being recycled while they are read."""
        for generation in generations:
            self.files[generation].pins += 1

    def unpin(self, generations: Sequence[int]) -> None:
        for generation in generations:
            self.files[generation].pins -= 1

    # -- checkpoints

    def state(self, next_generation: int, without: frozenset[int] = frozenset()) -> State:
        """The content of the state file once the files below ``next_generation`` are closed and those in ``without`` are
        removed.
        """
        closed = [
            ClosedFile(generation=file.generation, end=file.end)
            for file in self.files.values()
            if file.generation < next_generation and file.generation not in without
        ]
        return State(
            next_generation=next_generation,
            closed=tuple(sorted(closed, key=lambda file: file.generation)),
            ledgers=pack_ledgers(self._ledger_states()),
            tombstones=pack_tombstones(self.tombstones),
            greatest_ledger_id=self.greatest_ledger_id,
        )

    def restore(self, state: State) -> None:
        """Load a state file. ``restore_runs`` then adds the runs of each closed file."""
        self.greatest_ledger_id = state.greatest_ledger_id
        for file in state.closed:
            self.open_file(file.generation).end = file.end
        for ledger_id in unpack_tombstones(state.tombstones):
            self.delete(ledger_id)
        for each in unpack_ledgers(state.ledgers):
            ledger = self.ledger(each.ledger_id)
            ledger.fenced, ledger.lac, ledger.last_entry = each.fenced, each.lac, each.last_entry

    def restore_runs(self, generation: int, runs: Sequence[Run]) -> None:
        """Load the index of a closed file."""
        file = self.files[generation]
        file.closed = True
        for run in runs:
            if run.ledger_id not in self.tombstones:
                ledger = self.ledger(run.ledger_id)
                ledger.runs.append(run)
                ledger.last_entry = max(ledger.last_entry, run.last)
                file.runs[run.ledger_id] = run

    def _ledger_states(self) -> Iterator[LedgerState]:
        for ledger in self.ledgers.values():
            yield LedgerState(ledger_id=ledger.ledger_id, lac=ledger.lac, last_entry=ledger.last_entry, fenced=ledger.fenced)

    def validate_state(self) -> None:
        """Assert that ledgers, files and runs agree. O(runs)."""
        for ledger in self.ledgers.values():
            assert ledger.ledger_id not in self.tombstones, "a deleted ledger has no contents"
            assert ledger.ledger_id <= self.greatest_ledger_id, "the greatest id covers every ledger"
            for run in ledger.runs:
                assert self.files[run.generation].runs[ledger.ledger_id] is run, "the run is in its file's map"
                assert run.last <= ledger.last_entry, "no entry is above the last entry"
        for file in self.files.values():
            for ledger_id, run in file.runs.items():
                assert run in self.ledgers[ledger_id].runs, "the run is in its ledger's list"
