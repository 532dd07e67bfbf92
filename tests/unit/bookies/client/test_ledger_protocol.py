"""The whole ledger protocol under random schedules.

The real cores of writer and recovery run over model bookies and a model metadata register. A seeded schedule delivers, loses
and reorders messages, takes bookies down and up, loses up to Qa - 1 of them permanently, kills recoveries in the middle and
runs several at once. It checks what BookKeeper's TLA+ specification checks: every confirmed entry is in the closed ledger and
readable, no reader sees two contents, and no ledger closes below an acknowledged LAC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_bookies.client.core.entry import PendingEntry
from stratalog_bookies.client.core.fragments import write_bookies
from stratalog_bookies.client.core.placement import Candidate, choose_replacements
from stratalog_bookies.client.core.recovery import Fence, Instruction, LedgerRecovery, ReadRange, Rewrite
from stratalog_bookies.client.core.writer import LedgerWriterCore, Send
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import EntryState, RangeAnswer, ReadEntry, Status
from stratalog_core.errors import LedgerFenced
from stratalog_metadata.records import Fragment, Ledger, LedgerState

LEDGER_ID = 7
QUORUMS = [(3, 3, 2), (3, 2, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (2, 2, 1), (1, 1, 1), (4, 2, 1)]


@dataclass
class ModelBookie:
    """A bookie according to its protocol: whatever it answers is durable."""

    up: bool = True
    fenced: bool = False
    lac: int = -1
    entries: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def add(self, header: bytes, payload: bytes) -> Status:
        fields = messages.EntryHeader._make(messages.ENTRY_HEADER.unpack(header))
        if self.fenced and not fields.flags & messages.RECOVERY_ADD:
            return Status.FENCED
        kept = self.entries.setdefault(fields.entry_id, (header[:-1], payload))
        assert kept == (header[:-1], payload), "two contents for one entry id"
        self.lac = max(self.lac, fields.lac)
        return Status.OK

    def fence(self) -> tuple[int, int]:
        self.fenced = True
        return max(self.entries, default=-1), self.lac

    def read(self, first: int, last: int) -> RangeAnswer:
        self.fenced = True
        found = [self._entry(entry_id) for entry_id in sorted(self.entries) if first <= entry_id <= last]
        return RangeAnswer(Status.OK, last, found)

    def _entry(self, entry_id: int) -> ReadEntry:
        header, payload = self.entries[entry_id]
        _, _, lac, size, crc, _ = messages.ENTRY_HEADER.unpack(header + b"\0")
        return ReadEntry(entry_id, lac, size, crc, EntryState.PRESENT, memoryview(payload))


@dataclass
class World:
    """Bookies, the ledger's record with its version, and all messages in flight."""

    random: Random
    ledger: Ledger
    bookies: dict[str, ModelBookie]
    version: int = 1
    wires: list[Callable[[], None]] = field(default_factory=list)
    confirmed: int = -1

    def send(self, bookie: str, deliver: Callable[[ModelBookie], Callable[[], None]], lost: Callable[[], None]) -> None:
        """A request to a bookie and later its answer; if either is lost, the sender only notices silence."""

        def arrive() -> None:
            if not self.bookies[bookie].up or self.random.random() < 0.03:
                self.wires.append(lost)
                return
            answer = deliver(self.bookies[bookie])
            self.wires.append(answer if self.random.random() > 0.03 else lost)

        self.wires.append(arrive)

    def put(self, record: Ledger, version: int) -> bool:
        """Compare-and-set."""
        if self.version != version:
            return False
        assert self.ledger.state is not LedgerState.CLOSED, "a closed ledger never changes"
        if record.state is LedgerState.CLOSED:
            assert record.last_entry >= self.confirmed, "closed below an acknowledged LAC"
        self.ledger, self.version = record, self.version + 1
        return True

    def candidates(self) -> list[Candidate]:
        return [Candidate(bookie_id=name, rack="", live=bookie.up) for name, bookie in self.bookies.items()]

    def step(self) -> bool:
        if not self.wires:
            return False
        # Usually the oldest, often any: order is not guaranteed.
        index = 0 if self.random.random() < 0.5 else self.random.randrange(len(self.wires))
        self.wires.pop(index)()
        return True


