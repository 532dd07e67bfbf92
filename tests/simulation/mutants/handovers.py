"""Planted faults of shared commands, of read-ahead, of handovers between owners, and of owners that resign."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final

import msgspec

from stratalog_bookies.client import LedgerWriter
from stratalog_broker.partitions import ownership
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.handover import OutgoingHandovers
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.partitions.release import Release
from stratalog_broker.reads.read_runs import ReadRuns, Served
from stratalog_core.batches.checkpoint import Checkpoint
from stratalog_core.errors import NotLeader
from stratalog_metadata.client import shared_commands
from stratalog_metadata.state.commands import Command


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


# -- shared commands


def shared_commands_lose_their_last_update() -> None:
    """A shared command omits the updates of its last member."""
    join: Callable[[Sequence[Any]], Command] = shared_commands._joined
    _swap(
        shared_commands,
        "_joined",
        lambda together: msgspec.structs.replace(join(together), updates=join(together[:-1]).updates),
    )


# -- read-ahead


def runs_are_served_to_any_partition() -> None:
    """Batches read ahead for one partition are served to readers of every partition."""
    holding: Callable[..., Any] = ReadRuns._holding

    def any_holding(self: ReadRuns, key: Hashable, offset: int) -> Any:
        found = (holding(self, other, offset) for other in list(self._by_key))
        return holding(self, key, offset) or next((run for run in found if run is not None), None)

    _swap(ReadRuns, "_holding", any_holding)


def runs_skip_a_batch() -> None:
    """A run is served from the batch after the requested one."""
    serve: Callable[..., Served | None] = ReadRuns.serve

    def skipping(self: ReadRuns, key: Hashable, offset: int, *others: Any) -> Served | None:
        served = serve(self, key, offset, *others)
        if served is None or len(served.batches) < 2:
            return served
        return served._replace(batches=served.batches[1:], size=served.size - len(served.batches[0]))

    _swap(ReadRuns, "serve", skipping)


# -- handovers


def handover_keeps_the_epoch() -> None:
    """The next owner gets the epoch of the last."""
    release_of: Callable[..., Release | None] = OutgoingHandovers._release_of

    def same_epoch(self: OutgoingHandovers, log: PartitionLog) -> Release | None:
        release = release_of(self, log)
        if release is None:
            return None
        put: Any = release.updates[0]
        record = msgspec.structs.replace(put.record, leader_epoch=put.record.leader_epoch - 1)
        return release._replace(updates=(msgspec.structs.replace(put, record=record),))

    _swap(OutgoingHandovers, "_release_of", same_epoch)


def handover_does_not_end_a_reassignment() -> None:
    """A reassignment stays in progress although its partition has changed the owner: it could be cancelled afterwards."""
    release_of: Callable[..., Release | None] = OutgoingHandovers._release_of

    def going_on(self: OutgoingHandovers, log: PartitionLog) -> Release | None:
        release = release_of(self, log)
        if release is None:
            return None
        put: Any = release.updates[0]
        stored: Any = self._view.get(log.requirement.key)
        record = msgspec.structs.replace(put.record, reassigned_from=stored.record.reassigned_from)
        return release._replace(updates=(msgspec.structs.replace(put, record=record),))

    _swap(OutgoingHandovers, "_release_of", going_on)


def handover_passes_on_no_producers() -> None:
    """A handover checkpoint omits the producers, so that their retries are appended again."""
    handover_checkpoint: Callable[[PartitionLog], bytes] = PartitionLog.handover_checkpoint
    checkpoint: Callable[..., Checkpoint] = PartitionCore.checkpoint

    def without(self: PartitionLog) -> bytes:
        PartitionCore.checkpoint = lambda core, *state: msgspec.structs.replace(  # type: ignore[method-assign]
            checkpoint(core, *state), producers=()
        )
        try:
            return handover_checkpoint(self)
        finally:
            PartitionCore.checkpoint = checkpoint  # type: ignore[method-assign]

    _swap(PartitionLog, "handover_checkpoint", without)


def starts_that_move_during_a_takeover_are_missed() -> None:
    """A new owner keeps the start that its takeover read, and follows later changes only."""
    serve, follow = Partitions._serve, ownership.follow_log  # type: ignore[attr-defined]

    def serving(self: Partitions, *given: Any) -> None:
        ownership.follow_log = lambda log, record: None  # type: ignore[attr-defined]
        try:
            serve(self, *given)
        finally:
            ownership.follow_log = follow  # type: ignore[attr-defined]

    _swap(Partitions, "_serve", serving)


def readers_are_answered_during_a_handover() -> None:
    """The last owner answers readers although the next one may have acknowledged records."""
    never: Any = property(lambda log: False, lambda log, value: None)
    PartitionLog.is_releasing = never


def resigned_owners_go_on_opening_ledgers() -> None:
    """An owner that has lost its partition goes on opening its next ledger, at the end that it knew, in its successor's log.

    Its attempt begins a moment late, so that its successor has usually opened a ledger before.
    """
    open_once: Callable[..., Awaitable[LedgerWriter]] = LedgerOpening._open_once

    async def open_late(self: LedgerOpening, *given: Any) -> LedgerWriter:
        if getattr(self, "_has_resigned", False):
            await asyncio.sleep(0.2)
        return await open_once(self, *given)

    _swap(LedgerOpening, "stop", lambda self: setattr(self, "_has_resigned", True))
    _swap(LedgerOpening, "_open_once", open_late)
    _swap(LedgerOpening, "_require_end", lambda self, *known: None)


def only_confirmations_resign_at_broken_invariants() -> None:
    """A broken invariant that another event finds is an exception of that event's caller."""
    _swap(PartitionLog, "_handle", lambda self, event, *details: self._act(event(*details)))


def applications_that_are_not_served_go_on() -> None:
    """A takeover that fails after it has loaded a coordinator leaves it beside the one of the next takeover."""
    _swap(ownership, "or_resigned", contextlib.nullcontext)


def partitions_that_are_lost_as_they_begin_are_forgotten() -> None:
    """A partition whose new owner loses it in the moment in which it begins to serve counts as taken over."""
    serve: Callable[..., None] = Partitions._serve

    def serve_or_forget(self: Partitions, *taken: Any) -> None:
        with contextlib.suppress(NotLeader):
            serve(self, *taken)

    _swap(Partitions, "_serve", serve_or_forget)


IN_OWNERSHIP_CHANGES: Final = (
    applications_that_are_not_served_go_on,
    handover_does_not_end_a_reassignment,
    handover_keeps_the_epoch,
    handover_passes_on_no_producers,
    only_confirmations_resign_at_broken_invariants,
    partitions_that_are_lost_as_they_begin_are_forgotten,
    resigned_owners_go_on_opening_ledgers,
    runs_are_served_to_any_partition,
    runs_skip_a_batch,
)
IN_EVERYTHING: Final = (
    readers_are_answered_during_a_handover,
    shared_commands_lose_their_last_update,
    starts_that_move_during_a_takeover_are_missed,
)
