"""Makes a copy of a node's directory the whole quorum, after the disks of a majority of its nodes are lost.

The copy names the voters of its time. Nodes with empty directories do not vote in their place, so a node that starts on the
copy would wait for a majority that no longer exists. :func:`become_only_member` installs, as if it were a snapshot, the copy's
state with this node as the only member. All entries of the copy's log take effect: nobody else knows which were committed.

The directory gets a new identity. Nodes of the old quorum that are started by mistake do not count what it answers, and it
refuses them as removed ones.

An interrupted call is repeated: before its last step the node waits for the old quorum, or refuses to start as a removed one.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import msgspec

from stratalog_core.errors import Invalid
from stratalog_core.ports import Files, Random
from stratalog_metadata.raft import HardState, Member, Ready, Snapshot
from stratalog_metadata.records import Quorum
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.machine import members_changed
from stratalog_metadata.state.replica import Replica
from stratalog_metadata.storage import identity
from stratalog_metadata.storage.identity import Identity
from stratalog_metadata.storage.node_storage import NodeStorage
from stratalog_metadata.storage.raft_log import SEGMENT_BYTES_MAX
from stratalog_metadata.storage.state_store import StateStore


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


def _only_member(own: Identity, replica: Replica, new_identity: str) -> Member:
    """This node as a voter on a disk of ``new_identity``, at its last known address, which it corrects itself."""
    applied = replica.quorum()
    members = applied[1].members if applied is not None else own.members
    address = next((member.address for member in members if member.node_id == own.node_id), "")
    return Member(node_id=own.node_id, identity=new_identity, address=address)
