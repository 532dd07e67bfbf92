"""Scenario: partitions change owners all the time, and old owners do not learn of it.

The cluster of ``log`` with ledgers that are full after less than half a second, and with faults of owners and workers:
commands to the quorum that arrive seconds late, when their sender is dead and another owner's epoch has begun, or whose
answer never reaches the sender; owners that find their state inconsistent; a broker that dies during a recovery; owners of
internal topics that die between opening a ledger and making its checkpoint durable; partitions that are ordered to another
owner, or reassigned, at any moment; a broker that is cut off from the quorum and the producers for about as long as its
lease, with its wall clock set back; answers that do not reach producers, retries that arrive when owner and ledger have
changed. Disks, store and bookies have no faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import msgspec

from simulation.checkers.coverage import LATE_INTERNAL_OPENING, LATE_OPENING, OFFLOADED, PROGRESS, UNFINISHED_IN_A_ROW
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios import log
from simulation.scenarios.log import PRODUCERS, Reader
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.network import BROKEN, Message
from stratalog_bookies.client import LedgerClient, LedgerSpec
from stratalog_bookies.protocol import messages as bookie_messages
from stratalog_broker.admin.ownership_orders import NamedPartition, OwnershipOrders
from stratalog_broker.partitions.core import PartitionCore
from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.protocol import messages
from stratalog_metadata.records import (
    NO_OWNER,
    Broker,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    Partition,
    Topic,
    ledger_key,
    log_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, EpochIs, Put, Update, VersionIs

READERS: Final = 4
LEASE_S: Final = 1.5
LATE_CHANCE: Final = 0.06
LATE_OF_BROKERS_S: Final = (0.05, 3.0)
LATE_OF_WORKERS_S: Final = (2.0, 6.0)
BROKEN_CHANCE: Final = {True: 0.2, False: 0.08}
"""The chance that a tiering worker, or a broker, does not learn the outcome of its command."""
FENCE_CHANCE: Final = 0.1
"""The chance that a broker dies while it fences, which leaves its ledgers IN_RECOVERY."""
OPENING_CHANCE: Final = 0.4
"""The chance that a broker dies after it has opened a ledger of an internal topic."""
EXPIRING_CHANCE: Final = 0.1
"""The same for a topic whose records expire soon. Such ledgers are opened more often."""
DEATH_S: Final = 0.05
DEATH_AFTER_OPENING_S: Final = 0.02
DEATH_IN_RECOVERY_S: Final = 0.004
CLOCK_JUMPS_MS: Final = (0, 0, -3_600_000, -2_000)
TWIN_LOOK_S: Final = 0.05
TWIN_CHANCE: Final = 0.3
ORDER_MEAN_S: Final = 0.3
REVOKE_CHANCE: Final = 0.15
REASSIGN_MEAN_S: Final = 0.5
ELECT_CHANCE: Final = 0.2
CANCEL_CHANCE: Final = 0.3
REASSIGN_S: Final = 2.0
ELECT_S: Final = 1.0
"""Longest waits for the quorum, and for an elected leader."""
DEATHS: Final = (1.0, 0.1)
"""How often brokers die, in one run or another: handovers need two that live, and deaths leave little time for them."""
SLOW_CHANCE: Final = 0.5
"""The chance that a partition is handed over while its owner's entries are late."""
SLOW_S: Final = 0.3
LATE_ADD_S: Final = (0.1, 0.3)
BROKEN_INVARIANT_CHANCE: Final = 0.004
"""The chance that a partition's core finds its state inconsistent when it checks it."""


class _NobodyListens:
    """The listener of a ledger whose writer does not know of it."""

    def on_first_copy(self, entry_id: int) -> None:
        pass

    def on_confirmed(self, lac: int) -> None:
        pass

    def on_failed(self, error: StratalogError) -> None:
        pass


class BrokenInvariant(AssertionError, StratalogError):
    """A defect that the scenario plants, not the product's own: a log message with it does not fail the run."""


