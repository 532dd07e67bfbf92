"""Whose data a directory holds: cluster id and node id, so that a node never starts on another's."""

from __future__ import annotations

import msgspec

from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Files

IDENTITY_FILE = "identity.json"
CLUSTER_ID_CHARACTERS = 22


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """``cluster_id`` is empty until the cluster's record has been seen."""

    node_id: int
    cluster_id: str = ""
    format_version: int = 1


def claim(files: Files, node_id: int, cluster_id: str) -> Identity:
    """The directory's identity, written if it has none. Raises ``Invalid`` if it is another's.

    ``cluster_id`` may be empty: any will do.
    """
    if not files.exists(IDENTITY_FILE):
        return _write(files, Identity(node_id=node_id, cluster_id=cluster_id))
    found = _read(files)
    if found.node_id != node_id:
        raise Invalid(f"this data directory is of metadata node {found.node_id}, not {node_id}: check node_id and data_dir")
    if cluster_id and found.cluster_id and found.cluster_id != cluster_id:
        raise Invalid(f"this data directory is of cluster {found.cluster_id}, not {cluster_id}: check cluster_id and data_dir")
    if cluster_id and not found.cluster_id:
        return _write(files, Identity(node_id=node_id, cluster_id=cluster_id))
    return found


def remember(files: Files, node_id: int, cluster_id: str) -> None:
    """The cluster's record has been seen for the first time."""
    _write(files, Identity(node_id=node_id, cluster_id=cluster_id))


def _read(files: Files) -> Identity:
    try:
        found = msgspec.json.decode(files.read(IDENTITY_FILE), type=Identity)
    except MALFORMED as malformed:
        raise Corrupt(f"{IDENTITY_FILE} is malformed: {malformed}") from malformed
    if found.format_version != 1:
        raise Invalid(f"{IDENTITY_FILE} has format version {found.format_version}; this node reads version 1")
    return found


def _write(files: Files, identity: Identity) -> Identity:
    files.write_atomic(IDENTITY_FILE, msgspec.json.format(msgspec.json.encode(identity)))
    return identity
