"""Decommissions a bookie: marks it as draining, and waits until no ledger names it.

The auditor moves closed ledgers; open ones follow after their writers close them. Nothing is deleted here: the disks can be
removed once the wait has ended.

A writer or a recovery that chose the bookie before it began to drain may name it later, after it has put copies on it that
count. So the wait lasts ``NAMED_LATE_S`` at least, also for a bookie that no ledger names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from stratalog.tier.offload import offload_refusal
from stratalog_core.errors import Conflict, NotEnoughBookies, NotFound, Unavailable
from stratalog_metadata.client.api import MetadataClient, MetadataView
from stratalog_metadata.records import Bookie, Ledger, LedgerState, Topic, Versioned, bookie_key
from stratalog_metadata.state.commands import Command, Put, VersionIs

_ATTEMPTS = 20
_LEDGERS = "ledger/"
_TOPICS_SHOWN = 5
NAMED_LATE_S: Final = 120.0
"""Twice the sum of the defaults of ``recovery_deadline_ms`` and ``confirm_deadline_ms``: a recovery has several such steps."""

OnProgress = Callable[[int], None]


async def set_draining(metadata: MetadataClient, name: str, *, draining: bool) -> None:
    """Mark or unmark the bookie as draining. Raises ``NotFound``, or ``NotEnoughBookies`` if others cannot hold its copies."""
    key = bookie_key(name)
    for _ in range(_ATTEMPTS):
        found, record = await _read(metadata, name)
        if record.draining == draining:
            return
        if draining:
            check_enough_remain(metadata.view, name)
        change = Put(record=msgspec.structs.replace(record, draining=draining))
        try:
            await metadata.propose(
                Command(updates=(change,), requirements=(VersionIs(key=key, version=found.version),))
            )  # fmt: skip
        except Conflict:
            continue  # The bookie itself wrote its record concurrently.
        return
    raise Unavailable(f"the record of bookie {name} changed during each of {_ATTEMPTS} attempts: try again")


async def _read(metadata: MetadataClient, name: str) -> tuple[Versioned, Bookie]:
    (found,) = await metadata.read([bookie_key(name)])
    if found is None or not isinstance(found.record, Bookie):
        raise NotFound(f"no bookie {name!r}: see `stratalog bookie list`")
    return found, found.record


def check_enough_remain(view: MetadataView, name: str) -> None:
    """Raise ``NotEnoughBookies`` unless the other bookies can hold all copies of every ledger and topic."""
    left = [each for each in view.all(Bookie) if each.bookie_id != name and _takes_ledgers(each)]
    needed = max(
        (1, *(ledger.ensemble_size for ledger in view.all(Ledger)), *(topic.replication_factor for topic in view.all(Topic)))
    )  # fmt: skip
    if len(left) < needed:
        names = ", ".join(each.bookie_id for each in left) or "none"
        raise NotEnoughBookies(
            f"without {name}, {len(left)} bookies accept ledgers ({names}), but some ledger or topic has {needed} copies:"
            " start more bookies first"
        )


def _takes_ledgers(bookie: Bookie) -> bool:
    return bookie.session_id != 0 and not bookie.read_only and not bookie.draining


def ledgers_of(ledgers: Iterable[Ledger], name: str) -> list[Ledger]:
    """Return the ledgers that name the bookie."""
    return [ledger for ledger in ledgers if any(name in fragment.bookies for fragment in ledger.fragments)]


def describe_left(ledgers: list[Ledger]) -> str:
    """Return a text with the number of ledgers and of open ones."""
    opened = sum(ledger.state is not LedgerState.CLOSED for ledger in ledgers)
    return f"{len(ledgers)} ledgers, {opened} of them open"


async def wait_until_empty(
    metadata: MetadataClient, name: str, timeout_s: float, on_progress: OnProgress, named_late_s: float = NAMED_LATE_S
) -> None:
    """Return when no ledger names the draining bookie or will. Raises ``Unavailable`` after the time-out.

    ``named_late_s``: for how long from now a ledger may name it that did not yet.
    """
    loop = asyncio.get_running_loop()
    decided_at_s = loop.time() + named_late_s
    try:
        async with asyncio.timeout(timeout_s):
            await _until_empty(metadata, name, on_progress)
            await asyncio.sleep(max(decided_at_s - loop.time(), 0.0))
            await _until_empty(metadata, name, on_progress)
    except TimeoutError:
        raise Unavailable(_unfinished(metadata.view, name, timeout_s, named_late_s)) from None


async def _until_empty(metadata: MetadataClient, name: str, on_progress: OnProgress) -> None:
    changed = asyncio.Event()
    stop = metadata.view.subscribe(lambda changes: changed.set())
    try:
        while not await _is_empty(metadata, name, on_progress):
            await changed.wait()
            changed.clear()
    finally:
        stop()


def _unfinished(view: MetadataView, name: str, timeout_s: float, named_late_s: float) -> str:
    left = ledgers_of(view.all(Ledger), name)
    if not left:
        return (
            f"no ledger names {name} after {timeout_s:.0f} s, but one that is being written or recovered may until"
            f" {named_late_s:.0f} s have passed: keep it running, and repeat the command with a longer --timeout"
        )
    return (
        f"{name} is still in {describe_left(left)}, after {timeout_s:.0f} s; {_hindrance(view, name, left)}."
        f" It continues to drain: keep it running, and repeat the command to wait"
    )


def _hindrance(view: MetadataView, name: str, left: list[Ledger]) -> str:
    try:
        check_enough_remain(view, name)
    except NotEnoughBookies as lacking:
        return lacking.message
    open_topics = {ledger.topic_id for ledger in left if ledger.state is not LedgerState.CLOSED}
    if not open_topics:
        return "closed ledgers are being copied (`stratalog bookie list` shows bookies that do not answer)"
    topics = sorted((topic for topic in view.all(Topic) if topic.topic_id in open_topics), key=lambda topic: topic.name)
    offloaded = [topic.name for topic in topics if not offload_refusal(view, topic)]
    others = [topic.name for topic in topics if offload_refusal(view, topic)]
    text = "open ones move after they are closed"
    if offloaded:
        text += f": run `stratalog tier offload TOPIC` for {_shown(offloaded)}"
    if others:
        text += f"; those of {_shown(others)} are closed when they are older than segment.ms, or idle for ledger_idle_ms"
    return text


def _shown(names: list[str]) -> str:
    more = len(names) - _TOPICS_SHOWN
    return ", ".join(names[:_TOPICS_SHOWN]) + (f" and {more} more" if more > 0 else "")


async def _is_empty(metadata: MetadataClient, name: str, on_progress: OnProgress) -> bool:
    """Whether no ledger names the bookie, by a linearizable scan."""
    left = ledgers_of(metadata.view.all(Ledger), name)
    on_progress(len(left))
    if left:
        return False
    stored = [found.record for found in await metadata.scan(_LEDGERS)]
    return not ledgers_of([record for record in stored if isinstance(record, Ledger)], name)
