"""Unknown producers whose batches were refused while a partition settled: which batch of each comes first.

An unknown producer may begin at any sequence, because retention or DeleteRecords may have removed its state. Right after a
takeover such a batch is refused for a while, because its predecessors may still be resent. When that time ends between two
batches in flight, the later one must not be taken for the beginning: its predecessor would stay out of order. Sans-IO.
"""

from __future__ import annotations

from typing import Final

from stratalog_core.batches.batch import BatchHeader

PRODUCERS_MAX: Final = 10_000


class LateBeginnings:
    """One partition's. The number of producers is bounded: the one that was refused first is forgotten."""

    __slots__ = ("_lowest",)

    def __init__(self) -> None:
        self._lowest: dict[tuple[int, int], int] = {}
        """The lowest sequence that was refused, by producer id and epoch."""

    def refused(self, header: BatchHeader) -> None:
        """Note a batch that was refused."""
        producer = header.producer_id, header.producer_epoch
        self._lowest[producer] = min(self._lowest.get(producer, header.base_sequence), header.base_sequence)
        if len(self._lowest) > PRODUCERS_MAX:
            del self._lowest[next(iter(self._lowest))]

    def may_begin(self, header: BatchHeader) -> bool:
        """Whether no earlier batch of the producer was refused; if so, the producer is forgotten here."""
        producer = header.producer_id, header.producer_epoch
        if header.base_sequence > self._lowest.get(producer, header.base_sequence):
            return False
        self._lowest.pop(producer, None)
        return True
