"""Probes what a store guarantees, and refuses to write to one that is not safe.

A probe lets a few writers and a few uploads race for two fresh keys below ``probe/``, and deletes both objects. It also deletes
up to a hundred objects that interrupted probes left more than an hour ago. It proves that a guarantee is broken, never that it
always holds: a server may win a race by chance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Final

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, Refused, StratalogError
from stratalog_core.ports import Clock, Random
from stratalog_core.single_flight import SingleFlight
from stratalog_tiering.format.object_keys import PROBE_PREFIX, probe_key
from stratalog_tiering.store import PART_BYTES_MIN, ObjectInfo, ObjectStore, Upload

RACING_WRITERS: Final = 4
LEFTOVER_AGE_MS: Final = 3_600_000
LEFTOVERS_MAX: Final = 100
CLOCK_DIFFERENCE_MS_MAX: Final = 15 * 60_000
"""The limit of S3, which refuses signatures that are older."""
CLOCK_DIFFERENCE_MS_WARNED: Final = 60_000
_LAST_MODIFIED_STEP_MS: Final = 1000
"""HTTP dates have no fractions of seconds."""
_log = logging.getLogger(__name__)


class Need(Enum):
    """The consequence of a missing guarantee."""

    REQUIRED = "required"
    """The store is refused for writing."""
    WEAKER = "weaker"
    """The store is used, and a warning is logged."""
    OPTIONAL = "optional"
    """Something is switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """``holds`` is ``None`` if the credentials do not allow to ask. ``without`` says what its absence means."""

    name: str
    holds: bool | None
    need: Need
    without: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """The result of one probe. ``clock_ahead_ms`` is what the store's clock is ahead of ours at least; 0 within a second."""

    url: str
    guarantees: tuple[Guarantee, ...]
    clock_ahead_ms: int
    unsafe: str = ""
    """Why the store must not be written to, although it has the guarantees; empty: no reason is known."""

    def missing(self, need: Need) -> list[Guarantee]:
        return [each for each in self.guarantees if each.need is need and not each.holds]

    @property
    def warnings(self) -> list[str]:
        """Sentences that say what makes the store weaker than it should be."""
        found = [f"no {each.name}: {each.without}" for each in self.missing(Need.WEAKER)]
        if abs(self.clock_ahead_ms) > CLOCK_DIFFERENCE_MS_WARNED:
            found.append(
                f"its clock differs from ours by {abs(self.clock_ahead_ms) // 1000} s: ages of objects and grace periods are"
                " wrong by as much; synchronise the clocks"
            )
        return found

    def check_writable(self) -> None:
        """Raise ``Invalid`` with the remedy if it is not safe to write to the store."""
        missing = self.missing(Need.REQUIRED)
        if missing:
            reasons = "; ".join(f"no {each.name} ({each.without})" for each in missing)
            raise Invalid(
                f"{self.url} is not safe to write to: {reasons}. Use a server that offers them, or a release of it that does"
            )
        if self.unsafe:
            raise Invalid(f"{self.url} is not safe to write to: {self.unsafe}")
        if abs(self.clock_ahead_ms) > CLOCK_DIFFERENCE_MS_MAX:
            raise Invalid(
                f"the clock of {self.url} differs from ours by {abs(self.clock_ahead_ms) // 1000} s; maximum is"
                f" {CLOCK_DIFFERENCE_MS_MAX // 1000} s, because objects are deleted by their age: synchronise the clocks"
            )


class StoreCheck:
    """Probes a store before the first use of it for writing, once; concurrent callers share one probe."""

    def __init__(self, store: ObjectStore, clock: Clock, random: Random, *, needs_checksums: bool = False) -> None:
        """``needs_checksums``: a store that keeps no checksums is refused, because segments are verified by them."""
        self._store = store
        self._needs_checksums = needs_checksums
        self._clock = clock
        self._random = random
        self._probes: SingleFlight[str, StoreReport] = SingleFlight()
        self._is_safe = False

    async def ensure(self) -> None:
        """Return once the store is known to be safe. Raises ``Invalid`` if it is not, and what the store raises."""
        if self._is_safe:
            return
        report = await self._probes.get(self._store.url, self._probe)
        report.check_writable()
        self._is_safe = True

    async def _probe(self) -> StoreReport:
        report = await probe_store(self._store, self._clock, self._random, needs_checksums=self._needs_checksums)
        _log.info("%s: %s", report.url, summary(report))
        for warning in report.warnings:
            _log.warning("%s: %s", report.url, warning)
        return report


def summary(report: StoreReport) -> str:
    """The guarantees that hold, those that do not, and those that are unknown, in one line."""
    names: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for each in report.guarantees:
        names[each.holds].append(each.name)
    kinds = (("offers", True), ("does not offer", False), ("does not tell us about", None))
    return "; ".join(f"{verb} {', '.join(names[holds])}" for verb, holds in kinds if names[holds])


async def probe_store(store: ObjectStore, clock: Clock, random: Random, *, needs_checksums: bool = False) -> StoreReport:
    """Probe ``store`` by some thirty requests. Raises what the store raises; then nothing is known."""
    key, upload_key = probe_key(random.getrandbits(64)), probe_key(random.getrandbits(64))
    try:
        return await _probed(store, key, upload_key, clock, Need.REQUIRED if needs_checksums else Need.OPTIONAL)
    finally:
        await _delete_quietly(store, [key, upload_key])


