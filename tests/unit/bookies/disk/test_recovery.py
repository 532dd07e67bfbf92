"""The content of a disk after a restart: everything that was acknowledged, and nothing that was never added."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation.world.disk import Disk as SimulatedDisk
from simulation.world.disk import SimulatedFile, SimulatedFiles
from unit.bookies.plain_disk import PlainDisk

from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.log_files import LogFiles, index_path, log_path
from stratalog_bookies.protocol.messages import RECOVERY_ADD, Status
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer


class Stopped(BaseException):
    """The machine stopped here."""


class StoppingFiles(SimulatedFiles):
    """Stops the machine at the n-th change of the disk; a write may then be torn."""

    def __init__(self, disk: SimulatedDisk, steps: int) -> None:
        super().__init__(disk)
        self.steps = steps

    def step(self) -> None:
        self.steps -= 1
        if self.steps == 0:
            raise Stopped

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> SimulatedFile:
        return StoppingFile(self, self._open(path, create=create))

    def write_atomic(self, path: str, content: bytes) -> None:
        self.step()
        super().write_atomic(path, content)

    def rename(self, source: str, target: str) -> None:
        # File systems rename atomically: a stop is before or after it, and the directories are synced next anyway.
        self.step()
        super().rename(source, target)
        self._disk.sync_names(source.rpartition("/")[0])

    def remove(self, path: str) -> None:
        self.step()
        super().remove(path)


class StoppingFile(SimulatedFile):
    def __init__(self, files: StoppingFiles, file: SimulatedFile) -> None:
        super().__init__(file._disk, file.content)
        self._files = files

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        super().pwritev(buffers, position)
        self._files.step()

    def datasync(self) -> None:
        self._files.step()
        super().datasync()


def payload_of(ledger_id: int, entry_id: int, size: int) -> bytes:
    return random.Random(ledger_id * 1_000_003 + entry_id * 31 + size).randbytes(size)


class Model:
    """The entries that were acknowledged, and those that were requested."""

    def __init__(self) -> None:
        self.asked: dict[tuple[int, int], bytes] = {}
        self.acknowledged: set[tuple[int, int]] = set()
        self.pending: set[tuple[int, int]] = set()
        self.fences_asked: set[int] = set()
        self.fences: set[int] = set()
        self.deletions_asked: set[int] = set()
        self.deletions: set[int] = set()

    def durable(self) -> None:
        self.acknowledged |= self.pending
        self.pending = set()
        self.fences |= self.fences_asked
        self.deletions |= self.deletions_asked

    def check(self, disk: PlainDisk) -> None:
        disk.core.validate_state()
        for ledger_id in range(4):
            found = disk.read(ledger_id)
            if ledger_id in self.deletions:
                assert not found
                assert ledger_id in disk.contents.tombstones
            for entry_id, payload in found.items():
                assert payload == self.asked[ledger_id, entry_id]
            if ledger_id not in self.deletions_asked:
                missing = {entry for ledger, entry in self.acknowledged if ledger == ledger_id} - set(found)
                assert not missing, f"acknowledged entries {missing} of ledger {ledger_id} are gone"
            tail = disk.core.tails([ledger_id])[0]
            assert not tail.fenced or ledger_id in self.fences_asked
            assert tail.fenced or ledger_id not in self.fences or ledger_id in self.deletions_asked

    def restarted(self, disk: PlainDisk) -> None:
        """Settle entries of unknown outcome: those that exist count as acknowledged and stay."""
        self.pending = set()
        self.fences_asked = {ledger_id for ledger_id in range(4) if disk.core.tails([ledger_id])[0].fenced}
        self.deletions_asked = {ledger_id for ledger_id in range(4) if ledger_id in disk.contents.tombstones}
        self.acknowledged = {(ledger, entry) for ledger in range(4) for entry in disk.read(ledger)}
        self.asked = {key: payload for key, payload in self.asked.items() if key in self.acknowledged}
        self.fences, self.deletions = set(self.fences_asked), set(self.deletions_asked)


class Run:
    """Applies steps to a disk and to the model."""

    def __init__(self, machine: SimulatedDisk, model: Model, steps: int) -> None:
        self.model = model
        self.files = StoppingFiles(machine, steps)
        self.disk = PlainDisk(self.files, file_bytes=16 * 1024, index_bytes_max=512, spares_max=2)

    def step(self, kind: str, ledger_id: int, number: int) -> None:
        getattr(self, kind)(ledger_id, number)

    def add(self, ledger_id: int, number: int) -> None:
        entry_id = self.disk.core.tails([ledger_id])[0].last_entry + 1
        self.put([(ledger_id, entry_id + index, number % 700) for index in range(number % 5 + 1)], RECOVERY_ADD)

    def add_gap(self, ledger_id: int, number: int) -> None:
        self.put([(ledger_id, number % 40, number % 3000)], RECOVERY_ADD)

    def put(self, entries: list[tuple[int, int, int]], flags: int) -> None:
        entries = [entry for entry in entries if entry[:2] not in self.model.asked]
        if not entries:
            return
        payloads = [(ledger, entry, payload_of(ledger, entry, size)) for ledger, entry, size in entries]
        self.model.asked.update({(ledger, entry): payload for ledger, entry, payload in payloads})
        statuses = self.disk.add(*payloads, flags=flags)
        for (ledger, entry, _), status in zip(payloads, statuses, strict=True):
            assert status in (Status.OK, Status.NO_SUCH_LEDGER)
            if status is Status.OK:
                self.model.pending.add((ledger, entry))

    def fence(self, ledger_id: int, _: int) -> None:
        if ledger_id not in self.model.deletions_asked:
            self.model.fences_asked.add(ledger_id)
        self.disk.fence(ledger_id)

    def delete(self, ledger_id: int, number: int) -> None:
        if number % 4 == 0:
            self.model.deletions_asked.add(ledger_id)
            self.disk.delete(ledger_id)

    def commit(self, _: int, __: int) -> None:
        self.disk.commit()
        self.model.durable()

    def close_full(self, _: int, __: int) -> None:
        self.disk.close_full()

    def free_dead(self, _: int, __: int) -> None:
        self.disk.free_dead()

    def compact(self, _: int, number: int) -> None:
        closed = [file.generation for file in self.disk.contents.files.values() if file.closed and file.runs]
        if closed:
            generation = closed[number % len(closed)]
            before = [self.disk.read(each) for each in range(4)]
            self.disk.compact(generation)
            assert [self.disk.read(each) for each in range(4)] == before
            self.commit(0, 0)
            self.disk.contents.empty_file(generation)

    def spare(self, _: int, __: int) -> None:
        if self.disk.store.spare_files < 2:
            self.disk.store.fill_spare()


KINDS = ("add", "add", "add", "add_gap", "fence", "delete", "commit", "commit", "close_full", "free_dead", "compact", "spare")
STEP = st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 10_000))
LIFE = st.tuples(st.integers(1, 150), st.lists(STEP, min_size=1, max_size=60))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(seed=st.integers(0, 2**32), lives=st.lists(LIFE, min_size=1, max_size=5))
def test_what_was_acknowledged_survives_stops_at_any_step(
    seed: int, lives: list[tuple[int, list[tuple[str, int, int]]]]
) -> None:
    machine = SimulatedDisk("bookie", random.Random(seed))
    model = Model()
    for steps, life in lives:
        try:
            run = Run(machine, model, steps)
            model.check(run.disk)
            model.restarted(run.disk)
            for step in life:
                run.step(*step)
                run.disk.core.validate_state()
        except Stopped:
            pass
        machine.crash()
    disk = PlainDisk(machine.mount(), file_bytes=16 * 1024)
    model.check(disk)
    again = PlainDisk(machine.mount(), file_bytes=16 * 1024)
    for ledger_id in range(4):
        assert again.read(ledger_id) == disk.read(ledger_id)


def machine_with(disk_seed: int = 1) -> SimulatedDisk:
    return SimulatedDisk("bookie", random.Random(disk_seed))


@pytest.mark.parametrize("cut", [*range(0, 3300, 97), 1])
def test_a_torn_tail_is_cut_off_at_any_byte(cut: int) -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount())
    disk.add((1, 0, b"a" * 900))
    disk.commit()
    disk.add((1, 1, b"b" * 1500), (1, 2, b"c" * 1500))
    write = disk.core.take()
    assert write is not None
    whole = b"".join(write.buffers)
    disk.store.open_log(write.generation).pwritev((whole[:cut],), write.position)
    restarted = PlainDisk(machine.mount())
    found = restarted.read(1)
    assert found[0] == b"a" * 900
    assert all(payload in (b"b" * 1500, b"c" * 1500) for entry, payload in found.items() if entry)
    assert restarted.add((1, 1, b"b" * 1500), (1, 2, b"c" * 1500)) == [Status.OK, Status.OK]


def test_a_damaged_frame_before_durable_ones_stops_the_start() -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount())
    for entry in range(3):
        disk.add((1, entry, bytes(100)))
        disk.commit()
    before = {name: bytes(content.now) for name, content in machine.content.items()}
    machine.flip_bit(log_path(2), log_format.FIRST_FRAME + 70, 3)
    corrupt = {name: bytes(content.now) for name, content in machine.content.items()}
    with pytest.raises(Corrupt, match=r"0000000000000002 is corrupt.*replace the bookie: start one with a new bookie_id"):
        PlainDisk(machine.mount())
    assert {name: bytes(content.now) for name, content in machine.content.items()} == corrupt != before


def test_a_damaged_end_of_a_file_is_known_from_the_next_file() -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount(), file_bytes=16 * 1024)
    entry = 0
    while disk.core.log.generation == 2:
        disk.add((1, entry, bytes(3000)))
        disk.commit()
        entry += 1
    end = disk.contents.files[2].end
    machine.flip_bit(log_path(2), end - 3064, 0)
    with pytest.raises(Corrupt, match="was durable"):
        PlainDisk(machine.mount(), file_bytes=16 * 1024)


def test_a_damaged_durable_payload_is_unreadable_and_not_absent() -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount())
    for entry in range(3):
        disk.add((1, entry, bytes([entry]) * 1000))
        disk.commit()
    row = disk.contents.ledgers[1].runs[0].find(1)
    assert row is not None
    machine.flip_bit(log_path(2), row.position + 5, 1)
    restarted = PlainDisk(machine.mount())
    assert restarted.read(1) == {0: bytes([0]) * 1000, 1: None, 2: bytes([2]) * 1000}


def test_entries_of_an_earlier_generation_are_not_taken_for_new_ones() -> None:
    """Frames end at page borders here, so that old frames follow new ones in a recycled file without a gap."""
    machine = machine_with()
    disk = PlainDisk(machine.mount(), file_bytes=16 * 1024, spares_max=1)
    sizes = [3975, 4031, 4031, 4031]
    for entry, size in enumerate(sizes):
        disk.add((1, entry, bytes([entry]) * size))
        disk.commit()
    disk.close_full()
    disk.delete(1)
    disk.add((2, 0, b"x" * 12_000))
    disk.commit()
    disk.close_full()
    disk.free_dead()
    assert disk.store.spare_files == 1
    disk.add((2, 1, b"y" * sizes[0]))
    disk.commit()
    generation, end = disk.core.log.generation, disk.core.log.tail
    assert end == 2 * log_format.PAGE_BYTES
    content = disk.store.open_log(generation).pread(1 << 20, 0)
    assert content[end : end + 4] == log_format.FRAME_MAGIC
    restarted = PlainDisk(machine.mount(), file_bytes=16 * 1024)
    assert restarted.contents.files[generation].end == end
    assert restarted.read(1) == {}
    assert set(restarted.read(2)) == {0, 1}


def test_a_missing_log_file_stops_the_start() -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount())
    disk.add((1, 0, b"x"))
    disk.commit()
    machine.mount().remove(log_path(2))
    with pytest.raises(Corrupt, match=r"is missing.*replace the bookie: start one with a new bookie_id"):
        PlainDisk(machine.mount())


def test_a_lost_index_is_made_again_from_the_log() -> None:
    machine = machine_with()
    disk = PlainDisk(machine.mount(), file_bytes=16 * 1024)
    for entry in range(20):
        disk.add((1, entry, bytes([entry]) * 2000))
        disk.commit()
    disk.close_full()
    expected = disk.read(1)
    machine.mount().remove(index_path(2))
    machine.flip_bit(index_path(3), 20, 1)
    assert PlainDisk(machine.mount(), file_bytes=16 * 1024).read(1) == expected


def test_a_disk_of_another_bookie_is_refused() -> None:
    machine = machine_with()
    PlainDisk(machine.mount())
    store = LogFiles(machine.mount(), b"f" * 16, 64 * 1024)
    with pytest.raises(Corrupt, match="belongs to another disk"):
        recovery.recover(store, Contents(index_bytes_max=0, tombstones_max=1), b"f" * 16, ledgers_max=1)


def test_what_a_restart_finds_after_a_failed_sync_is_durable() -> None:
    """The page cache still has the entry and counts it as written, so that a sync of the new process does nothing for it."""
    disk = SimulatedDisk("bookie", random.Random(1))
    first = PlainDisk(disk.mount())
    first.add((1, 0, b"before"))
    first.commit()
    first.add((1, 1, b"not synced"))
    disk.faults.sync_fails = True
    with pytest.raises(OSError, match="fsync"):
        first.commit()
    disk.faults.sync_fails = False
    found = PlainDisk(disk.mount()).read(1)
    disk.crash()
    assert PlainDisk(disk.mount()).read(1) == found == {0: b"before", 1: b"not synced"}