class Sender:
    """The common shell of writer and recovery: sends adds, notices failures, replaces bookies."""

    def __init__(self, world: World, core: LedgerWriterCore) -> None:
        self.world = world
        self.core = core
        self.alive = True

    def send(self, bookie: str, entry: PendingEntry) -> None:
        payload = b"".join(entry.payload)

        def deliver(target: ModelBookie) -> Callable[[], None]:
            status = target.add(entry.header, payload)
            return lambda: self.answered(entry, bookie, status)

        self.world.send(bookie, deliver, lambda: self.lost(bookie))

    def answered(self, entry: PendingEntry, bookie: str, status: Status) -> None:
        if not self.alive:
            return
        if status == Status.OK:
            self.core.on_added(entry, bookie)
        else:
            assert not self.core.on_refused(entry, bookie, status)
        self.after_event()

    def lost(self, bookie: str) -> None:
        if self.alive:
            self.core.on_bookie_failed(bookie)
            self.after_event()

    def after_event(self) -> None:
        self.core.validate_state()

    def on_added(self, entry: PendingEntry, bookie: str) -> bool:
        return self.core.on_added(entry, bookie)

    def on_refused(self, entry: PendingEntry, bookie: str, status: int) -> bool:
        return self.core.on_refused(entry, bookie, status)

    def deliver(self) -> None:
        self.after_event()

    def send_all(self, sends: list[Send]) -> None:
        for bookie, entry in sends:
            self.send(bookie, entry)

    def mend(self) -> None:
        """Replace failed bookies if there are others, or take them back if they are up again."""
        core, world = self.core, self.world
        if not self.alive or core.error is not None or core.is_changing or not core.failed_positions:
            return
        ensemble = core.ledger.fragments[-1].bookies
        replacements = choose_replacements(world.candidates(), ensemble, core.failed_positions, world.random)
        if replacements:
            self.commit(core.begin_change(replacements))
        else:
            self.send_all(core.revive(p for p in core.failed_positions if world.bookies[ensemble[p]].up))
            core.give_up()

    def commit(self, proposed: Ledger) -> None:
        raise NotImplementedError


class Writer(Sender):
    """The writer of the ledger."""

    def __init__(self, world: World) -> None:
        super().__init__(world, LedgerWriterCore(world.ledger, sink=self))
        self.version = world.version

    def append(self) -> None:
        if self.core.error is None:
            payload = b"%d" % self.core.next_entry_id * 3
            entry = self.core.append((payload[:2], payload[2:]), len(payload))
            for bookie in self.core.targets(entry):
                self.send(bookie, entry)

    def after_event(self) -> None:
        super().after_event()
        if self.core.error is None:
            self.world.confirmed = max(self.world.confirmed, self.core.lac)
            closed = self.world.ledger
            assert closed.state is not LedgerState.CLOSED or self.core.lac <= closed.last_entry, "confirmed after the close"

    def commit(self, proposed: Ledger) -> None:
        """The command, its answer and their loss. After a loss the writer re-reads and, if necessary, proposes
        the same again.
        """
        version = self.version

        def arrive() -> None:
            self.world.put(proposed, version)
            self.world.wires.append(lambda: self.decide(proposed, version))

        # A command that seems lost may still arrive after the re-read.
        self.world.wires.append(arrive)
        if self.world.random.random() < 0.3:
            self.world.wires.append(lambda: self.decide(proposed, version))

    def decide(self, proposed: Ledger, version: int) -> None:
        if self.core.error is not None or not self.core.is_changing or version != self.version:
            return
        if self.world.ledger == proposed:
            self.version = self.world.version
            self.send_all(self.core.commit_change())
        elif self.world.version == version:
            self.commit(proposed)
        else:
            self.core.fail(LedgerFenced("superseded"))
        self.core.validate_state()


class Recovery(Sender):
    """A recovery of the ledger. Several may run at once, and each may die at any moment."""

    def __init__(self, world: World) -> None:
        if world.ledger.state is LedgerState.OPEN:
            world.put(msgspec.structs.replace(world.ledger, state=LedgerState.IN_RECOVERY), world.version)
        self.version = world.version
        self.protocol = LedgerRecovery(world.ledger)
        super().__init__(world, LedgerWriterCore(world.ledger, sink=self, recovering=True))
        self.writing = False
        self.carry_out(self.protocol.start())

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Fence(bookie=bookie):
                    self.fence(bookie)
                case ReadRange():
                    self.read(instruction)
                case Rewrite():
                    self.rewrite(instruction)
        self.close_if_done()

    def fence(self, bookie: str) -> None:
        def deliver(target: ModelBookie) -> Callable[[], None]:
            last_entry, lac = target.fence()
            return lambda: self.handle(lambda: self.protocol.on_fenced(bookie, last_entry, lac))

        self.world.send(bookie, deliver, lambda: self.handle(lambda: self.protocol.on_fence_failed(bookie)))

    def read(self, asked: ReadRange) -> None:
        def deliver(target: ModelBookie) -> Callable[[], None]:
            answer = target.read(asked.first, asked.last)
            return lambda: self.handle(lambda: self.protocol.on_read(asked.bookie, answer))

        self.world.send(asked.bookie, deliver, lambda: self.handle(lambda: self.protocol.on_read_failed(asked.bookie)))

    def rewrite(self, found: Rewrite) -> None:
        if not self.writing:
            self.writing = True
            self.core = LedgerWriterCore(
                self.core.ledger, sink=self, first_entry=self.protocol.first_rewritten, recovering=True
            )
        assert found.entry_id == self.core.next_entry_id
        entry = self.core.append_recovered(found.header, found.payload)
        for bookie in self.core.targets(entry):
            self.send(bookie, entry)

    def handle(self, event: Callable[[], list[Instruction]]) -> None:
        if self.alive:
            self.carry_out(event())

    def after_event(self) -> None:
        super().after_event()
        self.close_if_done()

    def commit(self, proposed: Ledger) -> None:
        """In recovery a replacement stays in memory until the close."""
        self.send_all(self.core.commit_change())

    def close_if_done(self) -> None:
        end = self.protocol.end
        if not self.alive or end is None or (self.writing and self.core.lac < end):
            return
        self.alive = False
        closed = msgspec.structs.replace(self.core.ledger, state=LedgerState.CLOSED, last_entry=end)
        self.world.put(closed, self.version)


