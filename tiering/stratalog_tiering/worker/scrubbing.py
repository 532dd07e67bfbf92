"""Checks the history of a worker's partitions continuously, and repairs what it finds, for the length of one session.

Every segment is read once in each interval, at a time that its key decides (``core/scrub_times.py``), with its own limit on the
rate. When one is due, the partition's manifest, pages and lists are checked, too. Each finding is confirmed against the newest
manifest, logged, counted, and repaired as ``stratalog tier scrub --repair`` does. A damaged segment is written to the
partition's status at once, because hot copies are dropped by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from stratalog_core.errors import OutcomeUnknown, StratalogError, Unavailable
from stratalog_metadata.client.guarded_updates import decide_again
from stratalog_metadata.records import ManifestPointer, TierStatus, Topic, log_key, manifest_pointer_key, tier_status_key
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.cold.segment_check import NOT_RETURNED, require_answers
from stratalog_tiering.cold.verifier import Structure, Verifier
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.copies.repair import Repair, Repairer, RepairSources
from stratalog_tiering.core.damage import HIDES_REFERENCES, REMEDIES, REMEMBERED_MAX, Damage, Finding, remembered
from stratalog_tiering.core.scrub_times import begin_ms, is_due, pause_s
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.object_keys import parse_segment_key
from stratalog_tiering.metrics import ScrubMetrics
from stratalog_tiering.offload.ports import Throttle, WorkerPorts
from stratalog_tiering.offload.topic_descriptors import descriptor_of
from stratalog_tiering.worker.leases import WorkerLeases, partition_lease

_log = logging.getLogger(__name__)
_FAILED_PAUSE_S: Final = 60.0


@dataclass(slots=True, kw_only=True)
class _Checked:
    """The results of one pass. ``unreadable`` and ``unanswered`` are keys of objects that could not be checked."""

    findings: list[Finding] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    unanswered: set[str] = field(default_factory=set)


class ScrubWork:
    """``run`` works until it is cancelled. One partition is scrubbed at a time."""

    def __init__(self, ports: WorkerPorts, leases: WorkerLeases, counters: ScrubMetrics) -> None:
        self._ports = ports
        self._leases = leases
        self._counters = counters
        self._interval_ms = ports.settings.scrub_interval_ms
        self._take = Throttle(ports.settings.scrub_bytes_per_s, ports.clock).take
        self._done_ms: dict[str, int] = {}
        """By name of the partition: wall time up to which its segments were scrubbed."""
        self._unrepaired: dict[str, Collection[str]] = {}
        """By name of the partition: keys of damage that was not repaired. It is looked at again each time.

        The partition's status has them, too, so that a restart does not end an alert.
        """
        self._suspected: dict[str, set[str]] = {}
        """By name of the partition: keys of segments that were found damaged in a pass that has not ended, or failed."""
        self._unanswered: dict[str, Collection[str]] = {}
        """By name of the partition: keys of objects about which the store did not answer in the last pass."""

    def count_lag(self) -> None:
        """Set the gauges."""
        now_ms, pause_ms = self._ports.clock.wall_ms(), 1000 * pause_s(self._interval_ms)
        behind_ms = max((now_ms - done_ms - pause_ms for done_ms in self._done_ms.values()), default=0)
        self._counters.behind_seconds = max(0.0, behind_ms / 1000)
        self._counters.unrepaired = sum(map(len, (self._remembered() | self._unrepaired).values()))

    def _remembered(self) -> dict[str, Sequence[str]]:
        """Damage in the status of this worker's partitions, which it may not have looked at yet. O(partitions)."""
        view = self._ports.metadata.view
        topic_ids = {topic.topic_id for topic in view.all(Topic)}
        damaged = [status for status in view.all(TierStatus) if status.unrepaired and status.topic_id in topic_ids]
        by_name = {partition_lease(status.topic_id, status.index): status.unrepaired for status in damaged}
        return {name: keys for name, keys in by_name.items() if self._leases.is_ours(name)}

    async def run(self) -> None:
        """Scrub all partitions of the worker, again and again."""
        while True:
            failed, topics = False, [topic for topic in self._ports.metadata.view.all(Topic) if not topic.internal]
            for topic in topics:
                for index in range(topic.partition_count):
                    failed = not await self._look_at(topic, index) or failed
            self._forget_all_but({partition_lease(each.topic_id, n) for each in topics for n in range(each.partition_count)})
            pause = pause_s(self._interval_ms)
            await asyncio.sleep(min(_FAILED_PAUSE_S, pause) if failed else pause)

    def _forget_all_but(self, names: Set[str]) -> None:
        """Forget the partitions of deleted topics, which would be behind for ever."""
        for gone in self._done_ms.keys() - names:
            self._forget(gone)

    def _forget(self, name: str) -> None:
        for known in (self._done_ms, self._unrepaired, self._suspected, self._unanswered):
            known.pop(name, None)

    async def _look_at(self, topic: Topic, index: int) -> bool:
        """Scrub what is due of one partition, if it is this worker's; False if that failed and is to be repeated."""
        name = partition_lease(topic.topic_id, index)
        if not self._leases.is_ours(name):
            self._forget(name)
            return True
        until_ms = self._ports.clock.wall_ms()
        if name not in self._done_ms:
            self._begin(topic, index, name, until_ms)
        after_ms = self._done_ms[name]
        try:
            is_whole = await self._scrub(topic, index, name, after_ms, until_ms)
            await self._remember(topic, index, name)
            if not is_whole:
                return False
        except StratalogError as failure:
            self._counters.failures += 1
            _log.warning("scrub of %s-%d: %s: %s", topic.name, index, type(failure).__name__, failure)
            return False
        except Exception:
            self._counters.failures += 1
            _log.exception("scrub of %s-%d failed with an unexpected error; it will be retried", topic.name, index)
            return False
        self._done_ms[name] = until_ms
        return not self._unanswered.get(name)

    def _begin(self, topic: Topic, index: int, name: str, now_ms: int) -> None:
        """Begin with the damage that the partition's status names; if it has no room for more, look for the rest again."""
        status = self._ports.metadata.view.find(TierStatus, tier_status_key(topic.topic_id, index))
        self._unrepaired[name] = frozenset(status.unrepaired if status is not None else ())
        is_full = len(self._unrepaired[name]) >= REMEMBERED_MAX
        self._done_ms[name] = now_ms - self._interval_ms if is_full else begin_ms(now_ms, self._interval_ms)

    async def _scrub(self, topic: Topic, index: int, name: str, after_ms: int, until_ms: int) -> bool:
        """Scrub what is due. False if a repair may show more of it."""
        pointer, known = self._pointer(topic.topic_id, index), frozenset(self._unrepaired[name])
        if pointer is None:
            self._set_damage(name, (), ())
            return True
        again = known.union(self._suspected.get(name, ()), self._unanswered.get(name, ()))
        if not (again or await self._any_due(pointer, after_ms, until_ms)):
            return True
        checked = _Checked()
        set_aside = partial(self._set_aside, topic, pointer, again, checked)
        verifier = Verifier(self._ports.store, self._ports.background, take=self._take, on_not_returned=set_aside)
        structure = await verifier.structure(topic.name, pointer)
        checked.findings += structure.findings
        for entry in structure.segments:
            if entry.key in again or is_due(entry.key, after_ms, until_ms, self._interval_ms):
                try:
                    found = await self._check(verifier, structure, entry)
                except NOT_RETURNED as failure:
                    found = []
                    await set_aside(entry.key, failure)
                checked.findings += found
                if (found or entry.key in checked.unreadable) and entry.key not in known:
                    self._suspected.setdefault(name, set()).add(entry.key)
                    await self._remember(topic, index, name)
        findings = await self._confirmed(topic, index, checked.findings) if checked.findings else []
        repairs = await self._repair(topic, index, findings, known) if findings else {}
        unrepaired = {key for (_, key), made in repairs.items() if made.source is None}
        self._set_damage(name, unrepaired | checked.unreadable | _hidden(structure, again), checked.unanswered)
        return not any(kind in HIDES_REFERENCES and made.source is not None for (kind, _), made in repairs.items())

    def _set_damage(self, name: str, unrepaired: Collection[str], unanswered: Collection[str]) -> None:
        self._unrepaired[name], self._unanswered[name] = frozenset(unrepaired), frozenset(unanswered)
        self._suspected.pop(name, None)

    async def _check(self, verifier: Verifier, structure: Structure, entry: SegmentEntry) -> list[Finding]:
        findings = [found async for found in verifier.segment(entry, structure.proofs)]
        self._counters.segments_checked += 1
        self._counters.checked_bytes += entry.stored_bytes
        return findings

    async def _set_aside(
        self, topic: Topic, pointer: ManifestPointer, again: Set[str], checked: _Checked, key: str, failure: StratalogError
    ) -> None:
        """Note that the object at ``key`` cannot be checked. Raises what the store raises if it is away.

        It counts as damage that is not repaired, until it can be checked. If only an answer was missing, it is checked
        ``again`` first.
        """
        await require_answers(self._ports.store, pointer.object_key)
        if isinstance(failure, OutcomeUnknown | Unavailable) and key not in again:
            self._counters.failures += 1
            _log.warning("scrub of %s-%d: %s is checked again soon: %s", topic.name, pointer.index, key, failure.message)
            checked.unanswered.add(key)
            return
        if key not in self._unrepaired[partition_lease(topic.topic_id, pointer.index)]:
            self._counters.findings += 1
            _log.error("scrub of %s-%d: %s cannot be checked: %s", topic.name, pointer.index, key, failure.message)
        checked.unreadable.add(key)

    async def _remember(self, topic: Topic, index: int, name: str) -> None:
        """Write the damage that is known of a partition to its status, if that has changed."""
        keys = remembered({*self._unrepaired[name], *self._suspected.get(name, ())})
        await decide_again(f"the status of {name}", lambda: self._write_damage(topic.topic_id, index, keys))

    async def _write_damage(self, topic_id: UUID, index: int, keys: tuple[str, ...]) -> None:
        view, key = self._ports.metadata.view, tier_status_key(topic_id, index)
        status, log = view.get(key), view.get(log_key(topic_id, index))
        before = view.find(TierStatus, key)
        if log is None or keys == (before.unrepaired if before is not None else ()):
            return
        worker_id = self._ports.settings.worker_id
        made = before or TierStatus(topic_id=topic_id, index=index, worker_id=worker_id)
        requirements = (
            VersionIs(key=key, version=status.version if status is not None else ABSENT),
            VersionIs(key=log_key(topic_id, index), version=log.version),
        )
        updates = (Put(record=msgspec.structs.replace(made, unrepaired=keys)),)
        await self._ports.metadata.propose(Command(updates=updates, requirements=requirements))

    def _pointer(self, topic_id: UUID, index: int) -> ManifestPointer | None:
        return self._ports.metadata.view.find(ManifestPointer, manifest_pointer_key(topic_id, index))

    async def _any_due(self, pointer: ManifestPointer, after_ms: int, until_ms: int) -> bool:
        """Whether a segment is due, by the cached manifest; one that cannot be read is damage, so all of it is due."""
        try:
            manifest = await self._ports.source.manifest(pointer)
            async for entry in self._ports.source.segments(manifest):
                if is_due(entry.key, after_ms, until_ms, self._interval_ms):
                    return True
        except StratalogError:
            return True
        return False

    async def _confirmed(self, topic: Topic, index: int, findings: Sequence[Finding]) -> list[Finding]:
        """``findings`` without those of objects that left the history while it was scrubbed."""
        await self._ports.metadata.refresh()
        pointer = self._pointer(topic.topic_id, index)
        if pointer is None:
            return []

        async def skip(_: str, __: StratalogError) -> None:
            await require_answers(self._ports.store, pointer.object_key)

        again = Verifier(self._ports.store, self._ports.background, take=self._take, on_not_returned=skip)
        structure = await again.structure(topic.name, pointer)
        live = {entry.key for entry in structure.segments}.union(_hidden(structure, [found.key for found in findings]))
        return [*structure.findings, *(found for found in findings if found.key in live)]

    async def _repair(
        self, topic: Topic, index: int, findings: Sequence[Finding], known: frozenset[str]
    ) -> Mapping[tuple[Damage, str], Repair]:
        """Repair the findings, and report them, but for damage at the ``known`` keys that is still there."""
        ports = self._ports
        view = ports.metadata.view
        sources = RepairSources(
            copy=ports.second_store,
            hot=HotLedgers(ports),
            pointers={(each.topic_id, each.index): each for each in view.all(ManifestPointer)},
            topics={topic.topic_id: descriptor_of(topic)},
            has_metadata=True,
        )
        scrub = BucketScrub(ports.store, ports.background, before_ms=0, take=self._take)
        limits = CopyLimits(background=ports.background, clock=ports.clock, take=self._take)
        await ports.bucket.confirm()
        found = FoundTopic(topic_id=topic.topic_id, name=topic.name, partition_count=topic.partition_count)
        repairs = await Repairer(scrub, ports.store, sources, limits).repair(found, index, findings)
        for (kind, key), made in repairs.items():
            place = f"scrub of {topic.name}-{index}: {kind.value}: {key}"
            self._counters.findings += key not in known
            self._counters.repaired += made.source is not None
            if made.source is not None:
                _log.warning("%s: repaired from the %s", place, made.source.value)
            elif key not in known:
                _log.error("%s: not repaired: %s; %s", place, made.problem, REMEDIES[kind])
        return repairs


def _hidden(structure: Structure, known: Collection[str]) -> set[str]:
    """The segments among ``known`` that an unreadable part of the structure may hide."""
    if not (structure.not_returned or any(found.kind in HIDES_REFERENCES for found in structure.findings)):
        return set()
    shown = {entry.key for entry in structure.segments}
    return {key for key in known if parse_segment_key(key) is not None and key not in shown}
