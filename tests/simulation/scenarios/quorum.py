"""Scenario: a metadata quorum of three under crashes, cuts and loss; clients allocate ids and count by compare-and-set.

Meanwhile a fourth node is added and removed, and disks are lost and replaced.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial

from simulation.checkers.audit import Audit
from simulation.faults.membership_nemesis import MembershipNemesis
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.world.machine import Machine, Ports, World
from simulation.world.roles import metadata_addresses, run_metadata_node
from stratalog_core.errors import Conflict, OutcomeUnknown, Retriable
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import LEDGER_IDS, Counter, counter_key
from stratalog_metadata.state.commands import ABSENT, Allocate, Command, Put, VersionIs

CLIENTS = 3
CHUNK = 10
"""The number of turns of a client in one decision."""
FAULTS_S = 12.0
HANGS_SHARE = 0.2
HEAL_S = 10.0
LOOK_S = 0.25
SURGERY_S = 60.0


class History:
    """Results that clients got. Checked at the end against the quorum's records."""

    def __init__(self) -> None:
        self.allocated: list[tuple[int, int]] = []
        self.counted = 0
        self.perhaps_counted = 0
        self.errors = 0

    def check(self, ids: Counter | None, count: Counter | None) -> None:
        """Assert that ids are unique and the count includes every acknowledged increment, but no more than possible."""
        handed_out = sorted(self.allocated)
        for (first, size), (following, _) in itertools.pairwise(handed_out):
            assert first + size <= following, f"ids from {following} on were handed out twice"
        if handed_out:
            assert ids is not None
            assert ids.next_value >= handed_out[-1][0] + handed_out[-1][1], "the counter of ids went back"
        found = 0 if count is None else count.next_value
        assert self.counted <= found <= self.counted + self.perhaps_counted, (
            f"{self.counted} counts acknowledged, {self.perhaps_counted} unknown, {found} found"
        )


class CountingClient:
    """Allocates ids and increments one shared record by compare-and-set, repeatedly."""

    def __init__(self, history: History, audit: Audit) -> None:
        self._history = history
        self._audit = audit
        self.done = False
        self.is_needed = False
        """Set when the faults are over: the client then takes every turn, to show that it makes progress."""
        self.ended = asyncio.Event()

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = QuorumClient(metadata_addresses(), ports.transport, ports.clock, ports.random)
        await client.start(timeout_s=120)
        for turn in itertools.count():
            if self.done:
                break
            if not (self.is_needed or machine.world.decides(f"{machine.name}/{turn // CHUNK}")):
                await asyncio.sleep(0.05)
                continue
            try:
                await self._allocate(client, ports)
                await self._count(client)
                await self._read_back(client)
            except Retriable:
                self._history.errors += 1
            await asyncio.sleep(ports.random.random() * 0.1)
        self.ended.set()

    async def _allocate(self, client: QuorumClient, ports: Ports) -> None:
        size = 1 + ports.random.randrange(10)
        try:
            applied = await client.propose(Command(updates=(Allocate(counter=LEDGER_IDS, count=size),)), timeout_s=3)
        except OutcomeUnknown:
            return
        self._history.allocated.append((applied.allocated[0], size))

    async def _count(self, client: QuorumClient) -> None:
        key = counter_key("counted")
        found = client.view.get(key)
        record = Counter(name="counted", next_value=1)
        version = ABSENT
        if found is not None:
            assert isinstance(found.record, Counter)
            record, version = Counter(name="counted", next_value=found.record.next_value + 1), found.version
        command = Command(updates=(Put(record=record),), requirements=(VersionIs(key=key, version=version),))
        try:
            await client.propose(command, timeout_s=3)
        except Conflict:
            return
        except OutcomeUnknown:
            self._history.perhaps_counted += 1
            return
        self._history.counted += 1

    async def _read_back(self, client: QuorumClient) -> None:
        """Check that a read sees every increment that was acknowledged to any client before it began."""
        counted = self._history.counted
        (found,) = await client.read([counter_key("counted")])
        value = found.record.next_value if found is not None and isinstance(found.record, Counter) else 0
        self._audit.require(value >= counted, f"a read found {value} counts after {counted} had been acknowledged")