def make_world(random: Random, ensemble_size: int, write_quorum: int, ack_quorum: int) -> World:
    bookies = {f"b{number}": ModelBookie() for number in range(ensemble_size + 3)}
    ledger = Ledger(
        ledger_id=LEDGER_ID, topic_id=UUID(int=1), partition=0, base_offset=0, leader_epoch=1, write_quorum=write_quorum,
        ack_quorum=ack_quorum, fragments=(Fragment(first_entry=0, bookies=tuple(list(bookies)[:ensemble_size])),),
    )  # fmt: skip
    return World(random=random, ledger=ledger, bookies=bookies)


def disturb(world: World, random: Random, losses_left: int, lost: set[str]) -> int:
    """Take a bookie down, up, or away permanently."""
    name = random.choice(sorted(world.bookies))
    bookie = world.bookies[name]
    if losses_left and random.random() < 0.2:
        bookie.up = False
        lost.add(name)
        return losses_left - 1
    if name not in lost:
        bookie.up = not bookie.up
    return losses_left


def run_schedule(world: World, random: Random, lost: set[str]) -> None:
    writer = Writer(world)
    recoveries: list[Recovery] = []
    losses_left = world.ledger.ack_quorum - 1
    for _ in range(random.randrange(20, 250)):
        chance = random.random()
        if chance < 0.25:
            writer.append()
        elif chance < 0.30:
            losses_left = disturb(world, random, losses_left, lost)
        elif chance < 0.36:
            writer.mend()
            if writer.core.is_changing and random.random() < 0.1:
                writer.core.release_held()
        elif chance < 0.375 and world.ledger.state is not LedgerState.CLOSED and len(recoveries) < 4:
            recoveries.append(Recovery(world))
        elif chance < 0.385 and recoveries:
            random.choice(recoveries).alive = False
        elif chance < 0.45 and recoveries:
            chosen = random.choice(recoveries)
            chosen.handle(chosen.protocol.retry)
            chosen.mend()
        else:
            world.step()


def recover_to_the_end(world: World, lost: set[str]) -> None:
    """All bookies that are not lost return, and one recovery runs undisturbed. Old messages may still arrive."""
    for name, bookie in world.bookies.items():
        bookie.up = name not in lost
    last: Recovery | None = None
    for _ in range(20_000):
        if world.ledger.state is LedgerState.CLOSED:
            return
        if last is None or not last.alive:
            last = Recovery(world)
        if not world.step():
            last.handle(last.protocol.retry)
            last.mend()
    pytest.fail("recovery did not end")


def check_closed(world: World, lost: set[str]) -> None:
    ledger = world.ledger
    assert ledger.last_entry >= world.confirmed
    for entry_id in range(ledger.last_entry + 1):
        copies = [name for name in write_bookies(ledger, entry_id) if entry_id in world.bookies[name].entries]
        expected = b"%d" % entry_id * 3
        assert len(copies) >= ledger.ack_quorum
        assert set(copies) - lost, f"entry {entry_id} has no copy left"
        assert all(world.bookies[name].entries[entry_id][1] == expected for name in copies)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), quorums=st.sampled_from(QUORUMS))
def test_every_confirmed_entry_survives_any_schedule(seed: int, quorums: tuple[int, int, int]) -> None:
    random = Random(seed)
    world, lost = make_world(random, *quorums), set[str]()
    run_schedule(world, random, lost)
    recover_to_the_end(world, lost)
    check_closed(world, lost)
    while world.step():
        pass
    check_closed(world, lost)
