"""Finds partitions of internal topics that no bookie has any more, and restores them from the bucket.

A broker cannot take such a partition over: its groups and transactional ids answer COORDINATOR_LOAD_IN_PROGRESS until an
operator runs ``stratalog tier restore-coordinators``. It happens after metadata was restored from a copy that is older than the
deletion of the ledgers that it knows (ADR 70, ADR 175).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import UUID

import click

from stratalog.moments import format_moment
from stratalog.output import print_rows
from stratalog.restored_groups import BucketTopics, adapted_state, bucket_topics
from stratalog_bookies.client import LedgerClient
from stratalog_bookies.protocol.messages import LedgerTail, Status
from stratalog_broker.coordination.groups.core.restored_positions import PositionsReport, RestoredEnds
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import (
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    Topic,
    ledger_key,
    log_key,
    manifest_pointer_key,
)
from stratalog_tiering.maintenance.lost_coordinators import (
    LostPartition,
    StoredState,
    owner_number_of,
    read_state,
    restore_partition,
    seen_in,
)
from stratalog_tiering.offload.ownership import cluster_id_in
from stratalog_tiering.store import ObjectStore

COMMAND = "stratalog tier restore-coordinators"
_COLUMNS = ("topic", "partition", "state_of", "behind_s", "offset", "state")
_SHOWN_MAX = 20


class Outcome(StrEnum):
    """The outcome for a partition whose ledgers are gone."""

    RESTORED = "restored"
    EMPTY = "begins empty"
    PLANNED = "can be restored"
    PLANNED_EMPTY = "would begin empty"
    NO_STATE = "no state in the bucket"


@dataclass(slots=True, kw_only=True)
class LostPartitions:
    """``undecided``: bookies by partition that did not say whether they have its ledgers, when no other bookie has them."""

    lost: list[LostPartition] = field(default_factory=list)
    undecided: dict[str, list[str]] = field(default_factory=dict)


async def find_lost(view: MetadataView, ledgers: LedgerClient, lost_bookies: Collection[str] = ()) -> LostPartitions:
    """The partitions of internal topics of which no bookie has an entry, or one has deleted the newest ledger with entries.

    The lost history deleted a ledger only after a later one had its state, so what other bookies still have of it is older.
    Those of ``lost_bookies`` count as lost. A partition in which the present owner has opened a ledger is served. One with a
    restored state needs no ledger.
    """
    found = LostPartitions()
    topics = [topic for topic in view.all(Topic) if topic.internal]
    seen = [seen_in(view, topic, index) for topic in topics for index in range(topic.partition_count)]
    suspects = [
        each
        for each in seen
        if each is not None
        and not each.log.restored_from
        and each.log.ledgers[-1].leader_epoch < each.partition.leader_epoch
        and not _is_new(view, each)
    ]
    answers = await asyncio.gather(*(_silent(view, ledgers, each, lost_bookies) for each in suspects))
    for each, silent in zip(suspects, answers, strict=True):
        if silent:
            found.undecided[each.name] = silent
        elif silent is not None:
            found.lost.append(each)
    return found


def _is_new(view: MetadataView, partition: LostPartition) -> bool:
    """Whether nothing was ever written to it: its ledgers were closed empty, and the first one begins the log."""
    records = [view.find(Ledger, ledger_key(ref.ledger_id)) for ref in partition.log.ledgers]
    is_empty = all(each is not None and each.state is LedgerState.CLOSED and each.last_entry < 0 for each in records)
    return is_empty and partition.log.ledgers[0].base_offset == 0


async def _silent(
    view: MetadataView, client: LedgerClient, partition: LostPartition, lost_bookies: Collection[str]
) -> list[str] | None:
    """The bookies that did not answer; None if an owner finds the partition's state.

    It is in the newest ledger with entries: earlier ones are deleted when that one has it.
    """
    records = [view.find(Ledger, ledger_key(ref.ledger_id)) for ref in partition.log.ledgers]
    tails = await asyncio.gather(*(client.tails(ledger) for ledger in records if ledger is not None))
    silent: set[str] = set()
    for answers in reversed(tails):
        asked = {name: tail for name, tail in answers.items() if name not in lost_bookies}
        silent.update(name for name, tail in asked.items() if not _is_answer(tail))
        found = [tail for tail in asked.values() if isinstance(tail, LedgerTail)]
        if any(tail.deleted for tail in found):
            break
        if any(tail.last_entry >= 0 for tail in found):
            return None
    return sorted(silent)


def _is_answer(tail: LedgerTail | StratalogError) -> bool:
    return isinstance(tail, LedgerTail) and tail.status in (Status.OK, Status.NO_SUCH_LEDGER)


@dataclass(slots=True, kw_only=True)
class CoordinatorsReport:
    """``rows``: one for each lost partition."""

    positions: PositionsReport = field(default_factory=PositionsReport)
    rows: list[dict[str, Any]] = field(default_factory=list)
    undecided: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every partition is restored, or would be."""
        return not self.undecided and all(row["state"] != Outcome.NO_STATE for row in self.rows)

    def document(self) -> dict[str, Any]:
        """The command's JSON document."""
        found = self.positions
        groups = {
            "groups": sorted(found.groups), "positions": found.restored, "left_out": found.left_out,
            "moved": [move._asdict() for move in found.moved],
        }  # fmt: skip
        return {"partitions": self.rows, "undecided": self.undecided, "groups": groups}

    def show(self) -> None:
        """Print it."""
        rows = [row | {"state_of": format_moment(row["state_ms"]) if row["state_ms"] else ""} for row in self.rows]
        print_rows(rows, _COLUMNS)
        found = self.positions
        if found.moved:
            columns = ("group_id", "topic", "partition", "committed", "restored")
            print_rows([move._asdict() for move in found.moved], columns, title="Committed offsets past the end")
        for row in self.rows:
            for problem in row["damaged"]:
                click.echo(f"skipped a state: {problem}", err=True)
        for name, bookies in self.undecided.items():
            click.echo(f"{name}: {', '.join(bookies)} do not say whether they have its ledgers", err=True)
        if self.undecided:
            click.echo("start these bookies; or, if their disks are lost, name each with --lost-bookie", err=True)
        if any(row["state"] == Outcome.NO_STATE for row in self.rows):
            click.echo("partitions without a state in the bucket stay as they are: let them begin empty with --empty", err=True)
        if found.groups:
            names = sorted(found.groups)
            more = f" and {len(names) - _SHOWN_MAX} more (--json lists them)" if len(names) > _SHOWN_MAX else ""
            click.echo(
                f"{found.restored} committed offsets; commits after the time of the state are lost, so these groups may read"
                f" records again: {', '.join(names[:_SHOWN_MAX])}{more}",
                err=True,
            )
        if not self.rows and not self.undecided:
            click.echo("all partitions of internal topics have their ledgers: nothing to restore", err=True)


