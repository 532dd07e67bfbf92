"""Transactional producers: each writes to several partitions and commits a group's offset, in one transaction after the other.

A writer retries what may be retried until its transaction has an outcome. It aborts some transactions, leaves others until they
exceed their timeout, and sometimes begins again as a new instance with the same transactional id, while the old one, a zombie,
tries to commit. ``checkers/transaction_outcomes.py`` says what must be readable afterwards.

A writer has one to five batches of a partition in flight. One of transaction version 2 (KIP-890) adds no partitions, because
its batches and offsets do, and each of its transactions has an epoch of its own. It sometimes sends a batch of the last
transaction's epoch within the next one, which must be refused. It aborts a transaction that exceeded its timeout without being
fenced.

A writer remembers the coordinators of its transactions and of its group, as Kafka's clients do: it looks for another one only
if an answer says that there may be one, or if there is no answer. Sometimes it aborts a transaction that has nothing in it
right after the one before, while that is being completed: Java's producer of version 2 may go on after that; librdkafka
(https://github.com/confluentinc/librdkafka/issues/4849) is told at last that its transaction has not begun, and begins again.

A producer id has ``epoch_max`` epochs. At the last one, EndTxn gives a writer of version 2 another id, also if its transaction
exceeded its timeout: its abort is then answered as any other, and its commit with INVALID_TXN_STATE, as at other epochs. A
request of a zombie or of a writer of version 1 may then be answered INVALID_PRODUCER_ID_MAPPING instead of being fenced.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from typing import Any, Final

from kio.schema.types import GroupId, ProducerId, TopicName, TransactionalId

from simulation.checkers.coverage import (
    EMPTY_ABORTED,
    EPOCHS_EXHAUSTED,
    LATE_BATCHES_REFUSED,
    SEVERAL_OF_A_TRANSACTION,
    TIMED_OUT_ABORTED,
    TRANSACTIONS_ABORTED,
    TRANSACTIONS_COMMITTED,
    TRANSACTIONS_TIMED_OUT,
    ZOMBIES_REFUSED,
)
from simulation.checkers.transaction_outcomes import Outcome, Outcomes, State
from simulation.clients.kafka import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    DUPLICATE_SEQUENCE,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    NONE,
    PRODUCE,
    TXN_OFFSET_COMMIT,
    VERSIONS,
    KafkaClient,
    NotServed,
)
from simulation.clients.producers import IN_FLIGHT, NO_ANSWER, OUT_OF_ORDER, RETRIABLE, make_batch
from simulation.world.machine import Machine, Ports, World
from stratalog_broker.coordination.transactions.core.transaction import EPOCH_MAX
from stratalog_core.batches.batch import TRANSACTIONAL_BIT

TIMEOUT_S: Final = 4.0
RETRY_S: Final = 0.05
ABORT_CHANCE: Final = 0.25
OFFSETS_CHANCE: Final = 0.5
LEAVE_CHANCE: Final = 0.04
LEAVE_AT_LAST_EPOCH_CHANCE: Final = 0.3
RESTART_CHANCE: Final = 0.06
GIVE_UP_CHANCE: Final = 0.5
LATE_CHANCE: Final = 0.3
EMPTY_CHANCE: Final = 0.1
DECISION_TRANSACTIONS: Final = 5
GROUP_KEY, TRANSACTION_KEY = 0, 1
INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, CONCURRENT_TRANSACTIONS, PRODUCER_FENCED = 47, 48, 51, 90
INVALID_PRODUCER_ID_MAPPING: Final = 49
LATER: Final = RETRIABLE | {14, CONCURRENT_TRANSACTIONS}
MOVED: Final = frozenset({7, 15, 16})
"""The answers after which Kafka's clients look for the coordinator again."""
VERSIONS_2: Final = {**VERSIONS, PRODUCE: 12, TXN_OFFSET_COMMIT: 5, END_TXN: 5}
"""The requests of transaction version 2."""
FENCED: Final = frozenset({INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, PRODUCER_FENCED})


class Ended(Exception):
    """The transaction was ended by its coordinator."""


