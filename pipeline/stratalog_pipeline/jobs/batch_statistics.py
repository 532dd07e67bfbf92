"""Statistics of record batches from their headers alone: records by day, late and repeated ones, compression. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stratalog_core.batches.batch import NO_PRODUCER_ID, NO_SEQUENCE, BatchHeader
from stratalog_core.batches.compression import NAMES

DAY_MS: Final = 86_400_000
_SEQUENCES: Final = 2**31
_CODECS: Final = {code: name for name, code in NAMES.items()}


class SequenceRun(NamedTuple):
    """Batches of one producer whose sequences follow each other. ``first`` is a sequence, ``length`` a number of them."""

    producer_id: int
    epoch: int
    first: int
    length: int


@dataclass(slots=True, kw_only=True)
class BatchStatistics:
    """Statistics of neighbouring batches of one partition, in offset order.

    ``newest_ms`` is the greatest timestamp so far, that of earlier batches included. A batch is late if all of its records are
    older than one before it, and have timestamps; ``lateness_max_ms`` is the greatest such difference. ``records_by_day``
    counts a batch on the UTC day of its newest record, by days since 1970; records without a timestamp are on day -1. ``runs``
    are in offset order for each producer, and few even if the batches of many producers alternate.
    """

    newest_ms: int = -1
    records: int = 0
    control_records: int = 0
    batches: int = 0
    batch_bytes: int = 0
    late_records: int = 0
    lateness_max_ms: int = 0
    records_by_day: Counter[int] = field(default_factory=Counter)
    bytes_by_codec: Counter[str] = field(default_factory=Counter)
    _runs: dict[tuple[int, int], list[SequenceRun]] = field(default_factory=dict)

    @property
    def runs(self) -> list[SequenceRun]:
        return [run for runs in self._runs.values() for run in runs]

    def add(self, header: BatchHeader) -> None:
        count = header.record_count
        self.records += count
        self.batches += 1
        self.batch_bytes += header.size_bytes
        self.bytes_by_codec[_CODECS.get(header.compression, "unknown")] += header.size_bytes
        if header.is_control:
            self.control_records += count
            return
        newest = header.max_timestamp_ms
        self.records_by_day[newest // DAY_MS] += count
        if count and 0 <= newest < self.newest_ms:
            self.late_records += count
            self.lateness_max_ms = max(self.lateness_max_ms, self.newest_ms - newest)
        self.newest_ms = max(self.newest_ms, newest)
        if header.producer_id != NO_PRODUCER_ID and header.base_sequence != NO_SEQUENCE:
            self._add_to_run(header)

    def _add_to_run(self, header: BatchHeader) -> None:
        count = header.last_offset_delta + 1
        runs = self._runs.setdefault((header.producer_id, header.producer_epoch), [])
        if runs and (runs[-1].first + runs[-1].length) % _SEQUENCES == header.base_sequence:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + count)
        else:
            runs.append(SequenceRun(header.producer_id, header.producer_epoch, header.base_sequence, count))


def repeated_records(runs: Iterable[SequenceRun]) -> int:
    """Return the number of records of ``runs`` whose producer had sent their sequences before.

    The runs of each producer are in offset order. Sequences wrap from 2**31 - 1 to 0, so they are compared as serial numbers
    (RFC 1982).
    """
    next_sequences: dict[tuple[int, int], int] = {}
    repeated = 0
    for run in runs:
        producer = run.producer_id, run.epoch
        expected = next_sequences.get(producer, run.first)
        behind = (expected - run.first) % _SEQUENCES
        behind = behind if behind < _SEQUENCES // 2 else 0
        repeated += min(behind, run.length)
        if behind < run.length:
            next_sequences[producer] = (run.first + run.length) % _SEQUENCES
    return repeated
