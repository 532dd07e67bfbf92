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
    counts a batch on the UTC day of its newest record, by days since 1970; records without a timestamp are on day -1.

    ``runs`` are in offset order for each producer. The driver gets those of all segments, so they are few: also if the batches
    of many producers alternate; if a compaction has removed batches, whose sequences count as if they were there; and if each
    transaction has an epoch of its own. Only the first and the last epoch of a producer may be those of batches elsewhere, so
    ``settled_repeats`` is what :func:`repeated_records` is of the others.
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
    settled_repeats: int = 0
    _runs: dict[int, dict[int, list[SequenceRun]]] = field(default_factory=dict)
    """By producer and epoch."""
    _nexts: dict[int, dict[int, int]] = field(default_factory=dict)
    """The sequence after the greatest one, by producer and epoch."""

    @property
    def runs(self) -> list[SequenceRun]:
        return [run for epochs in self._runs.values() for runs in epochs.values() for run in runs]

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
        epochs, nexts = self._runs.setdefault(header.producer_id, {}), self._nexts.setdefault(header.producer_id, {})
        if header.producer_epoch not in epochs and len(epochs) > 1:
            epoch, settled = epochs.popitem()
            del nexts[epoch]
            self.settled_repeats += repeated_records(settled)
        runs = epochs.setdefault(header.producer_epoch, [])
        expected = nexts.get(header.producer_epoch, header.base_sequence)
        ahead = (header.base_sequence - expected) % _SEQUENCES
        end = (runs[-1].first + runs[-1].length) % _SEQUENCES if runs else None
        if end == header.base_sequence:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + count)
        elif end == expected and ahead < _SEQUENCES // 2:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + ahead + count)
        else:
            runs.append(SequenceRun(header.producer_id, header.producer_epoch, header.base_sequence, count))
        if ahead < _SEQUENCES // 2 or _SEQUENCES - ahead < count:
            nexts[header.producer_epoch] = (header.base_sequence + count) % _SEQUENCES


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
