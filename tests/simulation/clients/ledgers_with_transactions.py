"""Transactions that span sealed ledgers: what an owner without brokers appends next, and where none is open.

The state of a partition is that of a replay of its batches. A restore, which is known by its leader epochs, ends all open
transactions: the new owner has what was offloaded, and the markers may not have been.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Final

from simulation.scenarios.history import Batch
from stratalog_core.batches.batch import TRANSACTIONAL_BIT, read_header
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.partition_state.transactions import ABORT, COMMIT, build_marker
from stratalog_tiering.core.restoring import EPOCH_GAP

PRODUCERS: Final = (1001, 1002)
TRANSACTIONAL_CHANCE: Final = 0.7
MARKER_CHANCE: Final = 0.4
_BASE_OFFSET: Final = slice(0, 8)
_LEADER_EPOCH: Final = slice(12, 16)
Line = Mapping[int, Batch]


class LineReplay:
    """The state of a partition after its batches below an offset; ``ends``: offsets at which no transaction is open."""

    def __init__(self, line: Line, end_offset: int) -> None:
        self.state = ReplayState(min(line, default=end_offset))
        self.ends = [self.state.next_offset]
        self._epoch: int | None = None
        for batch in _in_order(line, end_offset):
            header = read_header(batch.content)
            self.begin_epoch(header.leader_epoch)
            self.state.replay(header, batch.content)
            self._note_end()

    def begin_epoch(self, epoch: int) -> None:
        if self._epoch is not None and epoch - self._epoch >= EPOCH_GAP:
            self.state.transactions.load((), self.state.next_offset)
            self._note_end()
        self._epoch = epoch

    def _note_end(self) -> None:
        if not self.state.transactions.first_offsets:
            self.ends.append(self.state.next_offset)


def _in_order(line: Line, end_offset: int) -> Iterator[Batch]:
    offset = min(line, default=end_offset)
    while offset < end_offset and offset in line:
        yield line[offset]
        offset = line[offset].end_offset


def last_end(line: Line, offset: int) -> int:
    """Where a history is to be cut for a point at ``offset``."""
    return max(
        end for end in LineReplay(line, max((batch.end_offset for batch in line.values()), default=0)).ends if end <= offset
    )


def next_batch(
    line: Line, records: list[Record], epoch: int, now_ms: int, chance: random.Random, *, is_ending: bool
) -> Batch | None:
    """The next batch: of ``records``, of a transaction or not, or a marker. ``is_ending``: only markers, if any is needed."""
    base = records[0].offset
    replay = LineReplay(line, base)
    assert replay.state.next_offset == base, f"the line has a gap before {base}"
    replay.begin_epoch(epoch)
    state = replay.state
    producer_id = chance.choice(PRODUCERS)
    opened = state.transactions.first_offsets
    if is_ending:
        if not opened:
            return None
        producer_id = next(iter(opened))
    before = state.checkpoint(base)
    if producer_id in opened and (is_ending or chance.random() < MARKER_CHANCE):
        content = build_marker(chance.choice((ABORT, COMMIT)), producer_id, 0, 0, now_ms)
        content[_BASE_OFFSET] = base.to_bytes(8, "big")
        content[_LEADER_EPOCH] = epoch.to_bytes(4, "big")
        return _batch(before, bytes(content), now_ms)
    if chance.random() > TRANSACTIONAL_CHANCE:
        return _batch(before, bytes(build_batch(records, leader_epoch=epoch)), now_ms)
    sequence = next((each.batches[-1].last_sequence + 1 for each in before.producers if each.producer_id == producer_id), 0)
    content = build_batch(
        records,
        leader_epoch=epoch,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        attributes=TRANSACTIONAL_BIT,
    )
    return _batch(before, bytes(content), now_ms)


def _batch(before: Checkpoint, content: bytes, now_ms: int) -> Batch:
    return Batch(before.offset, read_header(content).next_offset, now_ms, content, before)


def undecided_from(batch: Batch, none: int) -> int:
    """The first offset of the oldest transaction that is open after a batch; ``none`` if there is none."""
    assert batch.checkpoint is not None
    state = ReplayState(batch.base_offset)
    state.load(batch.checkpoint)
    state.replay(read_header(batch.content), batch.content)
    return state.transactions.last_stable_offset(none)
