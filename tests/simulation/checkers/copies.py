"""Tracks which bookie has which entry, from replies to adds and from disks after crashes, and compares it with metadata.

Readers do not notice missing redundancy, because one good copy is enough, until the bookie that has it is lost. So copies are
counted wherever something relies on them: when a writer learns that an entry is confirmed, when a ledger is closed, when the
auditor names another bookie, and when a bookie deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from simulation.checkers.stored import stored_entries
from stratalog_bookies.client.core.fragments import fragment_end
from stratalog_bookies.protocol import messages
from stratalog_core import quorum
from stratalog_core.batches.checkpoint import is_checkpoint, part_position
from stratalog_core.errors import StratalogError
from stratalog_metadata.records import Fragment, Ledger, LedgerState

if TYPE_CHECKING:
    from simulation.world.disk import Disk as SimulatedDisk
    from simulation.world.network import Network
    from stratalog_bookies.disk.disk import Disk
    from stratalog_bookies.node.server import BookieServer

Require = Callable[[bool, str], None]
Find = Callable[[int], Ledger | None]
Held = dict[tuple[str, int], int]
_OK: Final = int(messages.Status.OK)
_HEARD_OF_S: Final = 6.0
"""The time for which an owner may open ledgers with a topic's old factor: the lifetime of a command."""
_ON_THE_WAY_S: Final = 5.0
"""The time for which writers and recoveries may still rely on a lost disk's earlier replies."""


