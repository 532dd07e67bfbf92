"""Scenario: races for single ledgers, each with its own link faults.

A writer appends a few entries and is never stopped; a recoverer closes the ledger at the worst moment. Between the two and each
bookie every kind of message is delayed or lost independently, by the seed, and one bookie's copy of a newly confirmed entry is
corrupted. Most races follow a script (``fencing_scripts.py``) with names and timings from the seed.

Checked: the invariants of ``ledgers``, after each race; and that with any one bookie away every entry can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Final

from simulation.checkers.audit import Audit
from simulation.faults.link_faults import LOST, LinkFaults
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.fencing_scripts import (
    TO_BOOKIES,
    acked_by_who_leaves,
    any_link_faults,
    late_adds,
    rewritten_elsewhere,
    unreadable_copy,
    young_fragment,
)
from simulation.scenarios.ledgers import TOPIC_ID, LedgerTruth, Truth
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_bookies.protocol import messages
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, StratalogError
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.protocol import messages as metadata_messages
from stratalog_metadata.records import Ledger, ledger_key
from stratalog_metadata.state.commands import Command, Delete, VersionIs

BOOKIES: Final = 6
PAIRS: Final = 4
FAULTS_S: Final = 14.0
FINISH_S: Final = 60.0
DUEL_S: Final = 2.5
READ_S: Final = 20.0
WRITER_TIMEOUTS_MS: Final = (300, 2_000)
RECOVERER_TIMEOUT_MS: Final = 300

Script = Callable[["FencingRace"], None]
SCRIPTS: Final[tuple[Script, ...]] = (
    any_link_faults, any_link_faults, late_adds, young_fragment, acked_by_who_leaves, rewritten_elsewhere, unreadable_copy,
)  # fmt: skip


def _client(metadata: QuorumClient, ports: Ports, request_timeout_ms: int) -> LedgerClient:
    """Return a client. Recoverers time out early and writers late, so that late replies still reach a waiting writer."""
    settings = LedgerClientSettings(
        request_timeout_ms=request_timeout_ms, recovery_retry_ms=100, bookie_avoid_ms=200, bookie_avoid_ms_max=800
    )
    return LedgerClient(metadata, ports.transport, ports.clock, ports.random, settings)


class FencingRace:
    """One ledger from its first entry to its end. Also the writer's listener."""

    def __init__(self, pair: Pair, randomness: random.Random, script: Script) -> None:
        self.pair = pair
        self.random = randomness
        self.known = LedgerTruth()
        self.recover = asyncio.Event()
        self.ledger_id = -1
        self.bookies: tuple[str, ...] = ()
        self.entries = randomness.randint(1, 12)
        self.pause_s = randomness.choice([0.0, 0.01, 0.05])
        self.striped = False
        self.before_append: Callable[[int], None] = lambda entry_id: None
        self.after_first_copy: Callable[[int], None] = lambda entry_id: None
        self.after_confirmed: Callable[[int], None] = lambda lac: None
        self._script = script

    def opened(self, writer: LedgerWriter) -> None:
        self.ledger_id, self.bookies = writer.ledger.ledger_id, writer.ledger.fragments[-1].bookies
        self.pair.truth.ledgers[self.ledger_id] = self.known
        self._script(self)

    def on_first_copy(self, entry_id: int) -> None:
        self.after_first_copy(entry_id)

    def on_confirmed(self, lac: int) -> None:
        self.pair.truth.confirmed(self.ledger_id, lac)
        self.after_confirmed(lac)

    def on_failed(self, error: StratalogError) -> None:
        pass

    def payload(self, entry_id: int, timestamp_ms: int) -> bytes:
        value = b"%d/%d/" % (self.ledger_id, entry_id) + self.random.randbytes(20 + self.random.randrange(300))
        batch = bytearray(build_batch([Record(offset=0, timestamp_ms=timestamp_ms, key=None, value=value)]))
        batch[:8] = entry_id.to_bytes(8, "big")
        self.known.appended.append(bytes(batch))
        return bytes(batch)

    def recover_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.recover.set)


