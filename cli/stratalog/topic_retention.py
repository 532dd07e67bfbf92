"""Counts the records that a shorter retention of topics deletes, by the rules that the tiering workers apply.

Segments are counted from manifests, and sealed ledgers that are not cold yet from metadata, by the time of their close. Records
that expire under the present retention anyway are not counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import click

from stratalog.deletion import confirm
from stratalog.moments import format_moment
from stratalog.output import human_bytes
from stratalog.tier.report import topics_named
from stratalog.tier.session import metadata_session, store_session
from stratalog_broker.admin.retention_changes import Shortened, shortened_retention
from stratalog_core.errors import StratalogError
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import Topic, configs_in_force
from stratalog_metadata.topic_rules.cleanup_policy import COMPACT, cleanup_policies
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.partition import PartitionSnapshot, is_cold, partition_snapshot
from stratalog_tiering.core.policy import TierPolicy, tier_policy
from stratalog_tiering.core.retention import expired_ledgers, oldest_ms
from stratalog_tiering.maintenance.retention import expired_segments
from stratalog_tiering.store import ObjectStore

_SHOWN_MAX = 5
Configs = Mapping[str, str]
Place = tuple[Sequence[str], str]
"""Addresses of the metadata nodes, and the store's URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionChange:
    """One topic whose retention gets shorter. ``before`` and ``after`` are its configs in force."""

    topic: str
    shortened: tuple[Shortened, ...]
    before: Configs
    after: Configs


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiring:
    """The records of a topic that the change deletes. ``oldest_kept_ms`` is None if no segment is kept in the store."""

    topic: str
    cold_records: int = 0
    cold_bytes: int = 0
    hot_records: int = 0
    hot_bytes: int = 0
    oldest_kept_ms: int | None = None


def change_of(topic: str, before: Configs, after: Configs) -> list[RetentionChange]:
    """The change of one topic; empty if its retention does not get shorter. Raises ``Invalid`` for a value out of bounds."""
    shortened = shortened_retention(before, after)
    return [RetentionChange(topic=topic, shortened=shortened, before=before, after=after)] if shortened else []


def changes_by_defaults(view: MetadataView, after: Configs) -> list[RetentionChange]:
    """The topics whose retention gets shorter if ``after`` become the cluster-wide defaults. Raises ``Invalid``."""
    defaults, changes = topic_defaults(view), list[RetentionChange]()
    for topic in view.all(Topic):
        changes += change_of(topic.name, configs_in_force(topic, defaults), configs_in_force(topic, after))
    return changes


def confirm_shortening(changes: Sequence[RetentionChange], place: Callable[[], Place], *, yes: bool) -> list[Expiring]:
    """Print what ``changes`` delete, ask for confirmation, and return the counts. Without changes it does nothing.

    ``place`` returns the cluster. If it fails, or the cluster does not answer, the question says that the counts are unknown,
    and why. Raises as :func:`confirm` does.
    """
    if not changes:
        return []
    counts, unknown = list[Expiring](), ""
    try:
        counts = asyncio.run(count_expiring(*place(), changes, SystemClock().wall_ms()))
    except StratalogError as failure:
        unknown = f" How many records that deletes is unknown: {failure.message}."
    text = shortening_text(changes, counts) + unknown
    if yes:
        click.echo(text, err=True)
    confirm(f"{text} Shorten retention?", yes=yes)
    return counts


def confirm_compaction(topic: str, before: Configs, after: Configs, *, yes: bool) -> None:
    """Ask for confirmation if the change starts to compact the topic. Raises as :func:`confirm` does."""
    if COMPACT not in cleanup_policies(after) or COMPACT in cleanup_policies(before):
        return
    text = f"Compaction of {topic} keeps the newest record of each key only, and deletes all records without a key."
    if yes:
        click.echo(text, err=True)
    confirm(f"{text} Compact it?", yes=yes)


async def count_expiring(
    addresses: Sequence[str], store_url: str, changes: Sequence[RetentionChange], now_ms: int
) -> list[Expiring]:
    """The records that each of ``changes`` deletes at the wall time ``now_ms``. Raises ``Corrupt``, ``Unavailable``."""
    async with metadata_session(addresses) as client, store_session(store_url) as store:
        topics = topics_named(client.view, [change.topic for change in changes])
        return [
            await expiring_by(client.view, store, topic, change, now_ms) for topic, change in zip(topics, changes, strict=True)
        ]


