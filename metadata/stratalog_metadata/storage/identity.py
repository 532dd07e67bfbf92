"""The identity of a data directory: which node and disk it belongs to.

A node never starts on another node's directory, nor on an empty one in place of a lost one. A directory gets a random identity
at its first use, by which the quorum knows its members (``node/joining.py``).
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from stratalog_core.errors import Corrupt, Fenced, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Files, Random
from stratalog_metadata.raft.membership import Member
from stratalog_metadata.records import Quorum

IDENTITY_FILE = "identity.json"
FORMAT_VERSION = 2
CLUSTER_ID_CHARACTERS = 22
_DATA = ("raft/vote", "raft/log-0000000001", "state.sqlite", "state.snapshot")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """``cluster_id`` is empty until the cluster's record has been applied; ``members`` until the node belongs to a quorum.

    ``members`` is the configuration it started with, in force at ``members_index`` (0: it founded the quorum).
    """

    node_id: int
    cluster_id: str = ""
    identity: str = ""
    members: tuple[Member, ...] = ()
    members_index: int = 0
    format_version: int = FORMAT_VERSION


def claim(files: Files, node_id: int, cluster_id: str, random: Random) -> Identity:
    """The directory's identity; a new one if it has none.

    An empty ``cluster_id`` accepts any cluster. Raises ``Invalid`` if the directory is another node's or cluster's,
    ``Corrupt`` if it has data and no identity.
    """
    found = read(files)
    if found.node_id and found.node_id != node_id:
        raise Invalid(f"this data directory is of metadata node {found.node_id}, not {node_id}: check node_id and data_dir")
    if cluster_id and found.cluster_id and found.cluster_id != cluster_id:
        raise Invalid(f"this data directory is of cluster {found.cluster_id}, not {cluster_id}: check cluster_id and data_dir")
    claimed = Identity(
        node_id=node_id,
        cluster_id=found.cluster_id or cluster_id,
        identity=found.identity or str(UUID(int=random.getrandbits(128), version=4)),
        members=found.members,
        members_index=found.members_index,
    )
    return claimed if claimed == found else remember(files, claimed)


def remember(files: Files, identity: Identity) -> Identity:
    """Store the identity durably."""
    files.write_atomic(IDENTITY_FILE, msgspec.json.format(msgspec.json.encode(identity)))
    return identity


def removed(identity: Identity, applied: tuple[int, Quorum] | None) -> Fenced | None:
    """Why the node must stop, if the last applied configuration (at ``index``) does not contain it; else empty.

    A node that joined first applies older configurations, which did not contain it yet.
    """
    if applied is None or applied[0] <= identity.members_index or applied[1].find(identity.node_id, identity.identity):
        return None
    return Fenced(
        f"metadata node {identity.node_id} was removed from the quorum; it can rejoin only with an empty data_dir: {REPLACE}"
    )


def read(files: Files) -> Identity:
    """The directory's identity; node id 0 if it has none. Raises ``Corrupt`` if it has data and no identity, or ``Invalid``."""
    if not files.exists(IDENTITY_FILE):
        if any(files.exists(path) for path in _DATA):
            raise Corrupt(f"{IDENTITY_FILE} is missing although there is data: restore it, or replace this node: {REPLACE}")
        return Identity(node_id=0)
    try:
        found = msgspec.json.decode(files.read(IDENTITY_FILE), type=Identity)
    except MALFORMED as malformed:
        raise Corrupt(f"{IDENTITY_FILE} is malformed: {malformed}") from malformed
    if found.format_version > FORMAT_VERSION:
        raise Invalid(
            f"{IDENTITY_FILE} has format version {found.format_version}; this node reads versions up to {FORMAT_VERSION}"
        )
    return found


REPLACE = (
    "`stratalog metadata remove ID` on a live quorum, start the node on an empty data_dir,"
    " `stratalog metadata add ID=HOST:PORT`"
)
"""How to replace a node whose disk is lost or damaged; part of every message that refuses one."""