class Pair:
    """A writer and the recoverer of its ledgers; they run one race after another."""

    def __init__(self, scenario: Scenario, number: int, scripts: Sequence[Script]) -> None:
        world = scenario.world
        self.truth = scenario.truth
        self.link_faults = scenario.link_faults
        self.bookies = [machine.name for machine in scenario.bookies]
        self.races = 0
        self.writer = Machine(world, f"writer-{number}", self._write)
        self.recoverer = Machine(world, f"recoverer-{number}", self._recover)
        self._scenario = scenario
        self._random = world.random(f"duels/{number}")
        self._scripts = scripts
        self._race: FencingRace | None = None
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self.stopping = False
        self.stopped = asyncio.Event()

    # -- steps for scripts

    def spoil(self, batch: bytes) -> None:
        """Flip a bit in the rotten bookie's copy, if it has one."""
        machine = self._scenario.bookies[0]
        for path, content in sorted(machine.disk.content.items()):
            at = content.now.rfind(batch[-20:]) if path.endswith(".log") else -1
            if at >= 0:
                machine.is_rotten = machine.is_excused = True
                machine.disk.flip_bit(path, at, 3)

    def away(self, bookie: str) -> None:
        """Make this bookie unreachable for the recoverer."""
        for method in TO_BOOKIES:
            self.link_faults.set(self.recoverer.name, bookie, method, LOST)

    def on_change(self, race: FencingRace) -> None:
        """Start recovery as soon as the ledger's ensemble has changed."""
        ledger = self.truth.committed(race.ledger_id)
        if ledger is not None and len(ledger.fragments) > 1:
            race.recover.set()
        elif not race.recover.is_set():
            asyncio.get_running_loop().call_later(0.005, self.on_change, race)

    # -- the two processes

    async def _write(self, machine: Machine, ports: Ports) -> None:
        client = _client(await roles.connect_metadata(ports), ports, self._random.choice(WRITER_TIMEOUTS_MS))
        while not self.stopping:
            try:
                await self._race_once(client, ports)
            except StratalogError as failure:
                machine.world.note(f"  {machine.name}: {failure!r}")
                await asyncio.sleep(0.1)
        self.stopped.set()

    async def _race_once(self, client: LedgerClient, ports: Ports) -> None:
        race = FencingRace(self, self._random, self._random.choice(self._scripts))
        script = race._script
        size = 3 if script is not any_link_faults else self._random.choice([3, 3, 4])
        spec = LedgerSpec(
            topic_id=TOPIC_ID, partition=0, base_offset=0, leader_epoch=0, ensemble_size=size, write_quorum=3, ack_quorum=2
        )  # fmt: skip
        writer = await client.create(spec, updates=lambda ledger: (), listener=race)
        self._scenario.world.note(f"  {self.writer.name}: ledger {writer.ledger.ledger_id}, {script.__name__}")
        race.opened(writer)
        self._race = race
        self._over.clear()
        self._begun.set()
        for entry_id in range(race.entries):
            if writer.error is not None:
                break
            race.before_append(entry_id)
            writer.append(race.payload(entry_id, ports.clock.wall_ms()))
            await asyncio.sleep(race.pause_s)
        await self._over.wait()
        writer.abandon()
        self.races += 1

    async def _recover(self, machine: Machine, ports: Ports) -> None:
        metadata = await roles.connect_metadata(ports)
        client = _client(metadata, ports, RECOVERER_TIMEOUT_MS)
        while True:
            await self._begun.wait()
            self._begun.clear()
            assert self._race is not None
            race = self._race
            await race.recover.wait()
            asyncio.get_running_loop().call_later(self._random.uniform(0.8, DUEL_S), self._clear)
            ledger = await self._close(client, race, machine)
            # Late adds can still be acknowledged.
            await asyncio.sleep(self._random.uniform(0.0, 1.0))
            self._clear()
            await self._check(client, ledger, race)
            await self._forget(metadata, race)
            self._over.set()

    def _clear(self) -> None:
        self.link_faults.clear(self.writer.name)
        self.link_faults.clear(self.recoverer.name)

    async def _close(self, client: LedgerClient, race: FencingRace, machine: Machine) -> Ledger:
        while True:
            try:
                (ledger,) = await client.recover([race.ledger_id])
            except Corrupt as lost:
                self._scenario.audit.require(False, f"recovery of ledger {race.ledger_id} found confirmed entries lost: {lost}")
                await asyncio.Event().wait()
            except StratalogError as failure:
                machine.world.note(f"  {machine.name}: recovering {race.ledger_id}: {failure!r}")
                await asyncio.sleep(0.1)
            else:
                self.truth.closed(ledger)
                return ledger

    async def _check(self, client: LedgerClient, ledger: Ledger, race: FencingRace) -> None:
        """Read all entries with one of the ledger's bookies unreachable."""
        require = self._scenario.audit.require
        require(ledger.last_entry < len(race.known.appended), f"ledger {ledger.ledger_id} ends beyond the last append")
        away = self._random.choice(ledger.fragments[-1].bookies)
        self.link_faults.set(self.recoverer.name, away, messages.READ, LOST)
        entry_id = 0
        async with asyncio.timeout(READ_S):
            while entry_id <= ledger.last_entry:
                try:
                    entries = await client.read(ledger, entry_id, ledger.last_entry, 1 << 20)
                except StratalogError:
                    self._clear()
                    await asyncio.sleep(0.2)
                    continue
                for entry in entries:
                    same = bytes(entry.payload) == race.known.appended[entry_id]
                    require(same, f"entry {entry_id} of ledger {ledger.ledger_id} is another")
                    entry_id += 1
        self._clear()

    async def _forget(self, metadata: QuorumClient, race: FencingRace) -> None:
        """Delete the ledger at random, so that bookies have something to collect."""
        found = metadata.view.get(ledger_key(race.ledger_id))
        if found is not None and self._random.random() < 0.7:
            key = ledger_key(race.ledger_id)
            command = Command(updates=(Delete(key=key),), requirements=(VersionIs(key=key, version=found.version),))
            with contextlib.suppress(StratalogError):
                await metadata.propose(command)


