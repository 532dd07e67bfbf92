"""Decides what a node with an empty directory does: found a quorum, join one, or refuse to start. Pure.

It asks all peers for their identity. A quorum is founded only if every one of its nodes answers and none belongs to a quorum.
So an emptied directory never counts as a new voter beside nodes that remember, and two emptied nodes cannot found a second
quorum without the third. A member of a quorum answers with its members; the new node joins once it is one of them, which
``stratalog metadata add`` arranges. If the leader knows its node id with another identity, the disk was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratalog_core.errors import Invalid
from stratalog_metadata.protocol.messages import HelloAnswer
from stratalog_metadata.raft.membership import Member
from stratalog_metadata.storage.identity import REPLACE, Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Start with these members, who were in force at ``index``."""

    members: tuple[Member, ...]
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Ask again later; ``reason`` is logged."""

    reason: str


def introduction(own: Identity, addresses: Mapping[int, str]) -> HelloAnswer:
    """The HELLO answer of a node that does not belong to a quorum yet."""
    return HelloAnswer(
        node_id=own.node_id,
        identity=own.identity,
        cluster_id=own.cluster_id,
        peers=sorted(addresses),
        members=own.members,
        members_index=own.members_index,
    )


def decide(own: Identity, addresses: Mapping[int, str], answers: Mapping[int, HelloAnswer]) -> Begin | Wait:
    """The decision. ``addresses`` are those of all peers, this node's included; ``answers`` are the other nodes' so far.
    Raises ``Invalid``.
    """
    for answer in answers.values():
        _check_cluster(own, answer)
    belonging = [answer for answer in answers.values() if answer.members]
    return _join(own, addresses, belonging) if belonging else _found(own, addresses, answers)


def _check_cluster(own: Identity, answer: HelloAnswer) -> None:
    if own.cluster_id and answer.cluster_id and own.cluster_id != answer.cluster_id:
        raise Invalid(f"node {answer.node_id} is of cluster {answer.cluster_id}, this one of {own.cluster_id}: check peers")


def _join(own: Identity, addresses: Mapping[int, str], belonging: list[HelloAnswer]) -> Begin | Wait:
    for answer in sorted(belonging, key=lambda answer: answer.members_index, reverse=True):
        known = next((member for member in answer.members if member.node_id == own.node_id), None)
        if known is None:
            continue
        if known.identity == own.identity:
            return Begin(members=answer.members, index=answer.members_index)
        if answer.leads:
            raise Invalid(
                f"node {own.node_id} is known with the identity {known.identity}, but this data directory is new"
                f" ({own.identity}): the promises on the old disk are lost, so a new one must not vote in its place."
                f" Give it its old data_dir back, or replace it: {REPLACE}"
            )
    address = addresses[own.node_id]
    return Wait(reason=f"it is not a member of the quorum yet: add it with `stratalog metadata add {own.node_id}={address}`")


def _found(own: Identity, addresses: Mapping[int, str], answers: Mapping[int, HelloAnswer]) -> Begin | Wait:
    missing = addresses.keys() - answers.keys() - {own.node_id}
    if missing:
        return Wait(reason=f"a new quorum starts when all its nodes are running; missing: {sorted(missing)}")
    for answer in answers.values():
        if set(answer.peers) != addresses.keys():
            raise Invalid(f"[metadata] peers lists {sorted(addresses)} here, but {answer.peers} at node {answer.node_id}")
    identities = {own.node_id: own.identity} | {answer.node_id: answer.identity for answer in answers.values()}
    members = (Member(node_id=id_, identity=identities[id_], address=addresses[id_]) for id_ in sorted(addresses))
    return Begin(members=tuple(members))
