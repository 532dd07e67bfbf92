"""Scenario: ledgers alone. Writers are never stopped, and others recover their ledgers at any moment.

Only the ledger protocol keeps a writer from confirming entries that recovery has cut off: there are no leases and no owners.
Checked: a ledger is closed once, at one end; every entry that its writer learns is confirmed, before or after, is before that
end; every bookie that holds an entry holds the written bytes; and at the end every closed ledger can be read completely.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import ENTRIES, Coverage
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec, LedgerWriter
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Overloaded, Retriable, StratalogError
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import Ledger, ledger_key

Found = TypeVar("Found")

BOOKIES: Final = 5
LOG_FILE_BYTES: Final = 64 * 1024
"""The minimum: bookies write their state whenever a file is full."""
WRITERS: Final = 3
RECOVERERS: Final = 2
FAULTS_S: Final = 14.0
SETTLE_S: Final = 2.0
CHECK_S: Final = 90.0
ENTRIES_MAX: Final = 400
ENTRY_PAUSE_S: Final = 0.02
TURN_S: Final = 0.05
PATIENCE_TURNS: Final = 20
AMBUSH_MEAN_S: Final = 1.0
TOPIC_ID: Final = uuid.UUID(int=7)


def _client(metadata: QuorumClient, ports: Ports) -> LedgerClient:
    """Return a client that gives up lost requests while it still matters, and whose ADDs fit into a log file."""
    settings = LedgerClientSettings(request_timeout_ms=500, recovery_retry_ms=100, request_bytes_max=LOG_FILE_BYTES // 2)
    return LedgerClient(metadata, ports.transport, ports.clock, ports.random, settings)


@dataclass(slots=True)
class LedgerTruth:
    """One ledger: the appended entries, the last entry confirmed to its writer, and the end at which it was closed."""

    appended: list[bytes] = field(default_factory=list)
    confirmed: int = -1
    end: int | None = None
    end_offset: int = -1


class Truth:
    """All ledgers by id. Checks the invariants on every update."""

    def __init__(self, audit: Audit, coverage: Coverage) -> None:
        self.ledgers: dict[int, LedgerTruth] = {}
        self.entries_confirmed = 0
        self._coverage = coverage
        self._audit = audit

    def confirmed(self, ledger_id: int, lac: int) -> None:
        known = self.ledgers[ledger_id]
        self._audit.copies.confirmed(ledger_id, known.confirmed + 1, lac)
        self.entries_confirmed += lac - known.confirmed
        self._coverage.meet(ENTRIES, lac - known.confirmed)
        known.confirmed = lac
        self._compare(ledger_id, known)

    def committed(self, ledger_id: int) -> Ledger | None:
        """Return the ledger's committed record."""
        record = self._audit.records.get(ledger_key(ledger_id))
        return record if isinstance(record, Ledger) else None

    def closed(self, ledger: Ledger) -> None:
        known = self.ledgers.setdefault(ledger.ledger_id, LedgerTruth())
        same = known.end in (None, ledger.last_entry)
        self._audit.require(same, f"ledger {ledger.ledger_id} was closed at {known.end} and at {ledger.last_entry}")
        known.end, known.end_offset = ledger.last_entry, ledger.end_offset
        self._compare(ledger.ledger_id, known)

    def _compare(self, ledger_id: int, known: LedgerTruth) -> None:
        kept = known.end is None or known.confirmed <= known.end
        self._audit.require(kept, f"ledger {ledger_id} ends at {known.end}, and {known.confirmed} was confirmed")


class _Listener:
    def __init__(self, truth: Truth, appended: list[bytes]) -> None:
        self._truth = truth
        self._appended = appended
        self.ledger_id = -1

    def on_first_copy(self, entry_id: int) -> None:
        pass

    def on_confirmed(self, lac: int) -> None:
        self._truth.confirmed(self.ledger_id, lac)

    def on_failed(self, error: StratalogError) -> None:
        pass