def simulate(world: World) -> None:
    """Run the scenario. Raises ``AssertionError`` if an invariant does not hold."""
    nodes = [Machine(world, address.partition(":")[0], run_metadata_node) for address in metadata_addresses()]
    audit = Audit(world.note)
    run_under_faults(world, nodes, audit, partial(_faults_and_changes, world, audit))


def run_under_faults(
    world: World, nodes: list[Machine], audit: Audit, faults: Callable[[list[Machine]], Awaitable[None]]
) -> None:
    """Run clients during ``faults``, and require that they make progress afterwards."""
    history = History()
    world.audit = audit
    workers = [CountingClient(history, audit) for _ in range(CLIENTS)]
    clients = [Machine(world, f"client-{number}", worker.run) for number, worker in enumerate(workers)]

    async def scenario() -> None:
        for machine in [*nodes, *clients]:
            machine.boot()
        await faults(nodes)
        for worker in workers:
            worker.is_needed = True
        await _heal(history)
        assert not audit.broken, audit.broken[0]
        for worker in workers:
            worker.done = True
        for worker in workers:
            async with asyncio.timeout(HEAL_S):
                await worker.ended.wait()
        await _check(world, history)

    world.loop.run_until_complete(scenario())
    for machine in [*nodes, *clients]:
        if machine.failure is not None:
            raise AssertionError(f"{machine.name} failed") from machine.failure
    world.note(f"{len(history.allocated)} allocations, {history.counted} counts, {history.errors} refusals")


async def _faults_and_changes(world: World, audit: Audit, nodes: list[Machine]) -> None:
    """Change members during the faults; finish a started change afterwards."""
    membership_nemesis = MembershipNemesis(world, nodes)
    operator = Machine(world, "membership_nemesis", membership_nemesis.run)
    operator.boot()
    await _faults(world, audit, nodes)
    membership_nemesis.stopped = True
    async with asyncio.timeout(SURGERY_S):
        await operator.ended.wait()
    if operator.failure is not None:
        raise AssertionError("the membership_nemesis failed") from operator.failure
    world.note(f"{membership_nemesis.done} changes of members")


def _nemeses(world: World, nodes: list[Machine]) -> list[Nemesis]:
    """The faults of a run. Disks that hang for long are among few others: a crash would end the hang."""
    if world.random("disks").random() < HANGS_SHARE:
        few = NemesisPlan(crash=0.05, stop=0.05, partition=0.05, one_way=0, lossy=0, hang=0.6, down_mean_s=4.0)
        return [Nemesis(world, nodes, few)]
    cuts = NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, clock_jump=0, power_cut=0.8, pause_mean_s=1.5)
    return [Nemesis(world, nodes, NemesisPlan(stop=0.1)), Nemesis(world, nodes, cuts, name="power")]


async def _faults(world: World, audit: Audit, nodes: list[Machine]) -> None:
    nemeses = _nemeses(world, nodes)
    tasks = [asyncio.get_running_loop().create_task(nemesis.run()) for nemesis in nemeses]
    await watch(nodes, audit, FAULTS_S)
    for nemesis, task in zip(nemeses, tasks, strict=True):
        nemesis.stop()
        task.cancel()


async def watch(nodes: list[Machine], audit: Audit, seconds: float) -> None:
    """Let time pass; fail at the first broken invariant or failed node."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1.0)
        assert not audit.broken, audit.broken[0]
        for node in nodes:
            assert node.failure is None, f"{node.name} failed: {node.failure!r}"


async def _heal(history: History) -> None:
    """Wait until the clients count again."""
    before = history.counted
    for _ in range(int(HEAL_S / LOOK_S)):
        await asyncio.sleep(LOOK_S)
        if history.counted > before + CLIENTS:
            return
    raise AssertionError(f"{history.counted - before} counts in {HEAL_S:g} s after the faults had ended")


async def _check(world: World, history: History) -> None:
    async def read(machine: Machine, ports: Ports) -> None:
        client = QuorumClient(metadata_addresses(), ports.transport, ports.clock, ports.random)
        await client.start(timeout_s=60)
        found = [versioned.record if versioned else None for versioned in await client.read(keys)]
        ids, count = (record if isinstance(record, Counter) else None for record in found)
        history.check(ids, count)

    keys = [counter_key(LEDGER_IDS), counter_key("counted")]
    checker = Machine(world, "checker", read)
    checker.boot()
    await asyncio.wait_for(checker.ended.wait(), 90)
    if checker.failure is not None:
        raise checker.failure
