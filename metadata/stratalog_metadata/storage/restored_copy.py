"""Makes a copy of a node's directory the whole quorum, after the disks of a majority of its nodes are lost.

The copy names the voters of its time. Nodes with empty directories do not vote in their place, so a node that starts on the
copy would wait for a majority that no longer exists. :func:`become_only_member` installs, as if it were a snapshot, the copy's
state with this node as the only member. All entries of the copy's log take effect: nobody else knows which were committed.

The directory gets a new identity. Nodes of the old quorum that are started by mistake do not count what it answers, and it
refuses them as removed ones.

Bookies keep ledgers that the copy does not know: the counter of ledger ids tells them from later ones, and a record from those
that the copy knows.

Leader epochs rise above those that the lost quorum may have used since the copy was made. Clients, coordinators' states in the
bucket and transaction markers would take lower ones for those of earlier owners (ADR 177).

An interrupted call is repeated: before its last step the node waits for the old quorum, or refuses to start as a removed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.errors import Invalid
from stratalog_core.ports import Files, Random
from stratalog_metadata.raft import HardState, Member, Ready, Snapshot
from stratalog_metadata.records import (
    KNOWN_LEDGERS_KEY,
    LEDGER_IDS,
    Counter,
    DeletedTopic,
    KnownLedgers,
    Ledger,
    Partition,
    Quorum,
    Record,
    Versioned,
    counter_key,
)
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.machine import members_changed
from stratalog_metadata.state.record_map import RecordMap
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage import identity
from stratalog_metadata.storage.identity import Identity
from stratalog_metadata.storage.node_storage import NodeStorage
from stratalog_metadata.storage.raft_log import SEGMENT_BYTES_MAX
from stratalog_metadata.storage.state_store import StateStore

EPOCHS_LEFT_OUT: Final = 10_000
"""By how much leader epochs rise: more than the owners that a partition has had since the copy was made.

It is well below the gap by which readers of a history recognise a restore from the bucket, after which no earlier transaction
is open: here owners know the open transactions from their ledgers.
"""


def become_only_member(files: Files, open_store: Callable[[], StateStore], random: Random) -> Identity:
    """Make the node of this directory the only member of its quorum, and return its new identity.

    The caller has locked the directory. Raises ``Invalid`` if no node has taken part in a quorum with it, ``Corrupt`` or
    ``StorageFailed``.
    """
    own = identity.read(files)
    if not own.members:
        raise Invalid("this directory belongs to no quorum: name the data_dir of a metadata node that has run")
    storage = NodeStorage(files, open_store(), SEGMENT_BYTES_MAX, must_exist=True)
    try:
        replica = _replayed(storage)
        alone = _only_member(own, replica, str(UUID(int=random.getrandbits(128), version=4)))
        index, term = replica.index + 1, max(storage.recovered.hard_state.term, replica.term) + 1
        replica.records.install(members_changed(replica.records, index, Quorum(members=(alone,))).changes)
        replica.records.install((*_raised_epochs(replica.records, index), *_known_ledgers(replica.records, index)))
        image = snapshot.StateImage(index=index, term=term, records=list(replica.records))
        installed = Snapshot(index=index, term=term, content=snapshot.encode(image))
        storage.persist([Ready(number=1, snapshot=installed, hard_state=HardState(term=term))])
    finally:
        storage.close()
    restored = msgspec.structs.replace(own, identity=alone.identity, members=(alone,), members_index=index)
    return identity.remember(files, restored)


def _replayed(storage: NodeStorage) -> Replica:
    """The state after the last entry of the log."""
    replica, tail = Replica(storage.recovered.image), storage.recovered.tail
    for entry in tail.between(replica.index + 1, tail.last_index):
        replica.apply(entry)
    return replica


def _raised_epochs(records: RecordMap, index: int) -> Iterator[Change]:
    """Later leader epochs for all partitions, those of deleted topics included."""
    for stored in records:
        raised: Record
        match stored.record:
            case Partition() as partition:
                raised = msgspec.structs.replace(partition, leader_epoch=partition.leader_epoch + EPOCHS_LEFT_OUT)
            case DeletedTopic() as deleted:
                raised = msgspec.structs.replace(
                    deleted, leader_epochs=tuple(epoch + EPOCHS_LEFT_OUT for epoch in deleted.leader_epochs)
                )
            case _:
                continue
        yield Change(stored.record.key(), stored, Versioned(index, raised))


def _known_ledgers(records: RecordMap, index: int) -> Iterator[Change]:
    """Note which ledgers the copy knows, and that all other ids that it has allocated may be those of lost ones."""
    found, earlier = records.get(counter_key(LEDGER_IDS)), records.get(KNOWN_LEDGERS_KEY)
    if found is None or not isinstance(found.record, Counter):
        return  # No ledger was ever opened.
    ledger_ids = {stored.record.ledger_id for stored in records if isinstance(stored.record, Ledger)}
    if earlier is not None and isinstance(earlier.record, KnownLedgers):
        ledger_ids.update(earlier.record.ledger_ids)
    known = KnownLedgers(ledger_ids=tuple(sorted(ledger_ids)))
    yield Change(KNOWN_LEDGERS_KEY, earlier, Versioned(index, known))
    counter = msgspec.structs.replace(found.record, lost_below=found.record.next_value)
    yield Change(counter.key(), found, Versioned(index, counter))


def _only_member(own: Identity, replica: Replica, new_identity: str) -> Member:
    """This node as a voter on a disk of ``new_identity``, at its last known address, which it corrects itself."""
    applied = replica.quorum()
    members = applied[1].members if applied is not None else own.members
    address = next((member.address for member in members if member.node_id == own.node_id), "")
    return Member(node_id=own.node_id, identity=new_identity, address=address)