class Scenario:
    """One run of races with ``scripts``, drawn with equal chances."""

    def __init__(self, world: World, scripts: Sequence[Script] = SCRIPTS) -> None:
        self.world = world
        self.audit = world.audit = Audit(world.note)
        self.audit.copies.watch_answers(world.network)
        self.truth = Truth(self.audit, world.coverage)
        self.link_faults = LinkFaults(world.network)
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        self.bookies = [Machine(world, f"bookie-{number}", roles.run_bookie) for number in range(1, BOOKIES + 1)]
        self.pairs = [Pair(self, number, scripts) for number in range(PAIRS)]

    @property
    def _machines(self) -> list[Machine]:
        clients = [machine for pair in self.pairs for machine in (pair.writer, pair.recoverer)]
        return [*self.metadata, *self.bookies, *clients]

    def simulate(self) -> None:
        self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        for machine in self._machines:
            machine.boot()
        # Garbage collection learns of new ledgers late.
        randomness = self.world.random("scans")
        for bookie in self.bookies:
            for node in self.metadata:
                late_s = randomness.choice([0.0, 0.3])
                self.link_faults.set(bookie.name, node.name, metadata_messages.SCAN, late_s, answers=True)
        plan = NemesisPlan(
            crash=0.2, stop=0.1, disk=0.1, partition=0, one_way=0, lossy=0.05, clock_jump=0, pause_mean_s=0.8, down_mean_s=0.5
        )  # fmt: skip
        # Skip the bookie whose bits rot: it does not restart once it finds its log damaged.
        nemesis = Nemesis(self.world, self.bookies[1:], plan, name="duels", everyone=self._machines)
        task = asyncio.get_running_loop().create_task(nemesis.run())
        await self._pass(FAULTS_S)
        nemesis.stop()
        task.cancel()
        for pair in self.pairs:
            pair.stopping = True
        for _ in range(int(FINISH_S)):
            if all(pair.stopped.is_set() for pair in self.pairs):
                break
            await self._pass(1.0)
        assert all(pair.stopped.is_set() for pair in self.pairs), f"a race did not end in {FINISH_S:g} s"
        self.world.note(f"{sum(pair.races for pair in self.pairs)} races, {self.truth.entries_confirmed} entries confirmed")

    async def _pass(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            assert not self.audit.broken, self.audit.broken[0]
            for machine in self._machines:
                if machine.failure is not None:
                    raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
