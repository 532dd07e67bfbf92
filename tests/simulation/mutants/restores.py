"""Planted faults of takeovers of a bucket, run in ``restores``."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from stratalog import restored_groups
from stratalog_broker.admin import deleted_topics
from stratalog_broker.coordination.groups.core.restored_positions import PositionsReport
from stratalog_metadata.records import topic_key
from stratalog_metadata.state.commands import Command, Delete, VersionIs
from stratalog_tiering.core import restoring as core_restoring
from stratalog_tiering.format.object_keys import deletion_marker_key
from stratalog_tiering.maintenance import earlier_deletions as earlier
from stratalog_tiering.maintenance import restoring, restoring_coordinators
from stratalog_tiering.maintenance.open_transactions import OpenTransactions
from stratalog_tiering.offload import ownership, version_objects
from stratalog_tiering.offload.ownership import BucketOwnership
from stratalog_tiering.worker import collection, session


def workers_look_for_another_owner_at_their_start_only() -> None:
    """A worker that has found the bucket to be its own commits and deletes until it ends."""

    async def confirm(self: BucketOwnership, within_s: float = 0.0) -> None:
        await self.ensure()

    BucketOwnership.confirm = confirm  # type: ignore[method-assign]


def deletions_share_the_look_of_commits() -> None:
    """A deletion relies on a look up to a second ago."""
    look = BucketOwnership.confirm

    async def confirm(self: BucketOwnership, within_s: float = 0.0) -> None:
        await look(self, ownership.COMMITS_SHARE_S)

    BucketOwnership.confirm = confirm  # type: ignore[method-assign]


def manifests_are_stored_without_a_look() -> None:
    """A commit that waited for metadata stores its manifest although the bucket was taken over meanwhile."""
    version_objects.COMMITS_SHARE_S = math.inf  # type: ignore[attr-defined]


def the_history_is_read_before_the_takeover() -> None:
    """A restore commits what it has read before it wrote the new owner."""
    take_over, read_history = restoring.take_over, restoring.read_history  # type: ignore[attr-defined]
    early: list[Any] = []

    async def read_and_take_over(store: Any, *others: Any) -> Any:
        early[:] = await read_history(store, await restoring.wanted_topics(store, ()))
        return await take_over(store, *others)

    async def read_earlier(*ignored: Any) -> Any:
        return list(early)

    restoring.take_over = read_and_take_over  # type: ignore[assignment, attr-defined]
    restoring.read_history = read_earlier  # type: ignore[assignment]


def owners_delete_within_the_grace_period_after_a_takeover() -> None:
    """A restored installation sweeps at once."""
    ownership.deletes_from_ms = lambda owner, grace_ms: 0


def restored_partitions_go_on_in_the_last_epoch() -> None:
    """Leader epochs begin where those in the bucket end."""
    core_restoring.restore_epoch = lambda last_epoch, owner_number: last_epoch


def cuts_are_marked_without_a_look() -> None:
    """A restore up to a point marks its cut although the bucket was taken over since."""

    async def refuse_nothing(store: Any, number: int) -> None:
        pass

    restoring.refuse_next_owner = refuse_nothing  # type: ignore[attr-defined]


def cuts_look_at_the_transactions_of_one_segment() -> None:
    """A restore up to a point knows no transaction that began before the segment in which the point is."""

    async def at(self: OpenTransactions, entry: Any) -> list[int]:
        return []

    OpenTransactions.at = at  # type: ignore[method-assign]


def offsets_of_other_topics_are_dropped() -> None:
    """A restore of one topic stores states without the committed offsets of the other topics."""

    def restore_positions(
        state: bytes | None, topics: Any, others: Any, report: PositionsReport, unfinished: Any = None
    ) -> bytes | None:
        return adapt(state, topics, {}, report, unfinished)

    adapt = restored_groups.restore_positions  # type: ignore[attr-defined]
    restored_groups.restore_positions = restore_positions  # type: ignore[attr-defined]


def internal_topics_are_restored_once() -> None:
    """A restore leaves an internal topic as an earlier one has restored it, with the offsets of fewer topics."""
    unused: Any = restoring_coordinators._unused

    def unused_if_absent(view: Any, newest: Any) -> Any:
        return unused(view, newest) if view.get(topic_key(newest.topic)) is None else None

    restoring_coordinators._unused = unused_if_absent


def topics_that_earlier_owners_deleted_stay() -> None:
    """A new owner of the bucket does not learn which topics the clusters before it deleted."""

    async def earlier_deletions(*ignored: Any) -> list[Any]:
        return []

    earlier.earlier_deletions = earlier_deletions  # type: ignore[assignment]


def promises_of_earlier_owners_to_keep_a_topic_end_at_the_takeover() -> None:
    """The grace period of a topic that an earlier owner deleted begins although that could still have restored it."""
    decide: Any = earlier.earlier_deletion  # type: ignore[attr-defined]

    def earlier_deletion(marker: Any, *others: Any) -> Any:
        return decide(msgspec.structs.replace(marker, restorable_ms=0), *others)

    earlier.earlier_deletion = earlier_deletion  # type: ignore[assignment, attr-defined]


def restored_topics_are_reported_before_the_bucket_shows_them() -> None:
    """The restore of a deleted topic is done when metadata has the topic, whatever the bucket says."""

    async def wait_until(*ignored: Any) -> bool:
        return True

    deleted_topics.wait_until = wait_until  # type: ignore[assignment, attr-defined]


def markers_of_restored_topics_go_last() -> None:
    """A worker removes the record of a restore, and then the marker."""

    async def show_restored_topic(ports: Any, restored: Any, version: int, guards: Any) -> None:
        requirements = (*guards, VersionIs(key=restored.key(), version=version))
        await ports.metadata.propose(Command(updates=(Delete(key=restored.key()),), requirements=requirements))
        await ports.delete_objects([deletion_marker_key(restored.topic_id)])

    session.show_restored_topic = show_restored_topic  # type: ignore[attr-defined]


def garbage_is_collected_without_a_look() -> None:
    """``tier gc`` asks whether the bucket is its own when it begins, and not again."""

    check: Any = collection.check_claim  # type: ignore[attr-defined]
    known: dict[Any, Any] = {}

    async def check_claim(store: Any, cluster_id: str) -> Any:
        if store not in known:
            known[store] = await check(store, cluster_id)
        return known[store]

    collection.check_claim = check_claim  # type: ignore[attr-defined]


def a_damaged_descriptor_stops_the_restore_of_every_topic() -> None:
    """The bucket's topics cannot be listed while the descriptor of one is damaged."""
    find = restoring.readable_topics  # type: ignore[attr-defined]

    async def all_or_none(store: Any) -> Any:
        found = await find(store)
        found.require_all()
        return found

    restoring.readable_topics = all_or_none  # type: ignore[attr-defined]


IN_RESTORES: Final = (
    garbage_is_collected_without_a_look,
    workers_look_for_another_owner_at_their_start_only,
    deletions_share_the_look_of_commits,
    manifests_are_stored_without_a_look,
    the_history_is_read_before_the_takeover,
    owners_delete_within_the_grace_period_after_a_takeover,
    restored_partitions_go_on_in_the_last_epoch,
    cuts_are_marked_without_a_look,
    cuts_look_at_the_transactions_of_one_segment,
    offsets_of_other_topics_are_dropped,
    internal_topics_are_restored_once,
    topics_that_earlier_owners_deleted_stay,
    promises_of_earlier_owners_to_keep_a_topic_end_at_the_takeover,
    restored_topics_are_reported_before_the_bucket_shows_them,
    markers_of_restored_topics_go_last,
    a_damaged_descriptor_stops_the_restore_of_every_topic,
)
"""Planted faults by the part of the product that they change; :mod:`.hunt` runs them."""
