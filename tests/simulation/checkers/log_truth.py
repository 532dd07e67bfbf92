"""Records that were sent to a topic, acknowledged and read, and the invariants between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import ACKNOWLEDGED, Coverage
from simulation.clients.kafka import NONE, KafkaClient, NotServed
from stratalog_core.batches.records import Record

NO_ANSWER = -1
OFFSET_OUT_OF_RANGE = 1


class Truth:
    """Records sent, acknowledged and read; every addition asserts the invariants."""

    def __init__(self, audit: Audit, coverage: Coverage) -> None:
        self.sent: set[bytes] = set()
        self.ends: dict[int, int] = {}
        self._audit = audit
        self._coverage = coverage
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.seen: dict[tuple[int, int], bytes] = {}
        self._places: dict[bytes, tuple[int, int]] = {}
        self._once: dict[bytes, tuple[int, int]] = {}

    def below(self, ends: Mapping[int, float]) -> Truth:
        """Return the truth after a restore that loses the records at and above ``ends``, by partition."""
        kept = Truth(self._audit, self._coverage)
        kept.sent, kept._once = set(self.sent), dict(self._once)
        for (partition, offset), value in self.acknowledged.items():
            if offset < ends[partition]:
                kept.acknowledge(partition, offset, [value])
        kept.seen = {place: value for place, value in self.seen.items() if place[1] < ends[place[0]]}
        return kept

    def send(self, values: Sequence[bytes]) -> None:
        """Note records that are about to be sent."""
        self.sent.update(values)

    def acknowledge(self, partition: int, base_offset: int, values: Sequence[bytes]) -> None:
        """Note a batch that was acknowledged with acks=all."""
        for offset, value in enumerate(values, base_offset):
            self._acknowledge_one(partition, offset, value)

    def written_once(self, partition: int, base_offset: int, values: Sequence[bytes]) -> None:
        """Note a batch that was acknowledged with acks=1: it may be lost, but must not be anywhere else."""
        self._once.update((value, (partition, offset)) for offset, value in enumerate(values, base_offset))

    def _acknowledge_one(self, partition: int, offset: int, value: bytes) -> None:
        place = self._places.setdefault(value, (partition, offset))
        assert place == (partition, offset), f"duplicates: {value!r} was acknowledged at {place} and at {(partition, offset)}"
        if (partition, offset) not in self.acknowledged:
            self._coverage.meet(ACKNOWLEDGED)
        self._same(self.acknowledged.setdefault((partition, offset), value), value, partition, offset, "acknowledged")
        self.ends[partition] = max(self.ends.get(partition, 0), offset + 1)
        known = self.seen.get((partition, offset), value)
        self._same(known, value, partition, offset, "acknowledged after another was read")

    def serves(self, partition: int, watermark: int, acknowledged_end: int) -> None:
        """Check the high watermark of a fetch that was sent when ``acknowledged_end`` was known."""
        fresh = watermark >= acknowledged_end
        self._audit.require(fresh, f"{partition} was served up to {watermark} after {acknowledged_end} had been acknowledged")

    def see(self, partition: int, record: Record) -> None:
        value = record.value or b""
        assert value in self.sent, f"{partition}@{record.offset}: {value!r} was never sent"
        place = self._once.get(value, (partition, record.offset))
        assert place == (partition, record.offset), f"{value!r} was answered with {place} and is at {partition}@{record.offset}"
        self._same(self.seen.setdefault((partition, record.offset), value), value, partition, record.offset, "read")
        known = self.acknowledged.get((partition, record.offset), value)
        self._same(known, value, partition, record.offset, "read after another was acknowledged")

    def _same(self, known: bytes, value: bytes, partition: int, offset: int, how: str) -> None:
        assert known == value, f"two records at {partition}@{offset}: {known!r} and {value!r} ({how})"

    def check_final(self, partition: int, records: list[Record], start: int = 0) -> None:
        """Check ``records``, the whole partition from ``start`` on."""
        offsets = [record.offset for record in records]
        assert offsets == list(range(start, start + len(records))), f"partition {partition} has gaps: {_gaps(offsets)}"
        values = [record.value for record in records]
        assert len(values) == len(set(values)), f"partition {partition} has duplicates"
        for (where, offset), value in self.acknowledged.items():
            if where == partition and offset >= start:
                end = start + len(values)
                assert offset < end, f"acknowledged {partition}@{offset} is lost; the log ends at {end}"
                found = values[offset - start]
                assert found == value, f"{partition}@{offset} is {found!r}, acknowledged was {value!r}"
        for producer in {(value or b"").split(b"/")[0] for value in values}:
            numbers = [int(value.split(b"/")[1]) for value in values if value and value.split(b"/")[0] == producer]
            assert numbers == sorted(numbers), f"records of {producer!r} are out of order in {partition}"


def _gaps(offsets: list[int]) -> list[tuple[int, int]]:
    return [(one, two) for one, two in zip([-1, *offsets], offsets, strict=False) if two != one + 1][:5]


async def read_all(client: KafkaClient, topic: str, partition: int) -> tuple[int, list[Record]]:
    """Return the log's start offset and all records from it on. Retries through takeovers, cold reads and a moving start."""
    start: int | None = None
    records: list[Record] = []
    while True:
        try:
            if start is None:
                start, records = await client.start_offset(topic, partition), []
            error, watermark, found = await client.fetch(topic, partition, start + len(records))
        except NotServed:
            error, watermark, found = NO_ANSWER, -1, []
        if start is not None and error == NONE and watermark >= 0 and start + len(records) >= watermark:
            return start, records
        if error != NONE:
            client.forget(topic, partition)
            await asyncio.sleep(0.2)
        if error == OFFSET_OUT_OF_RANGE:
            start = None
        records.extend(found)