class Writer:
    """Opens a ledger, appends until the ledger ends or the writer seals it, then opens the next."""

    def __init__(self, truth: Truth, entries_max: int = ENTRIES_MAX, pause_s: float = ENTRY_PAUSE_S) -> None:
        self._truth = truth
        self._entries_max = entries_max
        self._pause_s = pause_s
        self.open_ledger = -1
        self.is_writing = False
        """Whether it has not yet learned how its ledger ended."""

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = _client(await roles.connect_metadata(ports), ports)
        for turn in itertools.count():
            if not machine.world.decides(f"{machine.name}.{machine.starts}/{turn}"):
                await asyncio.sleep(TURN_S)
                continue
            try:
                await self._write_one(client, ports)
            except StratalogError as failure:
                machine.world.note(f"  {machine.name}: {failure!r}")
                await asyncio.sleep(0.1)
            finally:
                self.is_writing = False

    async def _write_one(self, client: LedgerClient, ports: Ports) -> None:
        known = LedgerTruth()
        listener = _Listener(self._truth, known.appended)
        ensemble_size = ports.random.choice([3, 3, 4])
        spec = LedgerSpec(
            topic_id=TOPIC_ID, partition=0, base_offset=0, leader_epoch=0,
            ensemble_size=ensemble_size, write_quorum=3, ack_quorum=2,
        )  # fmt: skip
        writer = await client.create(spec, updates=lambda ledger: (), listener=listener)
        self.open_ledger = listener.ledger_id = writer.ledger.ledger_id
        self._truth.ledgers[self.open_ledger] = known
        self.is_writing = True
        for _ in range(ports.random.randrange(self._entries_max)):
            if writer.error is not None:
                return
            self._append(writer, known, ports)
            await asyncio.sleep(ports.random.expovariate(1 / self._pause_s))
        self._truth.closed(await writer.seal(len(known.appended)))

    def _append(self, writer: LedgerWriter, known: LedgerTruth, ports: Ports) -> None:
        number = len(known.appended)
        value = b"%d/%d/" % (writer.ledger.ledger_id, number) + bytes(ports.random.randrange(600))
        batch = bytearray(build_batch([Record(offset=0, timestamp_ms=ports.clock.wall_ms(), key=None, value=value)]))
        batch[:8] = number.to_bytes(8, "big")
        try:
            writer.append(bytes(batch))
        except Overloaded:
            return
        known.appended.append(bytes(batch))


class Recoverer:
    """Recovers writers' ledgers at random moments, in competition with other recoverers."""

    def __init__(self, truth: Truth, writers: list[Writer], audit: Audit) -> None:
        self._truth = truth
        self._writers = writers
        self._audit = audit
        self.hints: list[int] = []

    async def run(self, machine: Machine, ports: Ports) -> None:
        client = _client(await roles.connect_metadata(ports), ports)
        for turn in itertools.count():
            for _ in range(ports.random.randrange(1, 2 * PATIENCE_TURNS)):
                await asyncio.sleep(TURN_S)
                if self.hints:
                    break
            ledger_id = self.hints.pop() if self.hints else ports.random.choice(self._writers).open_ledger
            if ledger_id >= 0 and machine.world.decides(f"{machine.name}.{machine.starts}/{turn}"):
                await self._recover(client, ledger_id, machine)

    async def _recover(self, client: LedgerClient, ledger_id: int, machine: Machine) -> None:
        try:
            (ledger,) = await client.recover([ledger_id])
        except Corrupt as lost:
            self._audit.require(False, f"recovery of ledger {ledger_id} found confirmed entries lost: {lost}")
        except StratalogError as failure:
            machine.world.note(f"  {machine.name}: recovering {ledger_id}: {failure!r}")
        else:
            self._truth.closed(ledger)


