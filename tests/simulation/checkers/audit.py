"""Checks every commit of the metadata quorum and every deletion from the bucket, and reports a broken invariant at once.

It sees each command as the first node applies it, and compares the entries that other nodes apply at the same index. So it
checks the order of events, which no reader can see at the end: that a hot copy is removed only after its cold copy is
committed, that no owner of an earlier epoch extends the log, that a closed ledger does not change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from simulation.checkers.copies import Copies
from simulation.checkers.promise_checker import PromiseChecker
from stratalog_core.errors import StratalogError
from stratalog_metadata.raft import Entry, HardState, Message
from stratalog_metadata.raft.messages import VoteReply, VoteRequest
from stratalog_metadata.records import (
    DeletedTopic,
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    Record,
    Topic,
    Versioned,
    deleted_topic_key,
    fork_decision_key,
    ledger_key,
    log_key,
    manifest_pointer_key,
    partition_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.machine import Outcome
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage.raft_log_format import unpack_vote
from stratalog_tiering.format.manifest import Manifest, decode_manifest, decode_page
from stratalog_tiering.format.object_keys import states_prefix

if TYPE_CHECKING:
    from simulation.world.disk import Disk
    from simulation.world.object_store import Bucket
    from stratalog_metadata.node.serving import ServingNode

UNSEALED_MAX: Final = 2
VOTE_PATH: Final = "raft/vote"
CLOCK_MARGIN: Final = 0.8
"""Clocks run up to 2 % apart."""


class Audit:
    """Checks commits and deletions. ``broken`` lists violations in order of time. ``internal`` topics keep no history."""

    def __init__(self, note: Callable[[str], None], bucket: Bucket | None = None) -> None:
        self.broken: list[str] = []
        self.records: dict[str, Record] = {}
        self.copies = Copies(self.require, self._ledger)
        self.promise_checker = PromiseChecker(self.require)
        self.records_max = 0
        self.on_committed: Callable[[Entry, Sequence[Change], Mapping[str, Record]], None] = lambda *committed: None
        """Called with each command's changes and the records before them."""
        self.on_opening: Callable[[Topic, int, int], None] = lambda topic, broker_id, unfinished: None
        """Called for each ledger that enters a log, before its owner learns of it.

        The arguments are the topic, the owner's id, and the number of consecutive ledgers before it without a durable
        checkpoint.
        """
        self._note = note
        self._bucket = bucket
        self._entries: dict[int, Entry] = {}
        self._leaving: set[str] = set()
        self._referenced: dict[str, frozenset[str]] = {}
        self._epochs: dict[str, int] = {}
        """Last leader epoch of each partition that was deleted."""
        self._deleted_s: dict[UUID, float] = {}
        self.opened: set[int] = set()
        """The ids of all ledgers, lost ones included."""
        self.ends: dict[int, int] = {}
        """By ledger id: the offset at which the ledger was closed first.

        After a restore of metadata it may be closed once more, with entries behind that were never confirmed.
        """
        self.may_begin_empty = False
        """Whether an operator lets partitions of internal topics begin empty that have no state in the bucket."""

    def continue_from(self, stored: Sequence[Versioned]) -> None:
        """Go on from the records of metadata that was restored from an old copy. Ledgers and objects stay what they are."""
        self.records = {each.record.key(): each.record for each in stored}
        for known in (self._entries, self._leaving, self._epochs, self._deleted_s):
            known.clear()
        self.promise_checker.restored(stored)
        self._referenced = {}
        for record in self.records.values():
            if isinstance(record, Topic):
                self.copies.asked_for(record.topic_id, record.replication_factor)
            elif isinstance(record, ManifestPointer) and self._bucket is not None:
                # Newer versions may have removed parts of this one, even the manifest.
                with contextlib.suppress(KeyError, StratalogError):
                    keys = {key for key, _ in self._references(record, self._bucket)}
                    self._referenced[record.key()] = frozenset(keys & self._bucket.objects.keys())

    def watch(self, node: str, replica: Replica) -> None:
        """Check every entry that this replica applies."""
        apply = replica.apply

        def applying(entry: Entry) -> Outcome | None:
            outcome = apply(entry)
            self._applied(node, entry, outcome)
            return outcome

        replica.apply = applying  # type: ignore[method-assign]

    def watch_votes(self, serving: ServingNode, disk: Disk) -> None:
        """Compare each vote that this node sends, and each request for votes, with what its disk would hold after a crash."""
        send = serving.send

        def sending(messages: Sequence[Message]) -> None:
            for message in messages:
                if isinstance(message, VoteReply) and message.granted and not message.pre:
                    self._check_vote(disk, message.term, message.receiver)
                elif isinstance(message, VoteRequest) and not message.pre:
                    self._check_vote(disk, message.term, message.sender)
            send(messages)

        serving.send = sending  # type: ignore[method-assign, assignment]

    def _check_vote(self, disk: Disk, term: int, voted_for: int) -> None:
        content = disk.durable(VOTE_PATH)
        stored = unpack_vote(content)[0] if content else HardState()
        kept = stored.term > term or stored == HardState(term=term, voted_for=voted_for)
        if not kept:
            self.require(False, f"{disk.name} promised node {voted_for} its vote in term {term}; its disk says {stored}")

    def _ledger(self, ledger_id: int) -> Ledger | None:
        record = self.records.get(ledger_key(ledger_id))
        return record if isinstance(record, Ledger) else None

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self._note(f"AUDIT: {what}")
            self.broken.append(what)

    def _applied(self, node: str, entry: Entry, outcome: Outcome | None) -> None:
        known = self._entries.setdefault(entry.index, entry)
        if known != entry:
            self.require(False, f"{node} applied another entry at {entry.index} than a node before it")
        if known is not entry or outcome is None:
            return
        self.promise_checker.applied(entry, outcome)
        self.on_committed(entry, outcome.changes, self.records)
        self._leaving = {change.key for change in outcome.changes if change.after is None}
        for change in outcome.changes:
            if change.after is not None:
                self.records[change.key] = change.after.record
        for change in outcome.changes:
            self._check(change)
        for change in outcome.changes:
            if change.after is None:
                self.records.pop(change.key, None)
        self.records_max = max(self.records_max, len(self.records))

    def _check(self, change: Change) -> None:
        before = change.before.record if change.before is not None else None
        after = change.after.record if change.after is not None else None
        match before, after:
            case Partition(), Partition():
                self._partition_changed(before, after)
            case None, Ledger():
                is_new = not self.copies.has_entries(after.ledger_id)
                self.require(is_new, f"ledger {after.ledger_id} has entries at its opening")
                self.opened.add(after.ledger_id)
                self.copies.opened(after)
            case _, Topic():
                self.copies.asked_for(after.topic_id, after.replication_factor)
            case Ledger(), Ledger():
                self._ledger_changed(before, after)
            case Ledger(), None:
                self._ledger_removed(before)
            case Log(), Log():
                self._log_changed(before, after)
            case ManifestPointer(), None:
                self._referenced.pop(before.key(), None)
            case ManifestPointer(), ManifestPointer() if before.manifest_version == after.manifest_version:
                self._manifest_stored(before, after)
            case _, ManifestPointer():
                self._pointer_changed(before if isinstance(before, ManifestPointer) else None, after)
            case _:
                self._check_deletion(before, after)

    def _check_deletion(self, before: Record | None, after: Record | None) -> None:
        match before, after:
            case Partition(), None:
                self._epochs[before.key()] = before.leader_epoch
            case None, Partition():
                is_above = after.leader_epoch >= self._epochs.get(after.key(), 0)
                self.require(is_above, f"{after.key()} is restored below its last epoch")
            case _, DeletedTopic():
                self._topic_deleted(before if isinstance(before, DeletedTopic) else None, after)

    # -- owners and ledgers

    def _partition_changed(self, before: Partition, after: Partition) -> None:
        key = after.key()
        self.require(after.leader_epoch >= before.leader_epoch, f"the epoch of {key} fell")
        changed = after.owner not in (before.owner, -1)
        self.require(not changed or after.leader_epoch > before.leader_epoch, f"{key} has a new owner in the same epoch")

    def _ledger_changed(self, before: Ledger, after: Ledger) -> None:
        if before.state is LedgerState.CLOSED:
            same = (before.last_entry, before.end_offset) == (after.last_entry, after.end_offset)
            self.require(same and after.state is LedgerState.CLOSED, f"closed ledger {after.ledger_id} was changed")
            self.copies.moved(before, after)
        elif after.state is LedgerState.CLOSED:
            self.ends.setdefault(after.ledger_id, after.end_offset)
            self.copies.closed(after)

    def _log_changed(self, before: Log, after: Log) -> None:
        key = after.key()
        went_back = after.log_start_offset < before.log_start_offset
        self.require(not went_back or self._is_restored(before, after), f"the start of {key} went back")
        partition = self.records.get(partition_key(after.topic_id, after.index))
        for ref in after.ledgers[len(before.ledgers) :] if len(after.ledgers) > len(before.ledgers) else ():
            owned = isinstance(partition, Partition) and partition.leader_epoch == ref.leader_epoch
            self.require(
                owned, f"{key} got ledger {ref.ledger_id} from an owner of epoch {ref.leader_epoch}, which is not the owner"
            )
            earlier = [self._ledger(other.ledger_id) for other in after.ledgers if other.leader_epoch < ref.leader_epoch]
            unsealed = [each.ledger_id for each in earlier if each is not None and each.state is not LedgerState.CLOSED]
            self.require(not unsealed, f"{key} got ledger {ref.ledger_id} while {unsealed} of earlier owners are not sealed")
        if len(after.ledgers) > len(before.ledgers):
            self._check_opening_offset(before, after)
        for ref in set(before.ledgers) - set(after.ledgers):
            self.require(ledger_key(ref.ledger_id) in self._leaving, f"{key} lost ledger {ref.ledger_id}, which still is there")
        self._check_state(before, after)
        topic = self._topic(after.topic_id)
        if topic is not None and len(after.ledgers) > len(before.ledgers) and isinstance(partition, Partition):
            self.on_opening(topic, partition.owner, self._unfinished(before))
        offsets = [ref.base_offset for ref in after.ledgers]
        self.require(offsets == sorted(offsets), f"the ledgers of {key} are out of order")
        ledgers = (self.records.get(ledger_key(ref.ledger_id)) for ref in after.ledgers)
        open_ledgers = sum(isinstance(ledger, Ledger) and ledger.state is not LedgerState.CLOSED for ledger in ledgers)
        self.require(open_ledgers <= UNSEALED_MAX, f"{key} has {open_ledgers} ledgers that are not sealed")

    def _check_opening_offset(self, before: Log, after: Log) -> None:
        """Require that no new ledger begins below the end of the log: that of its last ledger, or of its cold history."""
        last = self._ledger(before.ledgers[-1].ledger_id) if before.ledgers else None
        pointer = self.records.get(manifest_pointer_key(after.topic_id, after.index))
        end_offset = pointer.end_offset if isinstance(pointer, ManifestPointer) else before.log_start_offset
        if last is not None:
            end_offset = last.end_offset
        opened = after.ledgers[len(before.ledgers)]
        begins = f"ledger {opened.ledger_id} of {after.key()} begins at {opened.base_offset}"
        self.require(opened.base_offset >= end_offset, f"{begins}; the log ends at {end_offset}")

    def _topic(self, topic_id: UUID) -> Topic | None:
        return next((each for each in self.records.values() if isinstance(each, Topic) and each.topic_id == topic_id), None)

    def _is_internal(self, topic_id: UUID) -> bool:
        topic = self._topic(topic_id)
        return topic is not None and topic.internal

    def _is_restored(self, before: Log, after: Log) -> bool:
        """Whether an operator has restored the partition's state from the bucket, or lets it begin empty without one there."""
        if after.restored_from not in ("", before.restored_from):
            return True
        topic = self._topic(after.topic_id)
        if not self.may_begin_empty or after.ledgers or topic is None or not topic.internal or self._bucket is None:
            return False
        prefix = states_prefix(topic.name, after.index)
        return not any(key.startswith(prefix) for key in self._bucket.objects)

    def _check_state(self, before: Log, after: Log) -> None:
        """Require that the state of the ledgers that were removed is left for the partition's next owner.

        It is in the durable checkpoint of a ledger that stays, for an internal topic of the first one, or in cold history, if
        that reaches to where the log goes on. A sealed ledger with records has its checkpoint.
        """
        if self._is_restored(before, after) or not set(before.ledgers) - set(after.ledgers):
            return
        kept = [each for ref in after.ledgers if (each := self._ledger(ref.ledger_id)) is not None]
        if self._is_internal(after.topic_id):
            held = bool(kept) and self.copies.has_checkpoint(kept[0])
            self.require(held, f"{after.key()} lost ledgers before the first that stays had a durable checkpoint")
            return
        pointer = self.records.get(manifest_pointer_key(after.topic_id, after.index))
        cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) else 0
        begin = kept[0].base_offset if kept else after.log_start_offset
        held = begin <= cold_end or any(each.end_offset > each.base_offset or self.copies.has_checkpoint(each) for each in kept)
        self.require(held, f"{after.key()} lost the state at offset {begin}, where it goes on; cold history ends at {cold_end}")

    def _unfinished(self, log: Log) -> int:
        ledgers = [self._ledger(ref.ledger_id) for ref in reversed(log.ledgers)]
        finished = (place for place, ledger in enumerate(ledgers) if ledger is not None and self.copies.has_checkpoint(ledger))
        return next(finished, len(ledgers))

    def _topic_deleted(self, before: DeletedTopic | None, after: DeletedTopic) -> None:
        """Require that a deletion becomes final only after the topic could be restored for as long as was promised."""
        now_s = asyncio.get_running_loop().time()
        if before is None:
            self._deleted_s[after.topic_id] = now_s
        elif after.is_final and not before.is_final:
            kept_s = now_s - self._deleted_s[after.topic_id]
            promised_s = before.restorable_ms / 1000
            what = f"the deletion of topic {after.name} is final after {kept_s:.1f} s of {promised_s:.1f}"
            self.require(kept_s >= promised_s * CLOCK_MARGIN, what)
        if after.is_final:
            self._partitions_are_forgotten(after)

    def _partitions_are_forgotten(self, deleted: DeletedTopic) -> None:
        """Require that metadata has nothing of the partitions that a final deletion no longer counts."""
        for key, record in self.records.items():
            match record:
                case Log() | ManifestPointer():
                    topic_id, index = record.topic_id, record.index
                case Ledger():
                    topic_id, index = record.topic_id, record.partition
                case _:
                    continue
            is_left = topic_id == deleted.topic_id and index >= deleted.partitions_left and key not in self._leaving
            self.require(not is_left, f"the deletion of topic {deleted.name} is over for partition {index}, and left {key}")

    def _ledger_removed(self, ledger: Ledger) -> None:
        deleted = self.records.get(deleted_topic_key(ledger.topic_id))
        if isinstance(deleted, DeletedTopic):
            self.require(deleted.is_final, f"ledger {ledger.ledger_id} was removed; its topic {deleted.name} can be restored")
        topic = next((t for t in self.records.values() if isinstance(t, Topic) and t.topic_id == ledger.topic_id), None)
        log = self.records.get(log_key(ledger.topic_id, ledger.partition))
        if topic is None or topic.key() in self._leaving or topic.name.startswith("__") or not isinstance(log, Log):
            return
        what = f"ledger {ledger.ledger_id} of {log.key()}"
        # A decision for the store's history drops ledgers that are contained in it, and the manifest that it keeps is stored.
        is_decided = fork_decision_key(ledger.topic_id, ledger.partition) in self._leaving
        self.require(is_decided or ledger.state is LedgerState.CLOSED, f"{what} was removed before it was sealed")
        empty = ledger.end_offset == ledger.base_offset
        pointer = self.records.get(manifest_pointer_key(ledger.topic_id, ledger.partition))
        # A manifest that is in metadata alone would be lost with it, and so would its segments.
        is_stored = isinstance(pointer, ManifestPointer) and (is_decided or not pointer.content)
        cold_end = pointer.end_offset if isinstance(pointer, ManifestPointer) and is_stored else 0
        end_offset = self.ends.get(ledger.ledger_id, ledger.end_offset) if is_decided else ledger.end_offset
        kept = empty or cold_end >= end_offset or log.log_start_offset >= end_offset
        self.require(kept, f"{what} was removed, its records end at {end_offset} and cold history at {cold_end}")

    # -- the bucket

    def _pointer_changed(self, before: ManifestPointer | None, after: ManifestPointer) -> None:
        key = after.key()
        version, end_offset = (before.manifest_version, before.end_offset) if before is not None else (0, 0)
        self.require(after.manifest_version > version, f"the version of {key} did not rise")
        self.require(after.end_offset >= end_offset, f"the end of {key} went back")
        log = self.records.get(log_key(after.topic_id, after.index))
        for ref in log.ledgers if isinstance(log, Log) else ():
            ledger = self.records.get(ledger_key(ref.ledger_id))
            if isinstance(ledger, Ledger) and ledger.base_offset < after.end_offset:
                self.require(ledger.state is LedgerState.CLOSED, f"{key} covers ledger {ref.ledger_id}, which is not sealed")
        if self._bucket is not None:
            self._check_manifest(key, after, self._bucket)

    def _manifest_stored(self, before: ManifestPointer, after: ManifestPointer) -> None:
        """Require that a manifest leaves metadata only when its object holds the same bytes, and that nothing else changes."""
        key = after.key()
        same = msgspec.structs.replace(before, content=b"", object_key="") == msgspec.structs.replace(
            after, content=b"", object_key=""
        )
        self.require(same, f"{key} changed without a new version")
        self.require(after.content in (b"", before.content), f"the manifest of {key} changed without a new version")
        if before.content and not after.content and self._bucket is not None:
            stored = self._bucket.objects.get(after.object_key, (b"",))[0]
            self.require(stored == before.content, f"the manifest of {key} left metadata before it was stored")
            self._referenced[key] = self._referenced.get(key, frozenset()) | {after.object_key}

    def _check_manifest(self, key: str, pointer: ManifestPointer, bucket: Bucket) -> None:
        try:
            keys = dict(self._references(pointer, bucket))
        except (KeyError, StratalogError) as damaged:
            self.require(False, f"{key} refers to what is missing or damaged: {damaged!r}")
            return
        self._referenced[key] = frozenset(keys)
        for name, size_bytes in keys.items():
            found = len(bucket.objects[name][0]) if name in bucket.objects else -1
            self.require(
                size_bytes in (found, -1) and found >= 0, f"{key} was committed: {name} has {found} of {size_bytes} bytes"
            )

    def _references(self, pointer: ManifestPointer, bucket: Bucket) -> Iterable[tuple[str, int]]:
        """Yield every object that a committed manifest refers to, with its size (-1: unknown)."""
        if not pointer.content:
            yield pointer.object_key, -1
        manifest: Manifest = decode_manifest(bucket.manifest_content(pointer), bytes.fromhex(pointer.sha256))
        same = (manifest.start_offset, manifest.end_offset) == (pointer.start_offset, pointer.end_offset)
        self.require(same, f"{pointer.key()} ends at {pointer.end_offset}, its manifest at {manifest.end_offset}")
        for segment in manifest.segments:
            yield segment.key, segment.object_bytes
        for tree_page in manifest.tree.pages:
            yield tree_page.key, tree_page.object_bytes
        for ref in manifest.pages:
            yield ref.key, -1
            for segment in decode_page(bucket.objects[ref.key][0], ref.sha256).segments:
                if segment.end_offset > manifest.start_offset:
                    yield segment.key, segment.object_bytes

    @property
    def referenced(self) -> frozenset[str]:
        """Keys that the committed manifests refer to."""
        return frozenset(key for keys in self._referenced.values() for key in keys)

    def deleted(self, keys: Iterable[str]) -> None:
        """Require that none of these deleted objects is referred to."""
        for key in self.referenced.intersection(keys):
            self.require(False, f"{key} was deleted while a committed manifest referred to it")