class TransactionalWriter:
    """One transactional id. Its records are named ``ID/TRANSACTION/NUMBER``. ``is_v2``: of transaction version 2."""

    pause_mean_s = 0.05

    def __init__(
        self,
        world: World,
        outcomes: Outcomes,
        name: str,
        topic: str,
        partitions: int,
        bootstrap: list[str],
        *,
        is_v2: bool = False,
        epoch_max: int = EPOCH_MAX,
    ) -> None:
        self._is_v2 = is_v2
        self._epoch_max = epoch_max
        self._producer_ids = set[int]()
        self._world = world
        self._outcomes = outcomes
        self._name = name
        self._topic = topic
        self._partitions = partitions
        self._bootstrap = bootstrap
        self._in_flight_max = world.random(f"{name}/in flight").choice(IN_FLIGHT)
        self._producer = (-1, -1)
        self._sequences: dict[int, int] = {}
        self._before: tuple[tuple[int, int], dict[int, int]] | None = None
        """Producer and sequences of the last transaction, if the present one has another epoch."""
        self._coordinators: dict[tuple[int, str], str] = {}
        self._number = 0
        self.stop = False
        self.stopped = asyncio.Event()

    @property
    def group(self) -> str:
        return f"group-{self._name}"

    async def run(self, machine: Machine, ports: Ports) -> None:
        versions = VERSIONS_2 if self._is_v2 else VERSIONS
        client = KafkaClient(self._world, ports, machine.name, self._bootstrap, versions)
        await self._begin_epoch(client)
        turn = 0
        while not self.stop:
            turn += 1
            await asyncio.sleep(ports.random.expovariate(1 / self.pause_mean_s))
            if not self._world.decides(f"{self._name}/{turn // DECISION_TRANSACTIONS}"):
                continue
            self._number += 1
            outcome = Outcome(self._name, self._number)
            self._outcomes.add(outcome)
            try:
                await self._transact(client, ports, outcome)
            except Ended:
                # A commit that was decided cannot be ended by anybody else, so this was an abort.
                outcome.state = State.ABORTED
                await self._begin_epoch(client)
        self.stopped.set()

    async def _transact(self, client: KafkaClient, ports: Ports, outcome: Outcome) -> None:
        partitions = ports.random.sample(range(self._partitions), 1 + ports.random.randrange(self._partitions))
        if not self._is_v2:
            await self._add_partitions(client, partitions)
        for partition in partitions:
            await self._produce(client, ports, outcome, partition)
        if self._before is not None and ports.random.random() < LATE_CHANCE:
            await self._produce_late(client, ports, ports.random.choice(partitions))
        if ports.random.random() < OFFSETS_CHANCE:
            await self._commit_offset(client, outcome)
        is_at_last_epoch = self._producer[1] >= self._epoch_max - 1
        if ports.random.random() < (LEAVE_AT_LAST_EPOCH_CHANCE if is_at_last_epoch else LEAVE_CHANCE):
            await asyncio.sleep(TIMEOUT_S * 1.5)
        if ports.random.random() < RESTART_CHANCE:
            await self._restart(client, outcome)
        else:
            await self._end(client, outcome, commit=ports.random.random() >= ABORT_CHANCE)
            if ports.random.random() < EMPTY_CHANCE:
                await self._abort_nothing(client, outcome)
            if ports.random.random() < RESTART_CHANCE:
                await self._begin_epoch(client)

    async def _begin_epoch(self, client: KafkaClient) -> None:
        answer = await self._ask(
            client, (TRANSACTION_KEY, self._name), INIT_PRODUCER_ID, transactional_id=TransactionalId(self._name),
            transaction_timeout=datetime.timedelta(seconds=TIMEOUT_S), producer_id=ProducerId(-1), producer_epoch=-1,
        )  # fmt: skip
        assert answer.error_code == NONE, f"{self._name}: InitProducerId answers {answer.error_code}"
        self._next_producer(answer)
        self._before = None
        self._outcomes.timed_out.discard(self._name)

    def _next_producer(self, answer: Any) -> None:
        producer = answer.producer_id, answer.producer_epoch
        is_next = producer > self._producer if producer[0] == self._producer[0] else producer[0] not in self._producer_ids
        assert is_next, f"{self._name}: the producer after {self._producer} is {producer}"
        assert 0 <= producer[1] < self._epoch_max, f"{self._name}: the producer is {producer}"
        if self._producer_ids and producer[0] not in self._producer_ids:
            self._world.coverage.meet(EPOCHS_EXHAUSTED)
        self._producer_ids.add(producer[0])
        self._before = self._producer, self._sequences
        self._producer, self._sequences = producer, {}

    async def _restart(self, client: KafkaClient, outcome: Outcome) -> None:
        """Begin again as a new instance, which aborts the transaction; then the old one tries to commit it."""
        zombie = self._producer
        await self._begin_epoch(client)
        outcome.state = State.ABORTED
        answer = await self._ask(
            client, (TRANSACTION_KEY, self._name), END_TXN, **self._identity(zombie), committed=True
        )  # fmt: skip
        assert answer.error_code in self._refusals(zombie), f"{self._name}: a zombie's commit is answered {answer.error_code}"
        self._world.coverage.meet(ZOMBIES_REFUSED)

    def _refusals(self, producer: tuple[int, int]) -> frozenset[int]:
        """Return the answers to a producer whose transaction was ended by its coordinator, or that is a zombie.

        The abort may take the last epoch but one to the last, for which a new instance gets another id.
        """
        _, epoch = producer
        may_be_replaced = epoch >= self._epoch_max - 2
        return FENCED | {INVALID_PRODUCER_ID_MAPPING} if may_be_replaced else FENCED

    def _identity(self, producer: tuple[int, int] | None = None) -> dict[str, Any]:
        producer_id, epoch = producer or self._producer
        return {
            "transactional_id": TransactionalId(self._name), "producer_id": ProducerId(producer_id), "producer_epoch": epoch
        }  # fmt: skip

    async def _add_partitions(self, client: KafkaClient, partitions: Sequence[int]) -> None:
        topic = client.struct(ADD_PARTITIONS_TO_TXN, "AddPartitionsToTxnTopic")(
            name=TopicName(self._topic), partitions=tuple(partitions)
        )
        fields = {f"v3_and_below_{name}": value for name, value in self._identity().items()}

        def code(answer: Any) -> int:
            return int(answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)

        where = TRANSACTION_KEY, self._name
        answer = await self._ask(client, where, ADD_PARTITIONS_TO_TXN, code, **fields, v3_and_below_topics=(topic,))
        self._check(code(answer), "AddPartitionsToTxn")

    async def _produce(self, client: KafkaClient, ports: Ports, outcome: Outcome, partition: int) -> None:
        """Send batches to a partition, all at once; then those that were not acknowledged again, one after the other."""
        batches = []
        for _ in range(1 + ports.random.randrange(self._in_flight_max)):
            count, sequence = 1 + ports.random.randrange(3), self._sequences.get(partition, 0)
            batches.append(self._make_batch(outcome, partition, count, ports, self._producer, sequence))
            self._sequences[partition] = sequence + count
        if len(batches) > 1:
            self._world.coverage.meet(SEVERAL_OF_A_TRANSACTION)
        has_failed = False
        for batch, (error, offset) in zip(batches, await self._send_at_once(client, partition, batches), strict=True):
            if error not in (NONE, DUPLICATE_SEQUENCE):
                if error in LATER or error == NO_ANSWER or (error == OUT_OF_ORDER and has_failed):
                    client.forget(self._topic, partition)
                    error, offset = await self._send(client, partition, batch)
                has_failed = True
                if error != DUPLICATE_SEQUENCE:
                    self._check(error, "Produce")
            if offset >= 0:
                self._acknowledged(batch, offset)

    def _make_batch(
        self, outcome: Outcome, partition: int, count: int, ports: Ports, producer: tuple[int, int], sequence: int
    ) -> bytes:
        """Return a batch of so many further records of the transaction."""
        values = outcome.more_values(partition, count)
        return make_batch(values, ports.clock.wall_ms(), producer, sequence, TRANSACTIONAL_BIT)

    def _acknowledged(self, batch: bytes, base_offset: int) -> None:
        """Take the offset of a batch."""

    async def _send_at_once(self, client: KafkaClient, partition: int, batches: Sequence[bytes]) -> list[tuple[int, int]]:
        """Send each batch once, in order; return error codes and offsets. After one that could not be sent none is sent."""
        unsent = False

        def check_order() -> None:
            if unsent:
                raise NotServed("a batch before this one was not sent")

        async def send(batch: bytes) -> tuple[int, int]:
            nonlocal unsent
            try:
                return await client.produce(
                    self._topic, partition, batch, before_write=check_order, transactional_id=self._name
                )
            except NotServed:
                unsent = True
                return NO_ANSWER, -1

        return list(await asyncio.gather(*map(send, batches)))

    async def _send(self, client: KafkaClient, partition: int, batch: bytes) -> tuple[int, int]:
        """Send a batch until its answer is not one to retry; return that, and the batch's offset."""
        while True:
            try:
                error, offset = await client.produce(self._topic, partition, batch, transactional_id=self._name)
            except NotServed:
                error, offset = NO_ANSWER, -1
            if error != NO_ANSWER and error not in LATER:
                return error, offset
            client.forget(self._topic, partition)
            await asyncio.sleep(RETRY_S)

    async def _produce_late(self, client: KafkaClient, ports: Ports, partition: int) -> None:
        """Send another batch of the last transaction to a partition that has a batch of the present one."""
        assert self._before is not None
        producer, sequences = self._before
        late = Outcome(f"late-{self._name}", self._number, State.ABORTED)
        self._outcomes.add(late)
        batch = self._make_batch(late, partition, 1, ports, producer, sequences.get(partition, 0))
        error, _ = await self._send(client, partition, batch)
        is_refused = error in self._refusals(producer)
        assert is_refused, f"{self._name}/{self._number}: a batch of the last epoch is answered with {error}"
        self._world.coverage.meet(LATE_BATCHES_REFUSED)

    async def _commit_offset(self, client: KafkaClient, outcome: Outcome) -> None:
        """Commit the transaction's number as the group's offset."""
        if not self._is_v2:
            where = TRANSACTION_KEY, self._name
            added = await self._ask(client, where, ADD_OFFSETS_TO_TXN, **self._identity(), group_id=GroupId(self.group))
            self._check(added.error_code, "AddOffsetsToTxn")
        row = client.struct(TXN_OFFSET_COMMIT, "TxnOffsetCommitRequestPartition")(
            partition_index=0, committed_offset=outcome.number, committed_leader_epoch=-1, committed_metadata=None
        )
        topic = client.struct(TXN_OFFSET_COMMIT, "TxnOffsetCommitRequestTopic")(name=TopicName(self._topic), partitions=(row,))

        def code(answer: Any) -> int:
            return int(answer.topics[0].partitions[0].error_code)

        answer = await self._ask(
            client, (GROUP_KEY, self.group), TXN_OFFSET_COMMIT, code, **self._identity(), group_id=GroupId(self.group),
            generation_id=-1, member_id="", group_instance_id=None, topics=(topic,),
        )  # fmt: skip
        self._check(code(answer), "TxnOffsetCommit")
        outcome.has_offset = True

    async def _end(self, client: KafkaClient, outcome: Outcome, *, commit: bool) -> None:
        outcome.state = State.UNKNOWN if commit else State.ABORTED
        where = TRANSACTION_KEY, self._name
        if commit and self._gives_up(outcome) and await self._is_unanswered(client, where):
            # A new instance knows nothing of the commit: it took effect as a whole, or it is aborted now.
            await self._begin_epoch(client)
            return
        answer = await self._ask(client, where, END_TXN, **self._identity(), committed=commit)
        if self._is_v2 and not commit:
            self._check_abort(answer.error_code)
        elif self._is_v2:
            is_known = answer.error_code in (NONE, INVALID_TXN_STATE)
            assert is_known, f"{self._name}/{self._number}: a commit is answered with {answer.error_code}"
        self._check(answer.error_code, "EndTxn")
        outcome.state = State.COMMITTED if commit else State.ABORTED
        if self._is_v2:
            self._next_producer(answer)
        self._world.coverage.meet(TRANSACTIONS_COMMITTED if commit else TRANSACTIONS_ABORTED)

    def _check_abort(self, error: int) -> None:
        """A producer of version 2 aborts a transaction that its coordinator has aborted after the timeout, and goes on."""
        assert error == NONE, f"{self._name}/{self._number}: an abort is answered with {error}"
        if self._name in self._outcomes.timed_out:
            self._outcomes.timed_out.discard(self._name)
            self._world.coverage.meet(TIMED_OUT_ABORTED)

    async def _abort_nothing(self, client: KafkaClient, last: Outcome) -> None:
        """Abort a transaction that no partition was added to. ``last`` is the one before it."""
        where = TRANSACTION_KEY, self._name
        answer = await self._ask(client, where, END_TXN, **self._identity(), committed=False)
        what = f"{self._name}/{last.number}, {last.state.value}: the abort of an empty transaction is answered with"
        self._world.coverage.meet(EMPTY_ABORTED)
        if self._is_v2:
            assert answer.error_code == NONE, f"{what} {answer.error_code}"
            self._next_producer(answer)
            return
        # Without an epoch of its own it looks like a retry of the last abort.
        expected = NONE if last.state is State.ABORTED else INVALID_TXN_STATE
        assert answer.error_code == expected, f"{what} {answer.error_code}"
        if answer.error_code == INVALID_TXN_STATE:
            try:
                repeated = await client.request(self._coordinators[where], END_TXN, **self._identity(), committed=True)
                is_ending = repeated.error_code == CONCURRENT_TRANSACTIONS
                assert not is_ending, f"{what} {answer.error_code} while the last one is being completed"
            except NotServed:
                pass
            await self._begin_epoch(client)

    def _gives_up(self, outcome: Outcome) -> bool:
        return self._world.random(f"{outcome.writer}/{outcome.number}/gives up").random() < GIVE_UP_CHANCE

    async def _is_unanswered(self, client: KafkaClient, where: tuple[int, str]) -> bool:
        """Send a commit once; return whether its answer is lost."""
        address = self._coordinators.get(where)
        if address is None:
            return False
        try:
            await client.request(address, END_TXN, **self._identity(), committed=True)
        except NotServed:
            return True
        return False

    def _check(self, error: int, api: str) -> None:
        """Raise ``Ended`` if a coordinator has aborted the transaction, which it may do only after the timeout."""
        if error == NONE:
            return
        is_late = self._name in self._outcomes.timed_out and error in self._refusals(self._producer)
        assert is_late, f"{self._name}/{self._number}: {api} answers {error} although the transaction has time"
        self._world.coverage.meet(TRANSACTIONS_TIMED_OUT)
        raise Ended

    async def _ask(
        self, client: KafkaClient, where: tuple[int, str], api: int, code: Any = lambda answer: answer.error_code, **fields: Any
    ) -> Any:
        """Send a request to a coordinator until its answer is not one to retry; return it."""
        while True:
            try:
                address = self._coordinators.get(where) or await self._find(client, where)
                answer = await client.request(address, api, **fields) if address else None
            except NotServed:
                answer = None
            if answer is not None and code(answer) not in LATER:
                return answer
            if answer is None or code(answer) in MOVED:
                self._coordinators.pop(where, None)
            await asyncio.sleep(RETRY_S)

    async def _find(self, client: KafkaClient, where: tuple[int, str]) -> str | None:
        key_type, key = where
        found = await client.any_broker(FIND_COORDINATOR, key=key, key_type=key_type)
        if found.error_code != NONE:
            return None
        self._coordinators[where] = f"{found.host}:{found.port}"
        return self._coordinators[where]
