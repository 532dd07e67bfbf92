"""Lookup of entries for a read: ranges become places in files, or the runs to load first.

Absence is decided here, from the index alone: an id up to ``decided_to`` that has no place does not exist. Whether a place is
readable is decided by the shell. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.core.index import Ledger, Row, Run, clusters, merged
from stratalog_bookies.protocol.messages import Range, Status

RUNS_AT_ONCE: Final = 256
ROWS_AT_ONCE: Final = 65_536
"""Runs, and rows of 2 MiB, after which no runs of further ranges are added to those to load: they may be beyond the budget."""
_ENTRY_ID_MAX = 2**63 - 1


class Place(NamedTuple):
    """An entry and the position of its payload."""

    ledger_id: int
    generation: int
    row: Row


class Found(NamedTuple):
    """The answer to one range. Ids up to ``decided_to`` that are not in ``places`` do not exist."""

    status: Status
    decided_to: int
    places: list[Place]


class RunsNeeded(NamedTuple):
    """Load the rows of these runs, then call ``locate`` again."""

    runs: list[Run]


class Budget:
    """The remaining size of an answer. The first entry always fits."""

    def __init__(self, bytes_max: int, entries_max: int, bytes_each_max: int | None = None) -> None:
        self._bytes_left = bytes_max
        self._entries_left = entries_max
        self._bytes_each_max = bytes_each_max
        self._untouched = True

    def mark(self) -> tuple[int, int, bool]:
        """The values that ``reset`` restores."""
        return self._bytes_left, self._entries_left, self._untouched

    def reset(self, mark: tuple[int, int, bool]) -> None:
        self._bytes_left, self._entries_left, self._untouched = mark

    def take(self, payload_bytes: int) -> bool:
        """Whether an entry fits; if so, count it."""
        wanted = payload_bytes if self._bytes_each_max is None else min(payload_bytes, self._bytes_each_max)
        if not self._untouched and (wanted > self._bytes_left or self._entries_left <= 0):
            self._bytes_left = self._entries_left = 0
            return False
        self._untouched = False
        self._bytes_left -= wanted
        self._entries_left -= 1
        return True

    @property
    def is_used_up(self) -> bool:
        return not self._untouched and (self._entries_left <= 0 or self._bytes_left <= 0)


def locate(core: DiskCore, ranges: Sequence[Range], budget: Budget) -> list[Found] | RunsNeeded:
    """Places of all durable entries in the ranges, as far as the budget allows. If runs must be loaded first, the budget is
    unchanged.
    """
    mark = budget.mark()
    answer = []
    for index, each in enumerate(ranges):
        found = _locate_range(core, each, budget)
        if isinstance(found, RunsNeeded):
            budget.reset(mark)
            return RunsNeeded(_with_following(core, found.runs, ranges[index + 1 :]))
        answer.append(found)
    return answer


def _with_following(core: DiskCore, needed: Sequence[Run], ranges: Sequence[Range]) -> list[Run]:
    """The runs needed now, and the first ones that each of the following ranges lacks.

    After a restart a thousand ranges may lack runs. With a load for each range, all before it would be located again each time.
    """
    runs = dict.fromkeys(needed)
    rows = sum([run.count for run in needed])
    for each in ranges:
        if len(runs) >= RUNS_AT_ONCE or rows >= ROWS_AT_ONCE:
            break
        ledger = core.contents.ledgers.get(each.ledger_id)
        between = clusters(ledger.runs_between(each.first, each.last)) if ledger is not None else ()
        missing = next((lacking for cluster in between if (lacking := [run for run in cluster if run.rows is None])), [])
        runs.update(dict.fromkeys(missing))
        rows += sum([run.count for run in missing])
    return list(runs)


def _locate_range(core: DiskCore, wanted: Range, budget: Budget) -> Found | RunsNeeded:
    ledger = core.contents.ledgers.get(wanted.ledger_id)
    if ledger is None:
        return Found(Status.NO_SUCH_LEDGER, min(wanted.last, _ENTRY_ID_MAX), [])
    if budget.is_used_up:
        return Found(Status.OK, min(wanted.first, _ENTRY_ID_MAX) - 1, [])
    return _locate_in(core, ledger, wanted, budget)


def _locate_in(core: DiskCore, ledger: Ledger, wanted: Range, budget: Budget) -> Found | RunsNeeded:
    places: list[Place] = []
    for cluster in clusters(ledger.runs_between(wanted.first, wanted.last)):
        missing = [run for run in cluster if run.rows is None]
        if missing:
            return RunsNeeded(missing)
        for run in cluster:
            core.contents.cache.touch(run)
        for run, row in merged(cluster, wanted.first, wanted.last, core.is_visible):
            if not budget.take(row.payload_bytes):
                return Found(Status.OK, row.entry_id - 1, places)
            places.append(Place(wanted.ledger_id, run.generation, row))
    return Found(Status.OK, min(wanted.last, _ENTRY_ID_MAX), places)