async def restore_lost(
    metadata: MetadataClient,
    store: ObjectStore,
    found: LostPartitions,
    now_ms: int,
    *,
    may_begin_empty: bool,
    dry_run: bool,
) -> CoordinatorsReport:
    """Restore the partitions. A ``dry_run`` changes nothing.

    Raises ``Invalid`` if the bucket is another cluster's, ``Conflict`` if a log has changed meanwhile, ``Unavailable``,
    ``OutcomeUnknown``. It can be repeated.
    """
    report = CoordinatorsReport(undecided=found.undecided)
    cluster_id = cluster_id_in(metadata)
    number = await owner_number_of(store, cluster_id)
    others = (await bucket_topics(metadata.view, store)).others
    topics = BucketTopics(restored=known_ends(metadata.view), others=others)
    for lost in found.lost:
        stored = await read_state(store, lost)
        outcome = _outcome(stored, may_begin_empty=may_begin_empty, dry_run=dry_run)
        adapt = partial(adapted_state, lost.topic.name, topics=topics, report=report.positions)
        if dry_run and stored.state is not None:
            adapt(stored.state.checkpoint.application_state)
        elif outcome in (Outcome.RESTORED, Outcome.EMPTY):
            await restore_partition(metadata, store, lost, stored, number, cluster_id, now_ms, adapt)
        report.rows.append(_row(lost, stored, outcome, now_ms))
    return report


def _outcome(stored: StoredState, *, may_begin_empty: bool, dry_run: bool) -> Outcome:
    if stored.state is not None:
        return Outcome.PLANNED if dry_run else Outcome.RESTORED
    if not may_begin_empty:
        return Outcome.NO_STATE
    return Outcome.PLANNED_EMPTY if dry_run else Outcome.EMPTY


def _row(lost: LostPartition, stored: StoredState, outcome: Outcome, now_ms: int) -> dict[str, Any]:
    state = stored.state
    return {
        "topic": lost.topic.name,
        "partition": lost.partition.index,
        "ledgers": [ref.ledger_id for ref in lost.log.ledgers],
        "state_ms": state.taken_at_ms if state is not None else None,
        "behind_s": max(now_ms - state.taken_at_ms, 0) // 1000 if state is not None else None,
        "offset": state.checkpoint.offset if state is not None else None,
        "state": str(outcome),
        "damaged": list(stored.damaged),
    }


def known_ends(view: MetadataView) -> dict[UUID, RestoredEnds]:
    """The topics of clients, and where their partitions end at least: of an open ledger only the begin is known."""
    topics = [topic for topic in view.all(Topic) if not topic.internal]
    ends = {topic.topic_id: [_end(view, topic, index) for index in range(topic.partition_count)] for topic in topics}
    return {topic.topic_id: RestoredEnds(topic.name, topic.name, ends[topic.topic_id]) for topic in topics}


def _end(view: MetadataView, topic: Topic, index: int) -> int:
    log = view.find(Log, log_key(topic.topic_id, index))
    pointer = view.find(ManifestPointer, manifest_pointer_key(topic.topic_id, index))
    ends = [pointer.end_offset if pointer is not None else 0, log.log_start_offset if log is not None else 0]
    if log is not None and log.ledgers:
        last = view.find(Ledger, ledger_key(log.ledgers[-1].ledger_id))
        is_closed = last is not None and last.state is LedgerState.CLOSED
        ends.append(last.end_offset if last is not None and is_closed else log.ledgers[-1].base_offset)
    return max(ends)


def lost_text(lost: Sequence[LostPartition]) -> str:
    """Return a sentence for an operator that names the partitions."""
    names = ", ".join(each.name for each in lost[:_SHOWN_MAX]) + (", …" if len(lost) > _SHOWN_MAX else "")
    return f"no bookie has the ledgers of {names}: their groups and transactional ids have no coordinator"