async def _probed(store: ObjectStore, key: str, upload_key: str, clock: Clock, checksums: Need) -> StoreReport:
    before_ms = clock.wall_ms()
    winners = await _race(store, key)
    after_ms = clock.wall_ms()
    content = await _content(store, key)
    info = await store.head(key) if content is not None else None
    ranged = content is not None and await _reads_range(store, key, content)
    listed = await _is_listed(store, key, info)
    uploaded = await _race_uploads(store, upload_key)
    features = await store.features(key)
    required, weaker, optional = Need.REQUIRED, Need.WEAKER, Need.OPTIONAL
    return StoreReport(
        url=store.url,
        clock_ahead_ms=_clock_ahead_ms(info, before_ms, after_ms),
        unsafe=features.unsafe,
        guarantees=tuple(
            Guarantee(name=name, holds=holds, need=need, without=without)
            for name, holds, need, without in (
                ("conditional create", len(winners) == 1, required, "two writers of one key could both believe to have won"),
                ("read after write", content in winners, required, "a stored object could be taken for a missing one"),
                ("ranged reads", ranged, required, "history could not be read block by block"),
                ("multipart uploads", uploaded is not None, required, "large segments could not be written"),
                (
                    "conditional completion",
                    uploaded == 1,
                    weaker,
                    "only random keys keep uploads from replacing objects",
                ),
                ("listing after write", listed, weaker, "orphans and forks are noticed later"),
                (
                    "final deletion",
                    features.final_deletion,
                    weaker,
                    "deleted and erased records can be restored until the store's own period is over",
                ),
                ("conditional replace", features.conditional_replace, optional, "nothing uses it yet"),
                ("checksums at rest", features.checksums_at_rest, checksums, "only reading an object back shows damage"),
                ("versioning", features.versioning, optional, "the store cannot bring back what others delete"),
                ("object lock", features.object_lock, optional, "topics that lock their history are not offloaded"),
            )
        ),
    )


async def _race(store: ObjectStore, key: str) -> list[bytes]:
    """The contents whose writers were told that they created the object."""
    contents = [b"written by %d" % number for number in range(RACING_WRITERS)]
    won = await _winners(store.put(key, [content]) for content in contents)
    return list(compress(contents, won))


async def _content(store: ObjectStore, key: str) -> bytes | None:
    try:
        return await store.get(key)
    except NoSuchObject:
        return None


async def _reads_range(store: ObjectStore, key: str, content: bytes) -> bool:
    try:
        return bytes(await store.get_range(key, 1, 4)) == content[1:5]
    except Corrupt:
        return False


async def _is_listed(store: ObjectStore, key: str, info: ObjectInfo | None) -> bool:
    """Whether a listing shows the object. Deletes what earlier probes left, by the store's clock."""
    before_ms = info.last_modified_ms - LEFTOVER_AGE_MS if info is not None else 0
    leftovers: list[str] = []
    is_listed = False
    async for found in store.list(PROBE_PREFIX):
        is_listed = is_listed or found.key == key
        if found.last_modified_ms < before_ms and len(leftovers) < LEFTOVERS_MAX:
            leftovers.append(found.key)
    await _delete_quietly(store, leftovers)
    return is_listed


async def _race_uploads(store: ObjectStore, key: str) -> int | None:
    """How many uploads to one new key were told that they created the object; None if the store refuses uploads."""
    uploads: list[Upload] = []
    try:
        while len(uploads) < RACING_WRITERS:
            uploads.append(await store.create_upload(key, PART_BYTES_MIN))
        parts = [await store.put_part(upload, 1, [b"uploaded"]) for upload in uploads]
        completions = (store.complete_upload(upload, [part]) for upload, part in zip(uploads, parts, strict=True))
        return sum(await _winners(completions))
    except (Invalid, Refused) as refused:
        # With credentials that have expired meanwhile it refuses all requests.
        await store.put(key, [b"written without an upload"], if_absent=False)
        _log.warning("%s refuses uploads: %s", store.url, refused.message)
        return None
    finally:
        for upload in uploads:
            await store.abort_upload(upload)


async def _winners(writes: Iterable[Awaitable[object]]) -> list[bool]:
    """Which of the concurrent writes was not refused with ``Conflict``. Raises the first other error after all have ended."""
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Conflict):
            raise outcome
    return [not isinstance(outcome, BaseException) for outcome in outcomes]


def _clock_ahead_ms(info: ObjectInfo | None, before_ms: int, after_ms: int) -> int:
    """The least difference that explains when the store says that the object was written between the two times."""
    if info is None:
        return 0
    earliest, latest = before_ms - _LAST_MODIFIED_STEP_MS, after_ms
    return info.last_modified_ms - min(max(info.last_modified_ms, earliest), latest)


async def _delete_quietly(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete objects of probes. A failure is only logged: a later probe deletes them."""
    try:
        await store.delete(keys)
    except StratalogError as failure:
        _log.info("an object of a probe was not deleted yet: %s", failure.message)
