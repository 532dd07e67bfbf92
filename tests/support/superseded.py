"""A selection of superseded records without Spark: a dictionary over all records, by the plain decoder."""

from __future__ import annotations

from collections.abc import Iterable

from stratalog_core.batches.batch import read_header
from stratalog_core.batches.records import iterate_records
from stratalog_core.ports import Buffer
from stratalog_tiering.core.superseded import OffsetSet
from stratalog_tiering.format.footer import AbortedTransaction


def superseded_offsets(
    batches: Iterable[Buffer], aborted: Iterable[AbortedTransaction] = (), end_offset: int = 2**63 - 1
) -> set[int]:
    """The offsets below ``end_offset`` of committed records whose keys have a later one there. Batches are in offset order."""
    newest, found, ended = dict[bytes, int](), set[int](), list(aborted)
    for batch in batches:
        header = read_header(batch)
        is_aborted = header.is_transactional and any(
            each.producer_id == header.producer_id and each.first_offset <= header.base_offset <= each.last_offset
            for each in ended
        )
        if header.is_control or is_aborted:
            continue
        for record in iterate_records(batch):
            if record.key is not None and record.offset < end_offset:
                if record.key in newest:
                    found.add(newest[record.key])
                newest[record.key] = record.offset
    return found


def offset_set(offsets: Iterable[int]) -> OffsetSet:
    found = OffsetSet()
    found.add_all(offsets)
    return found
