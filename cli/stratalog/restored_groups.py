"""Restores groups and transactional ids for ``stratalog restore``, and reports on them.

The broker package defines the formats of coordinators' states, and tiering stores and restores them; this module joins both.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import click

from stratalog.moments import format_moment
from stratalog.output import print_rows
from stratalog_broker.coordination.groups.core.restored_positions import PositionsReport, RestoredEnds, restore_positions
from stratalog_broker.coordination.transactions.core.store import restore_transactional_ids, unfinished_producers
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import ManifestPointer, Topic, manifest_pointer_key
from stratalog_tiering.cold.archive import readable_topics
from stratalog_tiering.core.restoring import TopicHistory
from stratalog_tiering.maintenance.restoring_coordinators import InternalTopic, read_internal_topics, restore_internal_topic
from stratalog_tiering.store import ObjectStore

RESTORED, PLANNED, PRESENT, UNREADABLE = "restored", "in the bucket", "the cluster has its own", "cannot be read"


@dataclass(slots=True)
class GroupsReport:
    """``topics``: a row for each internal topic in the bucket."""

    positions: PositionsReport = field(default_factory=PositionsReport)
    topics: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The members of the command's JSON document."""
        found = self.positions
        moved = [move._asdict() for move in found.moved]
        groups = {"groups": len(found.groups), "positions": found.restored, "left_out": found.left_out, "moved": moved}
        return {"groups": groups, "internal_topics": self.topics}

    def show(self) -> None:
        """Print it below the partitions."""
        found = self.positions
        if found.moved:
            rows = [move._asdict() for move in found.moved]
            print_rows(
                rows, ("group_id", "topic", "partition", "committed", "restored"), title="Committed offsets past the end"
            )
        for row in self.topics:
            for problem in row["damaged"]:
                click.echo(f"skipped a corrupt state: {problem}", err=True)
            if row["state"] == UNREADABLE:
                click.echo(f"{row['topic']}: {UNREADABLE}, and is not restored", err=True)
                continue
            taken = f"as of {format_moment(row['newest_state_ms'])} at the latest; later changes are lost"
            outcome = taken if row["state"] != PRESENT else "which is not changed"
            click.echo(f"{row['topic']}: {row['state']}, {outcome}", err=True)
        if not self.topics:
            click.echo("no committed offsets of consumer groups are in the bucket", err=True)
        elif found.restored or found.left_out:
            left_out = f"; {found.left_out} of topics that are not restored are left out" if found.left_out else ""
            click.echo(f"{found.restored} committed offsets of {len(found.groups)} groups{left_out}", err=True)

    def add(self, found: InternalTopic, state: str) -> None:
        taken = [each.taken_at_ms for each in found.states]
        self.topics.append(
            {
                "topic": found.topic,
                "partitions": len(taken),
                "oldest_state_ms": min(taken, default=None),
                "newest_state_ms": max(taken, default=None),
                "state": state,
                "damaged": list(found.damaged),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTopics:
    """The topics in the bucket by id: those that the cluster has, and the names of the others."""

    restored: Mapping[UUID, RestoredEnds]
    others: Mapping[UUID, str] = field(default_factory=dict)


def adapted_state(
    topic: str, state: bytes | None, topics: BucketTopics, report: PositionsReport, unfinished: Container[int] | None = None
) -> bytes | None:
    """Return a coordinator's state as it is to be restored: transactional ids for new producers, positions as in
    ``restore_positions``. Raises ``Corrupt``.
    """
    if topic == TRANSACTION_STATE:
        return restore_transactional_ids(state)
    if topic != CONSUMER_OFFSETS:
        return state
    return restore_positions(state, topics.restored, topics.others, report, unfinished)


def _unfinished(internal: Sequence[InternalTopic]) -> frozenset[int]:
    """Return the producers whose transactions with offsets are in progress in the states that are restored."""
    states = [state for found in internal if found.topic == TRANSACTION_STATE for state in found.states]
    return frozenset(
        producer_id
        for state in states
        for producer_id in unfinished_producers(state.checkpoint.application_state, CONSUMER_OFFSETS)
    )


async def planned_groups(store: ObjectStore, ends: Mapping[UUID, RestoredEnds], owner_number: int) -> GroupsReport:
    """The report of a dry run: ``ends`` of the topics that it would restore. Raises as ``read_internal_topics`` does."""
    report, internal = GroupsReport(), await read_internal_topics(store, owner_number)
    topics, unfinished = BucketTopics(restored=ends), _unfinished(internal)
    for found in internal:
        report.add(found, PLANNED if found.states else UNREADABLE)
        for state in found.states:
            adapted_state(found.topic, state.checkpoint.application_state, topics, report.positions, unfinished)
    return report


async def restore_groups(
    client: MetadataClient,
    store: ObjectStore,
    topics: BucketTopics,
    factor: int | None,
    owner_number: int,
    cluster_id: str,
    now_ms: int,
) -> GroupsReport:
    """Restore the internal topics that no broker of the cluster has used. Raises as ``restore_internal_topic`` does."""
    report, internal = GroupsReport(), await read_internal_topics(store, owner_number)
    unfinished = _unfinished(internal)
    for found in internal:
        if not found.states:
            report.add(found, UNREADABLE)
            continue
        adapt = partial(adapted_state, found.topic, topics=topics, report=report.positions, unfinished=unfinished)
        done = await restore_internal_topic(client, store, found, factor, owner_number, cluster_id, now_ms, adapt)
        report.add(found, RESTORED if done else PRESENT)
    return report


async def bucket_topics(view: MetadataView, store: ObjectStore) -> BucketTopics:
    """The bucket's topics, and where those end that the cluster has. Records on its bookies only do not count.

    Deleted topics count while they are in the bucket, and so do those whose descriptor is damaged, without a name: they may be
    restored later. Raises ``Unavailable``.
    """
    names = {topic.topic_id: topic.name for topic in view.all(Topic)}
    topics = await readable_topics(store)
    restored, others = dict[UUID, RestoredEnds](), dict.fromkeys(topics.damaged, "")
    for topic in [each.descriptor for each in topics.readable]:
        if topic.topic_id not in names:
            others[topic.topic_id] = topic.name
            continue
        keys = (manifest_pointer_key(topic.topic_id, index) for index in range(topic.partition_count))
        pointers = [view.find(ManifestPointer, key) for key in keys]
        ends = [each.end_offset if each is not None else 0 for each in pointers]
        restored[topic.topic_id] = RestoredEnds(names[topic.topic_id], topic.name, ends)
    return BucketTopics(restored=restored, others=others)


def ends_in_rows(histories: Sequence[TopicHistory], rows: Sequence[Mapping[str, Any]]) -> dict[UUID, RestoredEnds]:
    """Where the topics would end according to the rows of a dry run, in the order of the histories' partitions."""
    remaining = iter(rows)
    ends: dict[UUID, RestoredEnds] = {}
    for history in histories:
        of_topic = [next(remaining) for _ in history.partitions]
        name = of_topic[0]["topic"] if of_topic else history.descriptor.name
        ends[history.descriptor.topic_id] = RestoredEnds(name, history.descriptor.name, [row["end_offset"] for row in of_topic])
    return ends