class Scenario(log.Scenario):
    """One run."""

    operators = 0
    segment_ms = 400
    offloaded_min = PROGRESS["ownership-changes"][OFFLOADED]
    reassigns = True
    """Whether somebody reassigns partitions, cancels that, and elects preferred leaders."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._random = world.random("owners")
        self._slow_until: dict[str, float] = {}
        self._deaths = self._random.choice(DEATHS)
        self._breaks_invariants = False
        hesitant = self._random.choice([0.1, 0.6])
        for producer in self._producers:
            producer.hesitant, producer.repeating = hesitant, 0.5

    def simulate(self) -> None:
        with self._broken_invariants():
            super().simulate()

    @contextlib.contextmanager
    def _broken_invariants(self) -> Iterator[None]:
        """Let the cores of partitions find their state inconsistent now and then, while faults happen."""
        intact, chance = PartitionCore.validate_state, self.world.random("broken invariants")

        def validate_state(core: PartitionCore) -> None:
            intact(core)
            if self._breaks_invariants and chance.random() < BROKEN_INVARIANT_CHANCE:
                raise BrokenInvariant

        setattr(PartitionCore, "validate_state", validate_state)  # noqa: B010 - it is a method to the type checker
        try:
            yield
        finally:
            setattr(PartitionCore, "validate_state", intact)  # noqa: B010

    def _make_readers(self, world: World) -> list[Reader]:
        return [Reader(world, self.truth) for _ in range(READERS)]

    def _begin_faults(self) -> list[Callable[[], object]]:
        hold_up = self.world.network.hold_up
        if self.world.decides("late commands"):
            self._hold_up_commands()
        if self.world.decides("deaths in recoveries"):
            self._kill_in_recoveries()
        if self.world.decides("deaths after openings"):
            self._kill_after_openings()
        if self.world.decides("slow adds at handovers"):
            self._slow_adds()
        self._breaks_invariants = self.world.decides("broken invariants")
        plan = NemesisPlan(
            crash=0.5 * self._deaths,
            partition=0.1,
            one_way=0,
            lossy=0,
            clock_jump=0,
            pause_mean_s=1.5,
            down_mean_s=0.6,
            down_at_once_max=2,
        )
        self._outsiders = outsiders = [
            Machine(self.world, "straggler-0", self._straggle),
            Machine(self.world, "twin-0", self._open_again),
            Machine(self.world, "mover-0", self._order_moves),
        ]
        if self.reassigns:
            outsiders.append(Machine(self.world, "reassigner-0", self._reassign))
        for outsider in outsiders:
            outsider.boot()
        nemesis = Nemesis(self.world, self.brokers, plan, name="ownership-changes", everyone=self.servers)
        work: list[Coroutine[Any, Any, None]] = [nemesis.run(), self._outdate(), self._deafen()]
        tasks = [asyncio.get_running_loop().create_task(each) for each in work]
        return [
            nemesis.stop,
            *(task.cancel for task in tasks),
            *(outsider.crash for outsider in outsiders),
            lambda: setattr(self.world.network, "hold_up", hold_up),
            lambda: setattr(self.audit, "on_opening", lambda topic, broker_id, unfinished: None),
            self.world.network.cut.clear,
            lambda: setattr(self, "_breaks_invariants", False),
        ]

    async def _straggle(self, machine: Machine, ports: Ports) -> None:
        """Act as a late owner that knows the current log: only its epoch keeps its commands out."""
        client = await roles.connect_metadata(ports)
        while True:
            await asyncio.sleep(0.05)
            owned = [each for each in client.view.all(Partition) if each.owner >= 0]
            if not owned:
                continue
            before = ports.random.choice(owned)
            for _ in range(40):
                await asyncio.sleep(0.05)
                now = client.view.find(Partition, before.key())
                if now is None or now.leader_epoch != before.leader_epoch:
                    break
            log_now = client.view.get(log_key(before.topic_id, before.index))
            if log_now is None or now is None or now.leader_epoch == before.leader_epoch:
                continue
            late = EpochIs(key=before.key(), owner=before.owner, leader_epoch=before.leader_epoch)
            current = VersionIs(key=log_now.record.key(), version=log_now.version)
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(Put(record=log_now.record),), requirements=(late, current)))

    async def _order_moves(self, machine: Machine, ports: Ports) -> None:
        """Order handovers during the other faults, to any live broker, and now and then revoke the order."""
        client = await roles.connect_metadata(ports)
        while True:
            await asyncio.sleep(ports.random.expovariate(1 / ORDER_MEAN_S))
            live = [each.broker_id for each in client.view.all(Broker)]
            owned = [each for each in client.view.all(Partition) if each.owner in live]
            if not owned:
                continue
            chosen = ports.random.choice(owned)
            others = [each for each in live if each != chosen.owner]
            target = ports.random.choice(others) if others and ports.random.random() >= REVOKE_CHANCE else NO_OWNER
            stored = client.view.get(chosen.key())
            assert stored is not None
            if target != NO_OWNER and ports.random.random() < SLOW_CHANCE:
                self._slow_until[f"broker-{chosen.owner}"] = ports.now + SLOW_S
                await asyncio.sleep(SLOW_S / 2)
            order = Put(record=msgspec.structs.replace(chosen, next_owner=target))
            as_it_is = VersionIs(key=chosen.key(), version=stored.version)
            with contextlib.suppress(StratalogError):
                await client.propose(Command(updates=(order,), requirements=(as_it_is,)))

    async def _reassign(self, machine: Machine, ports: Ports) -> None:
        """Reassign partitions, cancel that and elect preferred leaders, as Kafka's tools do, during the other faults."""
        client = await roles.connect_metadata(ports)
        client.view.subscribe(self._check_reassignments)
        orders = OwnershipOrders(client)
        while True:
            await asyncio.sleep(ports.random.expovariate(1 / REASSIGN_MEAN_S))
            live = [each.broker_id for each in client.view.all(Broker)]
            topics = list(client.view.all(Topic))
            if len(live) < 2 or not topics:
                continue
            topic = ports.random.choice(topics)
            name = NamedPartition(topic.name, ports.random.randrange(topic.partition_count))
            replicas = tuple(ports.random.sample(live, min(len(live), topic.replication_factor)))
            chance = ports.random.random()
            with contextlib.suppress(Unavailable):
                if chance < ELECT_CHANCE:
                    await orders.elect_preferred([name], ELECT_S)
                else:
                    wanted = None if chance < ELECT_CHANCE + CANCEL_CHANCE else replicas
                    await orders.reassign({name: wanted}, REASSIGN_S, may_change_factor=False)

    def _check_reassignments(self, changes: Sequence[Change]) -> None:
        """A reassignment ends with the change of owner that it asked for, and with any other."""
        for change in changes:
            record = change.after.record if change.after is not None else None
            if isinstance(record, Partition) and record.reassigned_from is not None and record.owner == record.replicas[0]:
                self.audit.broken.append(f"{record} has the owner of its reassignment, which has not ended")

    async def _open_again(self, machine: Machine, ports: Ports) -> None:
        """Now and then let an owner's abandoned attempt to open its next ledger take effect after all.

        Only after a sealed ledger, and only in the current log: commands based on other states would be refused. Ledgers of
        internal topics are opened this way, too, and then have no checkpoint at their beginning.
        """
        client = await roles.connect_metadata(ports)
        ledgers = roles.ledger_client(client, ports)
        seen: set[int] = set()
        while True:
            await asyncio.sleep(TWIN_LOOK_S)
            internal = {each.topic_id for each in client.view.all(Topic) if each.internal}
            for owned in [each for each in client.view.all(Partition) if each.owner >= 0]:
                log_now = client.view.get(log_key(owned.topic_id, owned.index))
                if log_now is None or not isinstance(log_now.record, Log) or not log_now.record.ledgers:
                    continue
                last = client.view.find(Ledger, ledger_key(log_now.record.ledgers[-1].ledger_id))
                if last is None or last.state is not LedgerState.CLOSED or last.ledger_id in seen:
                    continue
                seen.add(last.ledger_id)
                if ports.random.random() < TWIN_CHANCE:
                    with contextlib.suppress(StratalogError):
                        await self._open_behind(ledgers, owned, log_now.record, log_now.version, last)
                        is_internal = owned.topic_id in internal
                        self.world.coverage.meet(LATE_INTERNAL_OPENING if is_internal else LATE_OPENING)

    async def _open_behind(self, ledgers: LedgerClient, owned: Partition, log: Log, version: int, last: Ledger) -> None:
        epoch = owned.leader_epoch
        spec = LedgerSpec(
            topic_id=owned.topic_id, partition=owned.index, base_offset=last.end_offset, leader_epoch=epoch,
            ensemble_size=last.write_quorum, write_quorum=last.write_quorum, ack_quorum=last.ack_quorum,
        )  # fmt: skip

        def updates(ledger: Ledger) -> tuple[Update, ...]:
            ref = LedgerRef(ledger_id=ledger.ledger_id, base_offset=last.end_offset, leader_epoch=epoch)
            return (Put(record=msgspec.structs.replace(log, ledgers=(*log.ledgers, ref))),)

        current = VersionIs(key=log.key(), version=version)
        own = EpochIs(key=owned.key(), owner=owned.owner, leader_epoch=epoch)
        await ledgers.create(spec, requirements=(own, current), updates=updates, listener=_NobodyListens())

    def _hold_up_commands(self) -> None:
        """Delay single commands, many beyond their sender's death; lose some answers with their connection."""
        randomness = self.world.random("late")
        senders = {machine.name: machine for machine in [*self.brokers, *self.tiering]}

        def hold_up(message: Message) -> float:
            if message.is_answer:
                asker = senders.get(message.target)
                if asker is None or message.method != messages.PROPOSE:
                    return 0.0
                return BROKEN if randomness.random() < BROKEN_CHANCE[asker in self.tiering] else 0.0
            sender = senders.get(message.source)
            if sender is None or message.method != messages.PROPOSE or randomness.random() >= LATE_CHANCE:
                return 0.0
            if randomness.random() < 0.4 * self._deaths:
                self._kill_soon(sender, randomness, DEATH_S)
            return randomness.uniform(*(LATE_OF_WORKERS_S if sender in self.tiering else LATE_OF_BROKERS_S))

        self.world.network.hold_up = hold_up

    def _kill_in_recoveries(self) -> None:
        """Kill brokers during a recovery, so that its ledger is IN_RECOVERY and not closed."""
        randomness = self.world.random("recoveries")
        brokers = {machine.name: machine for machine in self.brokers}
        hold_up = self.world.network.hold_up

        def killing(message: Message) -> float | None:
            broker = brokers.get(message.source)
            if (
                broker is not None
                and message.method == bookie_messages.FENCE
                and randomness.random() < FENCE_CHANCE * self._deaths
            ):
                self._kill_soon(broker, randomness, DEATH_IN_RECOVERY_S)
            return hold_up(message)

        self.world.network.hold_up = killing

    def _slow_adds(self) -> None:
        """Delay adds of brokers that are about to hand over, so that producers' batches pile up while they are held."""
        randomness = self.world.random("slow adds")
        hold_up = self.world.network.hold_up

        def slowing(message: Message) -> float | None:
            is_add = message.method == bookie_messages.ADD and not message.is_answer
            if is_add and self._slow_until.get(message.source, 0.0) > self.world.loop.time():
                return randomness.uniform(*LATE_ADD_S)
            return hold_up(message)

        self.world.network.hold_up = slowing

    def _kill_after_openings(self) -> None:
        """Kill brokers that have opened a ledger, before its checkpoint is durable or soon after.

        The ledger is of an internal topic, or of one whose older ledgers with records expire while nobody owns it.
        """
        of_internal, of_expiring = self.world.random("openings"), self.world.random("openings of expiring topics")
        brokers = {roles.number_of(machine): machine for machine in self.brokers}

        def opened(topic: Topic, broker_id: int, unfinished: int) -> None:
            is_expiring = int(topic.configs.get("retention.ms", "-1")) >= 0
            if not (topic.internal or is_expiring):
                return
            if topic.internal and unfinished > 1:
                self.world.coverage.meet(UNFINISHED_IN_A_ROW)
            randomness, chance = (of_internal, OPENING_CHANCE) if topic.internal else (of_expiring, EXPIRING_CHANCE)
            if randomness.random() < chance * self._deaths:
                self._kill_soon(brokers[broker_id], randomness, DEATH_AFTER_OPENING_S)

        self.audit.on_opening = opened

    def _kill_soon(self, machine: Machine, randomness: random.Random, within_s: float) -> None:
        self.world.loop.run_as(None, self._kill, machine, randomness.uniform(0.0, within_s), randomness.uniform(0.3, 1.0))

    def _kill(self, machine: Machine, after_s: float, back_after_s: float) -> None:
        self.world.loop.call_later(after_s, machine.crash)
        self.world.loop.call_later(back_after_s, machine.boot)

    async def _outdate(self) -> None:
        """Cut a broker off, for about one lease, from everything that could tell it that it is no longer an owner."""
        turn = 0
        while True:
            turn += 1
            randomness = self.world.random(f"outdate/{turn}")
            await asyncio.sleep(randomness.expovariate(1 / 1.5))
            if not self.world.decides(f"outdate#{turn}"):
                continue
            victim = randomness.choice(self.brokers)
            victim.clock.jump(randomness.choice(CLOCK_JUMPS_MS))
            others = [*self.metadata, *self._clients[:PRODUCERS]]
            await self._cut(
                {pair for other in others for pair in ((victim.name, other.name), (other.name, victim.name))},
                LEASE_S * randomness.choice([0.6, 0.9, 1.2, 2.0]),
            )

    async def _deafen(self) -> None:
        """Lose a broker's answers to one producer; the broker continues."""
        turn = 0
        while True:
            turn += 1
            randomness = self.world.random(f"deafen/{turn}")
            await asyncio.sleep(randomness.expovariate(1 / 0.7))
            if self.world.decides(f"deafen#{turn}"):
                await self._cut(self._answers(randomness), randomness.uniform(0.2, 0.6))

    def _answers(self, randomness: random.Random) -> set[tuple[str, str]]:
        return {(randomness.choice(self.brokers).name, randomness.choice(self._clients[:PRODUCERS]).name)}

    async def _cut(self, pairs: set[tuple[str, str]], seconds: float) -> None:
        self.world.note(f"cut {sorted(pairs)[0]} and {len(pairs) - 1} more for {seconds:.1f} s")
        self.world.network.cut |= pairs
        await asyncio.sleep(seconds)
        self.world.network.cut -= pairs
