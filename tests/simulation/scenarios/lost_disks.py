"""Scenario: disks are lost permanently, one after another, while the auditor re-replicates their entries.

A writer seals ledger after ledger. Now and then a bookie loses its disk. It may try to come back with an empty one, and must be
refused; a new bookie takes its place. When the auditor has replaced every lost copy, the next disk is lost, until none of the
first bookies is left. Bookies share hosts. Checked: no record names a bookie that lacks entries; after each loss all
closed ledgers get all their copies back, on as many hosts as there are; at the end all confirmed entries are readable, and new
ledgers span all hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final

from simulation.checkers.audit import Audit
from simulation.faults.nemesis import Nemesis, NemesisPlan
from simulation.scenarios.checker_machine import run_in_checker
from simulation.scenarios.ledgers import TOPIC_ID, Recoverer, Truth, Writer
from simulation.world import roles
from simulation.world.disk import Disk
from simulation.world.machine import Machine, Ports, World
from stratalog_bookies.client import LedgerClient, LedgerClientSettings, LedgerSpec
from stratalog_core.errors import Invalid, StratalogError
from stratalog_metadata.records import Bookie, Ledger, LedgerState

BOOKIES: Final = 5
LOSSES: Final = 5
BETWEEN_S: Final = 1.5
ENTRIES_MAX: Final = 100
ENTRY_PAUSE_S: Final = 0.06
"""Few entries with long pauses give as many ledgers as many entries would, and ledgers are the unit of copying and recovery."""
HOSTS: Final = roles.BOOKIE_HOSTS
PLACED: Final = 5
"""The number of ledgers that are placed at the end."""
ID_BLOCK: Final = 2
REPLICATED_S: Final = 40
LOOK_S: Final = 0.25
READ_S: Final = 60.0


class _Silent:
    def on_first_copy(self, entry_id: int) -> None: ...
    def on_confirmed(self, lac: int) -> None: ...
    def on_failed(self, error: StratalogError) -> None: ...


def _hosts(bookies: Iterable[str]) -> int:
    return len({roles.host_of(name) for name in bookies})


class Scenario:
    """One run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.audit = world.audit = Audit(world.note)
        self.audit.copies.watch_answers(world.network)
        self.truth = Truth(self.audit, world.coverage)
        self.metadata = [Machine(world, f"metadata-{number}", roles.run_metadata_node) for number in range(1, 4)]
        self.bookies = [self._bookie(number) for number in range(1, BOOKIES + 1)]
        self._writing = writers = [Writer(self.truth, ENTRIES_MAX, ENTRY_PAUSE_S) for _ in range(2)]
        recoverer = Recoverer(self.truth, writers, self.audit)
        self.writers = [Machine(world, f"writer-{number}", one.run) for number, one in enumerate(writers)]
        self.clients = [*self.writers, Machine(world, "recoverer-0", recoverer.run)]
        self._random = world.random("losses")
        self._exposed: set[int] = set()
        """The open ledgers that may lack a copy since the last disk was lost: nobody repairs them until they are closed."""
        self._taken_over: set[int] = set()
        """The ledgers that were recovered since the last disk was lost while their writers had them open."""
        self._next_number = BOOKIES
        self._lost: set[str] = set()

    def _bookie(self, number: int) -> Machine:
        main = partial(roles.run_bookie, audit_delay_s=1.0, audit_interval_s=0.5)
        return Machine(self.world, f"bookie-{number}", main)

    def simulate(self) -> None:
        self.world.loop.run_until_complete(self._run())

    async def _run(self) -> None:
        for machine in [*self.metadata, *self.bookies, *self.clients]:
            machine.boot()
        plan = NemesisPlan(crash=0.2, stop=0.1, partition=0.1, one_way=0.05, lossy=0.05, clock_jump=0, down_mean_s=0.5)
        for number in range(1, LOSSES + 1):
            everyone = [*self.metadata, *self.bookies]
            nemesis = Nemesis(self.world, list(self.bookies), plan, name=f"lost/{number}", everyone=everyone)
            task = asyncio.get_running_loop().create_task(nemesis.run())
            await self._pass(BETWEEN_S + self._random.random())
            nemesis.stop()
            task.cancel()
            self._require_writers_that_go_on()
            await self._restore_copies(number)
            # The oldest first: at the end none of the first bookies is left.
            await self._lose(self.bookies.pop(0))
            await self._until_replicated()
        await self._stop_writing()
        await self._until_replicated()
        await self._in_machine("checker-0", self._read)
        await self._in_machine("placer-0", self._place)
        self.world.note(f"{len(self._closed())} ledgers, {self.truth.entries_confirmed} entries confirmed, {LOSSES} disks lost")

    async def _lose(self, bookie: Machine) -> None:
        self._exposed = {ledger.ledger_id for ledger in self._open()}
        self._lost.add(bookie.name)
        bookie.crash()
        bookie.disk = Disk(bookie.name, self._random)
        self.audit.copies.lost(bookie.name)
        self.world.note(f"the disk of {bookie.name} is lost")
        if self._random.random() < 0.5 and self._is_known(bookie):
            await self._return_empty(bookie)
        self._next_number += 1
        fresh = self._bookie(self._next_number)
        self.bookies.append(fresh)
        await asyncio.sleep(self._random.uniform(0.0, 1.5))
        fresh.boot()

    def _is_known(self, bookie: Machine) -> bool:
        """Return whether the bookie ever registered: one that did not may start with an empty disk."""
        return any(isinstance(record, Bookie) and record.bookie_id == bookie.name for record in self.audit.records.values())

    async def _return_empty(self, bookie: Machine) -> None:
        """Check that a bookie whose cookie is gone cannot boot with an empty disk."""
        bookie.ended.clear()
        bookie.boot()
        async with asyncio.timeout(READ_S):
            await bookie.ended.wait()
        assert isinstance(bookie.failure, Invalid), f"{bookie.name} came back with an empty disk: {bookie.failure!r}"

    def _ledgers(self) -> list[Ledger]:
        return [record for record in self.audit.records.values() if isinstance(record, Ledger)]

    def _closed(self) -> list[Ledger]:
        return [ledger for ledger in self._ledgers() if ledger.state is LedgerState.CLOSED]

    def _open(self) -> list[Ledger]:
        return [ledger for ledger in self._ledgers() if ledger.state is not LedgerState.CLOSED]

    async def _until_replicated(self) -> None:
        """Wait until every ledger that is closed now has all its copies, on disks that exist."""
        await self._until_whole(ledger.ledger_id for ledger in self._closed())

    async def _until_whole(self, ledger_ids: Iterable[int]) -> None:
        wanted = sorted(ledger_ids)
        for _ in range(int(REPLICATED_S / LOOK_S)):
            await self._pass(LOOK_S)
            wanted = [ledger_id for ledger_id in wanted if not self._is_whole(self._ledger(ledger_id))]
            if not wanted:
                return
        raise AssertionError(f"ledgers {wanted[:5]} still lack copies or hosts {REPLICATED_S} s after a disk was lost")

    def _is_whole(self, ledger: Ledger) -> bool:
        """Return whether the ledger has all copies, and no two on one host while another host could take one."""
        if self.audit.copies.under_replicated(ledger):
            return False
        return all(_hosts(fragment.bookies) == min(ledger.ensemble_size, HOSTS) for fragment in ledger.fragments)

    def _ledger(self, ledger_id: int) -> Ledger:
        ledger = self.truth.committed(ledger_id)
        assert ledger is not None, "nobody deletes ledgers here"
        return ledger

    async def _stop_writing(self) -> None:
        for machine in self.clients:
            machine.crash()
        await self._in_machine("sealer-0", self._seal)

    def _require_writers_that_go_on(self) -> None:
        """Check that a writer whose ledger was recovered one lost disk ago has continued or given up; otherwise it hangs."""
        stuck = {writer.open_ledger for writer in self._writing if writer.is_writing} & self._taken_over
        assert not stuck, f"the writers of ledgers {sorted(stuck)}, taken over a disk ago, neither went on nor gave up"
        self._taken_over = set()

    async def _restore_copies(self, number: int) -> None:
        """Close the ledgers that may lack a copy, and wait until they have it: the next lost disk may hold another one.

        While too few bookies are live, writers place new ledgers on lost ones too, so it ends when no open ledger names one.
        """
        while True:
            await self._in_machine(f"successor-{number}", self._recover_abandoned)
            await self._until_whole(self._exposed)
            self._exposed = {ledger.ledger_id for ledger in self._open() if self._names_lost(ledger)}
            if not self._exposed:
                return

    def _names_lost(self, ledger: Ledger) -> bool:
        return any(not self._lost.isdisjoint(fragment.bookies) for fragment in ledger.fragments)

    async def _recover_abandoned(self, machine: Machine, ports: Ports) -> None:
        """Recover the ledgers without a writer, and the exposed ones."""
        client = await self._client(ports)
        held = {writer.open_ledger for writer in self._writing}
        self._taken_over |= held & self._exposed
        for left in self._open():
            if left.ledger_id in self._exposed or left.ledger_id not in held:
                for ledger in await client.recover([left.ledger_id]):
                    self.truth.closed(ledger)

    async def _seal(self, machine: Machine, ports: Ports) -> None:
        client = await self._client(ports)
        for ledger_id in sorted(self.truth.ledgers):
            for ledger in await client.recover([ledger_id]):
                self.truth.closed(ledger)

    async def _client(self, ports: Ports) -> LedgerClient:
        metadata = await roles.connect_metadata(ports)
        return LedgerClient(metadata, ports.transport, ports.clock, ports.random, LedgerClientSettings())

    async def _read(self, machine: Machine, ports: Ports) -> None:
        client = await self._client(ports)
        for ledger in self._closed():
            found: list[bytes] = []
            while len(found) <= ledger.last_entry:
                try:
                    entries = await client.read(ledger, len(found), ledger.last_entry, 1 << 20)
                except StratalogError as failure:
                    raise AssertionError(f"entry {len(found)} of ledger {ledger.ledger_id}: {failure!r}") from failure
                found += [bytes(entry.payload) for entry in entries]
            known = self.truth.ledgers[ledger.ledger_id]
            assert found == known.appended[: len(found)], f"ledger {ledger.ledger_id} is another"

    async def _place(self, machine: Machine, ports: Ports) -> None:
        """Place new ledgers. All bookies live and this client saw none fail, so two copies on one host are an error.

        All are opened at once, by a client whose blocks of ledger ids are too small for them.
        """
        metadata = await roles.connect_metadata(ports)
        settings = LedgerClientSettings(ledger_id_block=ID_BLOCK)
        client = LedgerClient(metadata, ports.transport, ports.clock, ports.random, settings)
        placed = await asyncio.gather(*(self._place_one(client) for _ in range(PLACED)))
        self.audit.require(len(set(placed)) == PLACED, f"new ledgers share their ids: {sorted(placed)}")

    async def _place_one(self, client: LedgerClient) -> int:
        spec = LedgerSpec(
            topic_id=TOPIC_ID, partition=1, base_offset=0, leader_epoch=0,
            ensemble_size=HOSTS, write_quorum=HOSTS, ack_quorum=2,
        )  # fmt: skip
        writer = await client.create(spec, updates=lambda ledger: (), listener=_Silent())
        bookies = writer.ledger.fragments[0].bookies
        assert _hosts(bookies) == HOSTS, f"a new ledger has two copies on one host: {bookies}"
        await writer.seal(0)
        return writer.ledger.ledger_id

    async def _in_machine(self, name: str, work: roles.Main) -> None:
        await run_in_checker(self.world, work, READ_S, name)

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        assert not self.audit.broken, self.audit.broken[0]
        for machine in [*self.metadata, *self.bookies, *self.clients]:
            if machine.failure is not None:
                raise AssertionError(f"{machine.name} failed: {machine.failure!r}") from machine.failure