class Copies:
    """Counts copies. ``find`` returns a ledger's committed record; ``require`` reports a violated condition."""

    def __init__(self, require: Require, find: Find) -> None:
        self._require = require
        self._find = find
        self.kept: set[int] = set()
        """Ledgers that metadata has lost. Bookies do not delete them."""
        self._held: dict[tuple[str, int], int] = {}
        self._lost: dict[tuple[str, int], tuple[float, int]] = {}
        self._checkpoint_parts: dict[int, int] = {}
        self._asked: dict[UUID, list[tuple[float, int]]] = {}

    def watch_answers(self, network: Network) -> None:
        """Observe every add that a bookie acknowledges."""
        network.on_answer = self._answered

    def _answered(self, bookie: str, method: int, request: memoryview, answer: memoryview | StratalogError) -> None:
        if method == messages.ADD and not isinstance(answer, StratalogError):
            headers = messages.decode_add(request)
            position = messages.payloads_start(len(headers))
            for header, status in zip(headers, messages.decode_statuses(answer), strict=True):
                if status == _OK:
                    self._holds(bookie, header[0], header[1])
                if header[1] == 0 and is_checkpoint(request[position:]):
                    self._checkpoint_parts[header[0]] = part_position(request[position:])[1]
                position += header[3]

    def has_checkpoint(self, ledger: Ledger) -> bool:
        """Return whether every part of the ledger's checkpoint has its ack quorum of copies."""
        parts = self._checkpoint_parts.get(ledger.ledger_id, 0)
        counted = self._count(ledger, 0, parts - 1, self._held)
        return parts > 0 and all(copies >= ledger.ack_quorum for _, copies in counted)

    def has_entries(self, ledger_id: int) -> bool:
        """Return whether a bookie has, or had, entries of a ledger with this id."""
        return any(ledger_id == known for _, known in self._held)

    def _holds(self, bookie: str, ledger_id: int, entry_id: int) -> None:
        key = bookie, ledger_id
        self._held[key] = self._held.get(key, 0) | 1 << entry_id

    def comes_back(self, disk: SimulatedDisk) -> None:
        """Count the durable entries of a bookie that is about to restart.

        They may be more than it acknowledged: it may have crashed between a write and its reply. Such an entry is a copy like
        any other: the bookie reports it to the auditor.
        """
        for ledger_id, entry_id in stored_entries(disk):
            self._holds(disk.name, ledger_id, entry_id)

    def watch_deletions(self, bookie: str, server: BookieServer) -> None:
        """Check every ledger that this bookie deletes."""
        assert server._dispatch is not None
        collector = server._dispatch._collector
        delete = collector._delete

        async def deleting(disk: Disk, ledger_ids: set[int]) -> set[int]:
            for ledger_id in sorted(ledger_ids):
                self._require(self._find(ledger_id) is None, f"{bookie} deletes ledger {ledger_id}, which metadata has")
                self._require(ledger_id not in self.kept, f"{bookie} deletes ledger {ledger_id}, which metadata has lost")
            return await delete(disk, ledger_ids)

        collector._delete = deleting  # type: ignore[method-assign]

    def lost(self, bookie: str) -> None:
        """Forget the copies of a lost disk. Its earlier replies may still be on their way to writers and recoveries."""
        now = asyncio.get_running_loop().time()
        self._lost |= {key: (now, entries) for key, entries in self._held.items() if key[0] == bookie}
        self._held = {key: entries for key, entries in self._held.items() if key[0] != bookie}

    def opened(self, ledger: Ledger) -> None:
        """Check the new record's quorums against its topic's replication factor, current or until ``_HEARD_OF_S`` ago.

        Acks are never below a majority, whatever ``min.insync.replicas`` is.
        """
        # The id of a lost ledger is free again if no bookie knows it.
        self.kept.discard(ledger.ledger_id)
        enough = ledger.ack_quorum >= quorum.majority(ledger.write_quorum)
        what = f"ledger {ledger.ledger_id} is acknowledged at {ledger.ack_quorum} of {ledger.write_quorum} copies"
        self._require(enough, what)
        asked = self._asked.get(ledger.topic_id)
        if asked is not None:
            since = asyncio.get_running_loop().time() - _HEARD_OF_S
            # The last factor set before ``since`` was in force at ``since``, too.
            old = [factor for at, factor in asked if at <= since][-1:]
            wanted = {*old, *(factor for at, factor in asked if at > since)}
            what = f"ledger {ledger.ledger_id} has {ledger.write_quorum} copies; its topic asks for {sorted(wanted)}"
            self._require(ledger.write_quorum in wanted, what)

    def asked_for(self, topic_id: UUID, factor: int) -> None:
        """Record the replication factor of a topic that was created or changed."""
        self._asked.setdefault(topic_id, []).append((asyncio.get_running_loop().time(), factor))

    def confirmed(self, ledger_id: int, first: int, last: int) -> None:
        """Check the entries ``first`` to ``last`` that a writer learned are confirmed.

        Once the record is closed, the writer may count copies that recovery has replaced by others; those were counted at the
        close.
        """
        ledger = self._find(ledger_id)
        if ledger is not None and ledger.state is not LedgerState.CLOSED:
            self._check(ledger, first, last, "confirmed")

    def closed(self, ledger: Ledger) -> None:
        """Check a closed ledger: from now on only the auditor adds missing copies."""
        self._check(ledger, 0, ledger.last_entry, "closed")

    def moved(self, before: Ledger, after: Ledger) -> None:
        """Check that each bookie newly named in a closed ledger's record has, or had lately, every entry it is named for.

        Its disk may be lost between its reply to the auditor and the change of the record.
        """
        held = self._held_lately()
        same = [each.first_entry for each in before.fragments] == [each.first_entry for each in after.fragments]
        self._require(same, f"closed ledger {after.ledger_id} was cut into other fragments")
        for index, (old, new) in enumerate(zip(before.fragments, after.fragments, strict=same)):
            for bookie in set(new.bookies) - set(old.bookies):
                named_for = self._share(after, index, bookie)
                missing = [entry_id for entry_id in named_for if not _has(held, bookie, after, entry_id)]
                what = f"ledger {after.ledger_id} names {bookie}, which lacks entries {missing[:3]}"
                self._require(not missing, what)

    def under_replicated(self, ledger: Ledger) -> list[int]:
        """Return the entries of a closed ledger that have fewer copies on the named bookies than the write quorum."""
        return [
            entry_id
            for entry_id, copies in self._count(ledger, 0, ledger.last_entry, self._held)
            if copies < ledger.write_quorum
        ]

    def _check(self, ledger: Ledger, first: int, last: int, what: str) -> None:
        firsts = [fragment.first_entry for fragment in ledger.fragments]
        self._require(firsts == sorted({0, *firsts}), f"the fragments of ledger {ledger.ledger_id} begin at {firsts}")
        for entry_id, copies in self._count(ledger, first, last, self._held_lately()):
            if copies < ledger.ack_quorum:
                self._require(False, f"entry {entry_id} of ledger {ledger.ledger_id} is {what} with {copies} named copies")

    def _held_lately(self) -> Held:
        """The copies, and those of disks lost so lately that replies from before may be on their way."""
        if not self._lost:
            return self._held
        since = asyncio.get_running_loop().time() - _ON_THE_WAY_S
        return self._held | {key: entries for key, (at, entries) in self._lost.items() if at > since}

    def _count(self, ledger: Ledger, first: int, last: int, held: Held) -> Iterator[tuple[int, int]]:
        """Yield each entry with the number of bookies in its write set that have it."""
        for index, fragment in enumerate(ledger.fragments):
            end = fragment_end(ledger, index) if index + 1 < len(ledger.fragments) else last
            copies = [held.get((bookie, ledger.ledger_id), 0) for bookie in fragment.bookies]
            for entry_id in range(max(first, fragment.first_entry), min(end, last) + 1):
                positions = quorum.write_set(entry_id, len(copies), ledger.write_quorum)
                yield entry_id, sum([copies[position] >> entry_id & 1 for position in positions])

    def _share(self, ledger: Ledger, index: int, bookie: str) -> Iterator[int]:
        fragment = ledger.fragments[index]
        for entry_id in range(fragment.first_entry, fragment_end(ledger, index) + 1):
            if bookie in _write_set(ledger, fragment, entry_id):
                yield entry_id


def _has(held: Held, bookie: str, ledger: Ledger, entry_id: int) -> bool:
    return bool(held.get((bookie, ledger.ledger_id), 0) >> entry_id & 1)


def _write_set(ledger: Ledger, fragment: Fragment, entry_id: int) -> Sequence[str]:
    positions = quorum.write_set(entry_id, len(fragment.bookies), ledger.write_quorum)
    return [fragment.bookies[position] for position in positions]