async def _patiently(ask: Callable[[], Awaitable[Found]]) -> Found:
    """Repeat until bookies that have just restarted answer."""
    while True:
        try:
            return await ask()
        except Retriable:
            await asyncio.sleep(0.5)


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.audit = world.audit = Audit(world.note)
        self.audit.copies.watch_answers(world.network)
        self.truth = Truth(self.audit, world.coverage)
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        bookie = partial(roles.run_bookie, log_file_bytes=LOG_FILE_BYTES)
        self.bookies = [Machine(world, f"bookie-{number}", bookie) for number in range(1, BOOKIES + 1)]
        self._random = world.random("ambush")
        self._writers = writers = [Writer(self.truth) for _ in range(WRITERS)]
        self.writers = [Machine(world, f"writer-{number}", one.run) for number, one in enumerate(writers)]
        self._others = others = [Recoverer(self.truth, writers, self.audit) for _ in range(RECOVERERS)]
        self.recoverers = [Machine(world, f"recoverer-{number}", one.run) for number, one in enumerate(others)]

    def simulate(self) -> None:
        self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        everyone = [*self.metadata, *self.bookies, *self.writers, *self.recoverers]
        self.world.network.faults.slow_chance, self.world.network.faults.slow_s = 0.03, 0.6
        for machine in everyone:
            machine.boot()
        await self._faults(everyone)
        for machine in self.writers:
            machine.crash()
        await self._pass(SETTLE_S)
        for machine in self.recoverers:
            machine.crash()
        checker = Machine(self.world, "checker-0", self._check)
        checker.boot()
        await asyncio.wait_for(checker.ended.wait(), CHECK_S)
        if checker.failure is not None:
            raise checker.failure
        self._check_now()
        self.world.note(f"{len(self.truth.ledgers)} ledgers, {self.truth.entries_confirmed} entries confirmed")

    async def _faults(self, everyone: list[Machine]) -> None:
        clients = [*self.writers, *self.recoverers]
        plans = [
            (self.bookies, NemesisPlan(crash=0.1, stop=0.15, disk=0.25, lossy=0.2, pause_mean_s=0.6, down_mean_s=0.8)),
            (self.bookies, NemesisPlan(crash=0, partition=0, one_way=0, lossy=0, power_cut=1.0, pause_mean_s=3.5)),
            (
                self.bookies,
                NemesisPlan(
                    crash=0, partition=0, one_way=0, lossy=0, clock_jump=0, hang=0.8, pause_mean_s=1.2, down_mean_s=0.6
                ),
            ),
            (clients, NemesisPlan(crash=0.15, stop=0.35, partition=0.1, one_way=0.15, pause_mean_s=0.8, down_mean_s=0.7)),
        ]
        nemeses = [
            Nemesis(self.world, machines, plan, name=f"ledgers/{number}", everyone=everyone)
            for number, (machines, plan) in enumerate(plans)
        ]
        tasks = [asyncio.get_running_loop().create_task(nemesis.run()) for nemesis in nemeses]
        ambush = asyncio.get_running_loop().create_task(self._ambush())
        await self._pass(FAULTS_S)
        for nemesis, task in zip(nemeses, tasks, strict=True):
            nemesis.stop()
            task.cancel()
        ambush.cancel()
        for machine in everyone:
            machine.go_on()
            machine.boot()

    async def _ambush(self) -> None:
        """Stop a writer, have its ledger recovered and bookies restarted, then resume it."""
        for turn in itertools.count():
            self._random = self.world.random(f"ambush/{turn}")
            await asyncio.sleep(self._random.expovariate(1 / AMBUSH_MEAN_S))
            if not self.world.decides(f"ambush#{turn}"):
                continue
            number = self._random.randrange(WRITERS)
            self.writers[number].stop()
            self._random.choice(self._others).hints.append(self._writers[number].open_ledger)
            await asyncio.sleep(self._random.uniform(0.05, 0.6))
            victims = self._random.sample(self.bookies, self._random.randrange(BOOKIES + 1))
            for victim in victims:
                victim.crash()
            await asyncio.sleep(self._random.uniform(0.01, 0.1))
            for victim in victims:
                victim.boot()
            await asyncio.sleep(self._random.uniform(0.1, 0.6))
            self.writers[number].go_on()

    async def _pass(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            self._check_now()

    def _check_now(self) -> None:
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.metadata, *self.bookies, *self.writers, *self.recoverers]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure

    async def _check(self, machine: Machine, ports: Ports) -> None:
        client = _client(await roles.connect_metadata(ports), ports)
        for ledger_id, known in sorted(self.truth.ledgers.items()):
            (ledger,) = await _patiently(partial(client.recover, [ledger_id]))
            self.truth.closed(ledger)
            self._check_now()
            assert ledger.last_entry < len(known.appended), (
                f"ledger {ledger_id} ends at {ledger.last_entry}, beyond the last append"
            )
            entry_id = 0
            while entry_id <= ledger.last_entry:
                for entry in await _patiently(partial(client.read, ledger, entry_id, ledger.last_entry, 1 << 20)):
                    assert entry.entry_id == entry_id, f"entry {entry.entry_id} of ledger {ledger_id} came for {entry_id}"
                    assert bytes(entry.payload) == known.appended[entry_id], (
                        f"entry {entry_id} of ledger {ledger_id} is another"
                    )
                    entry_id += 1
