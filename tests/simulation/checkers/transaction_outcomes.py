"""Outcomes of transactions, and the records and offsets that must be readable after them (invariant 7).

A committed transaction is readable as a whole, once, in its order; an aborted one is not readable at all. One whose producer
did not learn the outcome is either. At the end no transaction is open: the last stable offset reaches the high watermark.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kio.schema.types import GroupId, TopicName

from simulation.clients.kafka import (
    FIND_COORDINATOR,
    NONE,
    OFFSET_FETCH,
    KafkaClient,
    NotServed,
    request_struct,
)
from stratalog_core.batches.records import Record

RETRY_S: Final = 0.2
UNSTABLE_OFFSET_COMMIT: Final = 88


class State(Enum):
    """The outcome of a transaction, as far as its producer knows it."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """The producer has asked for a commit and does not know the outcome."""

    @property
    def may_be_read(self) -> bool:
        """Whether a reader of committed records may see the transaction's records."""
        return self in (State.COMMITTED, State.UNKNOWN)


@dataclass(slots=True)
class Outcome:
    """One transaction with the records that it wrote to each partition, acknowledged or not."""

    writer: str
    number: int
    state: State = State.OPEN
    values: dict[int, list[bytes]] = field(default_factory=dict)
    has_offset: bool = False
    """Whether a group's offset, the transaction's number, is part of it."""

    def more_values(self, partition: int, count: int) -> list[bytes]:
        """Return further records for a partition, which are about to be sent."""
        first = sum(map(len, self.values.values()))
        added = [f"{self.writer}/{self.number}/{first + each}".encode() for each in range(count)]
        self.values.setdefault(partition, []).extend(added)
        return added


class Outcomes:
    """All transactions of a run."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, int], Outcome] = {}
        self.timed_out: set[str] = set()
        """Writers whose transaction a coordinator has found to exceed its timeout, by a clock that may have jumped."""

    def add(self, outcome: Outcome) -> None:
        self._by_name[outcome.writer, outcome.number] = outcome

    @property
    def are_open(self) -> bool:
        """Whether a transaction has records and no outcome yet."""
        return any(each.values and each.state is State.OPEN for each in self._by_name.values())

    def of_writer(self, writer: str) -> list[Outcome]:
        return [outcome for (name, _), outcome in self._by_name.items() if name == writer]

    def check_read(self, values: Iterable[bytes]) -> None:
        """Check records that a reader of committed data got while transactions go on."""
        for value in values:
            outcome = self._outcome_of(value)
            assert outcome.state is not State.ABORTED, f"{value!r} of an aborted transaction was read as committed"

    def state_of(self, value: bytes) -> State:
        """Return the state of the transaction in which a value was sent."""
        return self._outcome_of(value).state

    def _outcome_of(self, value: bytes) -> Outcome:
        writer, number, _ = value.decode().split("/")
        return self._by_name[writer, int(number)]

    def check_final(self, partitions: Sequence[list[Record]]) -> None:
        """Check all committed records, by partition."""
        read = [[record.value or b"" for record in records] for records in partitions]
        for partition, values in enumerate(read):
            repeated = [value for value, times in Counter(values).items() if times > 1]
            assert not repeated, f"partition {partition} has duplicates: {repeated[:3]}"
            self.check_read(values)
            self._check_order(partition, values)
        readable = {value for values in read for value in values}
        for outcome in self._by_name.values():
            self._check_whole(outcome, readable)

    def _check_order(self, partition: int, values: Sequence[bytes]) -> None:
        latest: dict[str, tuple[int, int]] = {}
        for value in values:
            writer, number, index = value.decode().split("/")
            place = int(number), int(index)
            assert place > latest.get(writer, (0, 0)), f"{value!r} is out of order in partition {partition}"
            latest[writer] = place

    def _check_whole(self, outcome: Outcome, readable: set[bytes]) -> None:
        wanted = {value for values in outcome.values.values() for value in values}
        found = wanted & readable
        name = f"transaction {outcome.writer}/{outcome.number}, {outcome.state.value},"
        if outcome.state is State.COMMITTED:
            assert found == wanted, f"{name} lacks {sorted(wanted - found)[:3]}"
        assert found in (set(), wanted), f"{name} is torn: {sorted(found)[:3]} without {sorted(wanted - found)[:3]}"
        if outcome.state is State.UNKNOWN and wanted:
            outcome.state = State.COMMITTED if found else State.ABORTED

    def expected_offset(self, writer: str) -> int:
        """Return the offset of the writer's group after ``check_final``: the number of its last committed transaction."""
        numbers = [each.number for each in self.of_writer(writer) if each.state is State.COMMITTED and each.has_offset]
        return max(numbers, default=-1)


async def read_committed(client: KafkaClient, topic: str, partition: int) -> list[Record]:
    """Return all committed records, once no transaction is open."""
    records: list[Record] = []
    offset = 0
    while True:
        try:
            fetched = await client.fetch_committed(topic, partition, offset)
        except NotServed:
            client.forget(topic, partition)
            await asyncio.sleep(RETRY_S)
            continue
        if fetched.error != NONE:
            client.forget(topic, partition)
            await asyncio.sleep(RETRY_S)
            continue
        records += fetched.records
        offset = fetched.next_offset
        if offset >= fetched.high_watermark == fetched.last_stable_offset:
            return records


async def stable_offset(client: KafkaClient, group: str, topic: str) -> int:
    """Return the group's offset in partition 0, once no transaction may change it."""
    wanted = request_struct(OFFSET_FETCH, "OffsetFetchRequestTopic")(name=TopicName(topic), partition_indexes=(0,))
    while True:
        try:
            found = await client.any_broker(FIND_COORDINATOR, key=group, key_type=0)
            if found.error_code == NONE:
                address = f"{found.host}:{found.port}"
                answer = await client.request(
                    address, OFFSET_FETCH, group_id=GroupId(group), topics=(wanted,), require_stable=True
                )
                if answer.error_code == NONE and answer.topics[0].partitions[0].error_code == NONE:
                    return int(answer.topics[0].partitions[0].committed_offset)
        except NotServed:
            pass
        await asyncio.sleep(RETRY_S)
