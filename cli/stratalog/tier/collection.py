"""Rows about garbage in the store for ``stratalog tier gc``."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from stratalog.moments import format_moment
from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session, store_session
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Topic
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.maintenance.earlier_deletions import confirm_deletion
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in
from stratalog_tiering.worker.collection import CollectorPorts, Found, delete_due, find_all

Row = dict[str, object]


async def confirm_deletions(addresses: Sequence[str], store_url: str, topic_ids: Sequence[UUID]) -> None:
    """Confirm that topics are deleted whose history continued after an earlier owner of the bucket deleted them.

    Raises ``Invalid`` if the bucket is not the cluster's, ``NotFound`` for a topic that needs no confirmation.
    """
    async with metadata_session(addresses) as client, store_session(store_url) as store:
        for topic_id in topic_ids:
            owner = await check_claim(store, cluster_id_in(client))
            await confirm_deletion(store, client, owner, topic_id, SystemClock().wall_ms())


async def collect(
    addresses: Sequence[str], store_url: str, names: Sequence[str], grace_ms: int, *, dry_run: bool
) -> list[Found]:
    """Find the garbage of the topics (none: all) and of deleted topics, and delete what is due unless ``dry_run``."""
    async with metadata_session(addresses) as client, store_session(store_url) as store:
        topics = topics_named(client.view, names) if names else [*client.view.all(Topic)]
        ports = CollectorPorts(metadata=client, store=store, source=ManifestSource(store), locks=KnownLocks(store))
        found = await find_all(ports, [topic for topic in topics if not topic.internal], grace_ms, SystemClock().wall_ms())
        if not dry_run:
            await delete_due(client, store, found)
        return found


def due_rows(found: Sequence[Found]) -> list[Row]:
    """A row for each object that is due."""
    return [
        {**_place(each), "reason": garbage.reason, "bytes": garbage.object_bytes, "key": garbage.key}
        for each in found
        for garbage in each.due
    ]


def waiting_rows(found: Sequence[Found]) -> list[Row]:
    """A row for each partition and reason: how many objects wait, and when the first and the last of them are due."""
    rows: list[Row] = []
    for each in found:
        for reason, lease in dict.fromkeys((garbage.reason, garbage.lease) for garbage in each.waiting):
            group = [garbage for garbage in each.waiting if (garbage.reason, garbage.lease) == (reason, lease)]
            times = [garbage.due_ms for garbage in group]
            stored_bytes = sum(garbage.object_bytes for garbage in group)
            first, last = format_moment(min(times)), format_moment(max(times))
            row = {"reason": reason, "objects": len(group), "bytes": stored_bytes, "first_due_at": first, "last_due_at": last}
            row["lease"] = lease or None
            rows.append({**_place(each), **row})
    return rows


def refused_rows(found: Sequence[Found]) -> list[Row]:
    """A row for each partition of which nothing may be deleted, with the reason."""
    return [{**_place(each), "error": each.refused} for each in found if each.refused]


def _place(found: Found) -> Row:
    return {"topic": found.topic, "partition": found.partition if found.partition >= 0 else None}
