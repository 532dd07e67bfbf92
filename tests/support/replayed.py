"""Batches in memory as what an application of an internal topic replays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from stratalog_core.ports import Buffer


async def replayed(batches: Iterable[Buffer] = ()) -> AsyncIterator[Buffer]:
    for batch in batches:
        yield batch