async def expiring_by(view: MetadataView, store: ObjectStore, topic: Topic, change: RetentionChange, now_ms: int) -> Expiring:
    """The records of ``topic`` that ``change`` deletes at the wall time ``now_ms``. Raises ``Corrupt``, ``Unavailable``."""
    total, source = Expiring(topic=topic.name), ManifestSource(store)
    for index in range(topic.partition_count):
        state = partition_snapshot(view, topic, index)
        if state is not None:
            anyway = await _expired(source, state, tier_policy(change.before), now_ms)
            total = _added(total, anyway, await _expired(source, state, tier_policy(change.after), now_ms))
    return total


async def _expired(source: ManifestSource, state: PartitionSnapshot, policy: TierPolicy, now_ms: int) -> Expiring:
    """Count what has expired of a partition under ``policy``. Ledgers are treated as if they were offloaded now."""
    records, cold_bytes, kept, all_ledgers = 0, 0, None, dataclasses.replace(state, pointer=None)
    if state.pointer is not None:
        manifest = await source.manifest(state.pointer)
        end_offset = manifest.start_offset
        async for entry, _ in expired_segments(source, state, manifest, policy, now_ms):
            records, cold_bytes, end_offset = records + entry.record_count, cold_bytes + entry.stored_bytes, entry.end_offset
        kept = await source.segment_at(manifest, end_offset)
    closed_ms = {stored.ledger.ledger_id: stored.ledger.closed_at_ms for stored in state.ledgers}
    expired = expired_ledgers(all_ledgers, policy, closed_ms, now_ms) if kept is None else ()
    ledgers = [stored.ledger for stored in expired if not is_cold(state, stored.ledger)]
    return Expiring(
        topic=state.topic.name,
        cold_records=records,
        cold_bytes=cold_bytes,
        hot_records=sum(ledger.end_offset - ledger.base_offset for ledger in ledgers),
        hot_bytes=sum(ledger.payload_bytes for ledger in ledgers),
        oldest_kept_ms=oldest_ms(kept) if kept is not None else None,
    )


def _added(total: Expiring, anyway: Expiring, after: Expiring) -> Expiring:
    """Add what expires of a partition after the change but not before it. Both are prefixes of the partition."""
    kept_ms = [each.oldest_kept_ms for each in (total, after) if each.oldest_kept_ms is not None]
    return Expiring(
        topic=total.topic,
        cold_records=total.cold_records + max(0, after.cold_records - anyway.cold_records),
        cold_bytes=total.cold_bytes + max(0, after.cold_bytes - anyway.cold_bytes),
        hot_records=total.hot_records + max(0, after.hot_records - anyway.hot_records),
        hot_bytes=total.hot_bytes + max(0, after.hot_bytes - anyway.hot_bytes),
        oldest_kept_ms=min(kept_ms, default=None),
    )


def shortening_text(changes: Sequence[RetentionChange], counts: Sequence[Expiring]) -> str:
    """The changes, and what each of them deletes, as sentences."""
    parts = [_change_text(change) for change in changes[:_SHOWN_MAX]] + [_count_text(each) for each in counts[:_SHOWN_MAX]]
    if len(changes) > _SHOWN_MAX:
        parts.append(f"{len(changes) - _SHOWN_MAX} more topics are not shown.")
    return " ".join(parts)


def _change_text(change: RetentionChange) -> str:
    limits = ", ".join(f"{each.config} from {_limit(each.before)} to {_limit(each.after)}" for each in change.shortened)
    return f"{change.topic}: {limits}."


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def _count_text(count: Expiring) -> str:
    text = f"{count.cold_records} records ({human_bytes(count.cold_bytes)}) of {count.topic} in the store and"
    text += f" {count.hot_records} records ({human_bytes(count.hot_bytes)}) on bookies expire at once"
    kept = "" if count.oldest_kept_ms is None else f"; the oldest record kept there is of {format_moment(count.oldest_kept_ms)}"
    return f"{text}{kept}."
