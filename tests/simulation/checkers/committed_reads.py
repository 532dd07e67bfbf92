"""Reads of committed records while transactions go on: nothing undecided, nothing skipped (invariant 7).

A reader may see a value only after its writer has asked for the commit. The value at an offset never changes, and no reader
passes an offset at which a committed record is found later.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulation.checkers.audit import Audit
from simulation.checkers.transaction_outcomes import Outcomes
from stratalog_core.batches.records import Record


class CommittedReads:
    """All such reads of one topic."""

    def __init__(self, audit: Audit, outcomes: Outcomes) -> None:
        self._audit = audit
        self._outcomes = outcomes
        self._seen: dict[tuple[int, int], bytes] = {}
        self._passed: list[tuple[int, int, int, frozenset[int]]] = []
        """Partition, first offset, offset after the last one, offsets of the records there."""

    @property
    def records(self) -> int:
        """The number of offsets with records that were read."""
        return len(self._seen)

    def read(self, partition: int, offset: int, next_offset: int, records: Sequence[Record]) -> None:
        """Check the records that a response had from ``offset`` to below ``next_offset``."""
        self._passed.append((partition, offset, next_offset, frozenset(record.offset for record in records)))
        for record in records:
            value = record.value or b""
            state = self._outcomes.state_of(value)
            place = f"{partition}@{record.offset}"
            self._audit.require(state.may_be_read, f"{value!r} at {place} was read while its transaction is {state.value}")
            known = self._seen.setdefault((partition, record.offset), value)
            self._audit.require(known == value, f"{value!r} was read at {place}, and {known!r} before")

    def check_final(self, partitions: Sequence[Sequence[Record]]) -> None:
        """Compare all reads with all committed records by partition, read when every transaction had ended."""
        for partition, records in enumerate(partitions):
            there = {record.offset: record.value for record in records}
            gone = [place for place, value in self._seen.items() if place[0] == partition and there.get(place[1]) != value]
            assert not gone, f"committed records that were read are not there any more: {gone[:3]}"
        offsets = [[record.offset for record in records] for records in partitions]
        for partition, start, end, seen in self._passed:
            missed = {offset for offset in offsets[partition] if start <= offset < end} - seen
            assert not missed, f"a reader of partition {partition} passed {start}..{end - 1} without {sorted(missed)[:3]}"
