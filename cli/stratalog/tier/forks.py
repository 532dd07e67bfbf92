"""Forked history: shows both histories of a partition, and records the decision which one to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from stratalog_broker.admin.view_waiting import wait_until
from stratalog_core.errors import Conflict, Invalid, NotFound, OutcomeUnknown, Unavailable
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import (
    KEEP_STORE,
    ForkDecision,
    ManifestPointer,
    Topic,
    manifest_pointer_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_metadata.state.guarded_update import Superseded
from stratalog_tiering.cold.lease import user_name
from stratalog_tiering.format.manifest import Manifest
from stratalog_tiering.format.object_keys import manifests_prefix
from stratalog_tiering.maintenance.fork_resolution import Lines, read_lines
from stratalog_tiering.store import ObjectStore

_DECIDE_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedPartition:
    """A partition whose history has forked."""

    topic: Topic
    partition: int
    lines: Lines


async def forked_partitions(view: MetadataView, store: ObjectStore, topics: Iterable[Topic]) -> list[ForkedPartition]:
    """Return the partitions of ``topics`` whose history in the store differs from the one in metadata."""
    forked = []
    for topic in topics:
        for index in range(topic.partition_count):
            pointer = view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
            lines = await read_lines(store, manifests_prefix(topic.topic_id, index), pointer)
            if lines is not None:
                forked.append(ForkedPartition(topic=topic, partition=index, lines=lines))
    return forked


def fork_text(forked: ForkedPartition) -> str:
    """Return a text with both histories and the command that decides."""
    name, lines = f"{forked.topic.name} {forked.partition}", forked.lines
    return (
        f"FORKED {name}: metadata does not know history that is committed in the store; commits and deletions are stopped\n"
        f"  metadata: {_line_text(lines.fork.metadata_version, lines.metadata)}\n"
        f"  store:    {_line_text(lines.fork.store_version, lines.store.manifest)}\n"
        f"  decide:   stratalog tier resolve-fork {name} --keep metadata|store"
    )


def given_up_text(forked: ForkedPartition, keep: str, *, discard_hot: bool) -> str:
    """Return sentences that say what the decision to keep the history of ``keep`` deletes."""
    lines = forked.lines
    if keep == KEEP_STORE:
        gone = f"metadata's history ({_line_text(lines.fork.metadata_version, lines.metadata)})"
    else:
        gone = f"the store's history ({_line_text(lines.fork.store_version, lines.store.manifest)})"
    hot = " Hot ledgers that do not continue the store's history are deleted at once." if discard_hot else ""
    return (
        f"{forked.topic.name}-{forked.partition} gives up {gone}. Objects that only this history has are deleted after the"
        f" grace period.{hot}"
    )


def fork_row(forked: ForkedPartition) -> dict[str, Any]:
    """Return the newest version of both histories for JSON. A version is None if a history has no manifest."""
    fork = forked.lines.fork
    return {
        "topic": forked.topic.name,
        "partition": forked.partition,
        "metadata_version": fork.metadata_version or None,
        "metadata_manifest": fork.metadata_key or None,
        "store_version": fork.store_version,
        "store_manifest": fork.store_key,
    }


def _line_text(version: int, manifest: Manifest | None) -> str:
    if manifest is None:
        return f"version {version}, its manifest is missing in the store" if version else "no manifest"
    return (
        f"version {version}, offsets {manifest.start_offset} to {manifest.end_offset - 1}, {manifest.record_count} records,"
        f" {manifest.cold_bytes} bytes"
    )


async def decide_fork(metadata: MetadataClient, forked: ForkedPartition, keep: str, *, discard_hot: bool) -> ForkDecision:
    """Record the decision for exactly this fork. A tiering worker carries it out.

    A command that takes effect late replaces no later decision, nor one that was carried out. Raises ``Conflict`` if somebody
    else decides at the same time, ``OutcomeUnknown``, ``Unavailable``.
    """
    decision = ForkDecision(
        topic_id=forked.topic.topic_id,
        index=forked.partition,
        keep=keep,
        metadata_key=forked.lines.fork.metadata_key,
        store_key=forked.lines.fork.store_key,
        discard_hot=discard_hot,
        decided_at_ms=SystemClock().wall_ms(),
        decided_by=user_name(),
    )
    keys = decision.key(), manifest_pointer_key(decision.topic_id, decision.index)
    versions = ((key, metadata.view.get(key)) for key in keys)
    unchanged = tuple(VersionIs(key=key, version=found.version if found is not None else ABSENT) for key, found in versions)
    what = f"the fork of {forked.topic.name}-{forked.partition}"
    try:
        command = Command(updates=(Put(record=decision),), requirements=unchanged)
        await propose_guarded(metadata, command, decision.key(), _DECIDE_TIMEOUT_S)
    except Superseded as changed:
        if changed.is_certain:
            raise Conflict(f"{what} was decided by somebody else at the same time") from changed
        raise OutcomeUnknown(f"{what} was decided, by this command or by somebody else: look at it again") from changed
    return decision


async def wait_for_resolution(metadata: MetadataClient, decision: ForkDecision, timeout_s: float) -> None:
    """Return when the decision is carried out. Raises ``Invalid`` if it is refused, ``Unavailable`` after the time-out."""

    def pending() -> ForkDecision | None:
        return metadata.view.find(ForkDecision, decision.key())

    def is_decided() -> bool:
        found = pending()
        return found is None or bool(found.refused)

    if not await wait_until(metadata.view, is_decided, timeout_s):
        raise Unavailable(f"the decision was not carried out within {timeout_s:.0f} s: is a tiering worker running?")
    refused = pending()
    if refused is not None:
        raise Invalid(refused.refused)


def only_fork(forked: list[ForkedPartition], topic: str, partition: int) -> ForkedPartition:
    """Return the fork of this partition. Raises ``NotFound``."""
    for found in forked:
        if found.partition == partition:
            return found
    raise NotFound(f"the history of {topic}-{partition} has not forked")
