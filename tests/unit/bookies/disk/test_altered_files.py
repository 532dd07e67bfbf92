"""Whichever bit of a disk's files is altered: no entry is wrong, and none is absent that was acknowledged.

Only the last group of the newest log file may be cut off: nothing later proves that it was durable, so an altered payload looks
like a torn write. An idle disk writes such a proof (``PROOF``).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
from simulation.world.disk import Disk
from unit.bookies.plain_disk import PlainDisk

from stratalog_bookies.disk.core import log_format
from stratalog_core.errors import Corrupt

FILE_BYTES = 16 * 1024
LEDGERS = (1, 2, 3)
SAMPLE = 220
Entries = dict[int, dict[int, bytes | None]]


def mounted(machine: Disk) -> PlainDisk:
    return PlainDisk(machine.mount(), file_bytes=FILE_BYTES)


def entries(disk: PlainDisk) -> Entries:
    return {ledger: disk.read(ledger) for ledger in LEDGERS}


@pytest.fixture(scope="module")
def machine() -> Disk:
    """A closed log file with its index, one that is replayed, and a new one; a fence and a deletion."""
    made = Disk("bookie", random.Random(1))
    disk = mounted(made)
    for entry in range(9):
        disk.add((1, entry, bytes([entry]) * 1700), (2, entry, b"x" * 20))
        disk.commit()
    disk.fence(2)
    disk.add((3, 0, b"z"))
    disk.delete(3)
    disk.commit()
    disk.close_full()
    for entry in range(9, 11):
        disk.add((1, entry, bytes([entry]) * 300))
        disk.commit()
    return made


def altered(machine: Disk, name: str, seed: int) -> Iterator[tuple[Disk, int, int]]:
    content = machine.content[name].now
    places = [(position, bit) for position in range(len(content.rstrip(b"\0")) + 8) for bit in range(8)]
    chance = random.Random(f"{seed} {name}")
    for position, bit in chance.sample(places, min(SAMPLE, len(places))):
        made = copy.deepcopy(machine)
        for kept in (made.content[name].now, made.content[name].durable):
            if position < len(kept):
                kept[position] ^= 1 << bit
        yield made, position, bit


def last_group(machine: Disk) -> tuple[str, int, set[tuple[int, int]]]:
    """The newest log file with frames, the start of its last group, and the entries in it."""
    disk = mounted(copy.deepcopy(machine))
    name = max(
        name for name, content in machine.content.items() if name.endswith(".log") and log_format.FRAME_MAGIC in content.now
    )
    generation = int(name.removeprefix("log/").removesuffix(".log"), 16)
    content = bytes(machine.content[name].now)
    frames = log_format.scan(content, disk.store.seed(generation)).frames
    start = frames[-1].group_start
    group = [frame for frame in frames if frame.position >= start and frame.kind == log_format.ENTRIES]
    return name, start, {(each[0], each[1]) for frame in group for each in log_format.entries_of(memoryview(content), frame)}


def test_no_altered_bit_makes_an_entry_wrong_or_absent(machine: Disk, fresh_seed: int) -> None:
    sound = mounted(copy.deepcopy(machine))
    expected = entries(sound)
    newest, group_start, may_be_cut = last_group(machine)
    assert {entry for _, entry in may_be_cut} == {10}
    refused = 0
    for name in sorted(machine.content):
        for made, position, bit in altered(machine, name, fresh_seed):
            place = f"bit {bit} of byte {position} of {name}"
            try:
                disk = mounted(made)
                found = entries(disk)
            except Corrupt:
                refused += 1  # A bookie rebuilds an index, and refuses a disk.
                continue
            is_cut = name == newest and position >= group_start
            for ledger, kept in expected.items():
                absent = {(ledger, entry) for entry in kept.keys() - found[ledger].keys()}
                assert absent <= (may_be_cut if is_cut else set()), f"{place}: {absent} are absent"
                assert found[ledger].keys() <= kept.keys(), place
                wrong = [entry for entry, payload in found[ledger].items() if payload not in (None, kept[entry])]
                assert not wrong, f"{place}: entries {wrong} of ledger {ledger} are wrong"
            assert disk.core.tails([2])[0].fenced, f"{place}: the fence is gone"
    assert refused > 100


def test_a_state_file_is_never_believed_in_part(machine: Disk) -> None:
    content = bytes(machine.content["state"].now)
    for end in range(len(content)):
        made = copy.deepcopy(machine)
        made.content["state"].truncate(end)
        with pytest.raises(Corrupt):
            mounted(made)
