"""The last step of the ``history`` scenario: a second copy, damage in both stores, and repair.

Workers that crash copy the history to a second store that fails; damage is planted in either store, and in both. Checked: the
copy is whole, also after somebody has emptied it; nothing that the committed history needs is ever deleted from it, nor what it
needed a grace period ago; offload and copying go on beside damage of what they do not need, and after a repair from metadata
where they do need it;
readers get every record while one store is damaged; damage is repaired by the bytes that were committed, and by nothing else;
an object that is damaged in both stores stays as it is.

Randomness is drawn from a stream of its own, so that nothing before this step depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec

from simulation.checkers.audit import Audit
from simulation.checkers.coverage import COPIED, LEASED, REPAIRED
from simulation.world import roles
from simulation.world.machine import Machine, Ports, World
from simulation.world.object_store import Bucket, SimulatedStore, StoreFaults
from stratalog_metadata.records import ManifestPointer, Topic, manifest_pointer_key
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import unlimited
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.references import Reference, segment_object, side_objects
from stratalog_tiering.format.descriptor import OwnerDescriptor, decode_descriptor, encode_descriptor
from stratalog_tiering.format.object_keys import (
    OWNERS_PREFIX,
    data_key_key,
    is_data_key,
    is_version_object,
    marker_key,
    owner_key,
    parse_segment_key,
    topic_prefix,
)
from stratalog_tiering.store import ObjectStore, StoreWithCopy

COPY_GRACE_S: Final = 2.0
COPIED_S: Final = 60.0
QUIET_S: Final = 6.0
"""Longer than the grace period of the first store: when nothing was committed for so long, nothing will be."""
WRITING_S: Final = 4.0
LEASED_S: Final = 10.0
"""Longer than the grace period of the first store and its sweep, so that what is not protected is gone."""
DAMAGED_S: Final = 3 * COPY_GRACE_S
"""Longer than the copy's grace, so that what is wrongly taken for garbage is gone before the repair."""
LOOK_S: Final = 0.25
HEADER_BYTES: Final = 12
"""Magic, format version and flags: damaged more often than the rest, as an altered version looks like a later release's."""
DAMAGES_MAX: Final = 3


class History(Protocol):
    """The parts of the scenario that this step uses."""

    world: World
    bucket: Bucket
    tiering: list[Machine]
    second: Bucket | None
    on_look: Callable[[], None]
    """Called four times a second."""

    @property
    def audit(self) -> Audit: ...
    async def in_checker(self, work: Callable[[Machine, Ports], Any]) -> None: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def read_everything(self, store: ObjectStore, ports: Ports) -> None: ...


class SecondCopyStep:
    """One run of the step. ``write`` lets the history grow for some seconds, and returns when it does not change any more."""

    def __init__(self, history: History, partitions: Sequence[tuple[Topic, int]], write: Callable[[float], Awaitable[None]]):
        self._history = history
        self._partitions = partitions
        self._write = write
        self._second = Bucket()
        self._chance = history.world.random("copies")
        self._wanted: dict[str, bytes] = {}
        self._referenced: frozenset[str] = frozenset()
        self._left_at: dict[str, float] = {}
        self._unstored: list[str] = []
        """Key of the version that was damaged before a worker read it back."""

    async def run(self) -> None:
        self._history.second = self._second
        self._second.on_deleted = self._deleted
        if self._history.world.decides("second-store"):
            self._second.faults = StoreFaults(
                unavailable=0.05, answer_lost=0.05, damaged=0.2, truncated=0.03, happens_later=0.02, listing_lag_s=1.0
            )
        self._history.on_look = self._note_what_left
        self._lose_the_first_owner()
        self._restart()
        await self._under_a_lease()
        if self._history.world.decides("second-copy-crash"):
            self._restart()
        await self._write(WRITING_S / 2)
        self._second.faults = StoreFaults()
        await self._until_copied()
        self._history.world.coverage.meet(COPIED, len(self._second.objects))
        await self._empty()
        await self._grow_beside_damage()
        first, second, both = await self._plant()
        await self._history.in_checker(self._readers_see_no_damage)
        await self._history.pass_time(DAMAGED_S)
        await self._repair(first, second, both)

    async def _under_a_lease(self) -> None:
        """Let the history grow and expire while a reader holds a lease: the first store keeps all that leaves it meanwhile."""
        bucket, audit = self._history.bucket, self._history.audit
        held: list[HeldLease] = []

        async def acquire(machine: Machine, ports: Ports) -> None:
            number = self._chance.getrandbits(64)
            held.append(HeldLease(self._store(bucket, ports), ports.clock, number, "reader", (), 3_600_000))
            await held[0].acquire()

        async def release(machine: Machine, ports: Ports) -> None:
            await held[0].release()

        await self._history.in_checker(acquire)
        leased, check = audit.referenced, bucket.on_deleted

        def deleted(keys: Sequence[str]) -> None:
            lost = sorted(leased.intersection(keys))
            audit.require(not lost, f"{lost[:1]} was deleted, and a reader has had a lease since it was part of the history")
            check(keys)

        bucket.on_deleted = deleted
        await self._write(WRITING_S / 2)
        await self._history.pass_time(LEASED_S)
        bucket.on_deleted = check
        self._history.world.coverage.meet(LEASED, len(leased - audit.referenced))
        await self._history.in_checker(release)

    def _restart(self) -> None:
        for machine in self._history.tiering:
            machine.crash()
            machine.boot()

    def _pointers(self) -> list[ManifestPointer]:
        keys = [manifest_pointer_key(topic.topic_id, index) for topic, index in self._partitions]
        found = [self._history.audit.records.get(key) for key in keys]
        return [each for each in found if isinstance(each, ManifestPointer)]

    async def _until_copied(self) -> None:
        """Wait until the history does not change any more, and all of it is in the second copy."""
        pointers = list[ManifestPointer]()
        while pointers != self._pointers():
            pointers = self._pointers()
            await self._history.pass_time(QUIET_S)
        until = self._history.world.loop.time() + COPIED_S
        while behind := [each for each in self._pointers() if marker_key(each.object_key) not in self._second.objects]:
            assert self._history.world.loop.time() < until, f"{behind[0].key()} is not copied: {behind[0].object_key}"
            await self._history.pass_time(LOOK_S)

    async def _empty(self) -> None:
        """Remove all that the second store has, while the history does not change: workers copy it again, unasked."""
        chance, world = self._history.world.random("emptied copies"), self._history.world
        if not world.decides("second-copy-emptied") or chance.random() < 0.5:
            return
        world.note(f"the second store loses {len(self._second.objects)} objects")
        for key in [*self._second.objects]:
            del self._second.objects[key]
            self._second.changed(key, None, world.loop.time(), chance)
        await self._until_copied()
        self._require_owners()

    def _deleted(self, keys: Sequence[str]) -> None:
        """Require that the committed history needs none of these objects, and has not needed them for the grace period."""
        now, audit = self._history.world.loop.time(), self._history.audit
        needed = audit.referenced | self._wanted.keys()
        lost = sorted(needed.intersection(keys))
        audit.require(not lost, f"{lost[:1]} was deleted from the second copy, and the history refers to it")
        for key in keys:
            stayed_s = now - self._left_at.get(key, float("-inf"))
            is_early = stayed_s < 0.9 * COPY_GRACE_S
            audit.require(not is_early, f"{key} was deleted from the second copy {stayed_s:.1f} s after it left the history")

    def _note_what_left(self) -> None:
        """Note the time at which objects that the second copy has leave the committed history."""
        referenced = self._history.audit.referenced
        for key in self._referenced - referenced:
            self._left_at[key] = self._history.world.loop.time()
        self._referenced = referenced

    # -- damage while the history grows

    def _lose_the_first_owner(self) -> None:
        """Leave the bucket as after a takeover, with the object of the owner before it lost."""
        first, taken, bucket = owner_key(0), owner_key(1), self._history.bucket
        content, written, when = bucket.objects[first]
        owner = msgspec.structs.replace(decode_descriptor(content, OwnerDescriptor, first), number=1)
        bucket.objects[taken] = (encode_descriptor(owner), written, when)
        listed = replace(bucket.listed[first], key=taken, size_bytes=len(bucket.objects[taken][0]))
        bucket.changed(taken, listed, self._history.world.loop.time(), self._chance)
        self._remove(bucket, first)

    async def _grow_beside_damage(self) -> None:
        """Damage a newest version in the copy, a topic's newest descriptor, and a version as it is written to the first store.

        The last one stops its partition until it is repaired.
        """
        bucket = self._history.bucket
        self._alter(self._second, self._chance.choice(self._pointers()).object_key)
        topic, _ = self._partitions[-1]
        self._cut(min(key for key in bucket.objects if key.startswith(topic_prefix(topic.topic_id))))
        self._restart()
        check = bucket.on_written
        bucket.on_written = self._cut_version
        growth = asyncio.gather(self._write(WRITING_S / 2), self._history.in_checker(self._repair_unstored))
        while not growth.done():
            await self._history.pass_time(LOOK_S)
        await growth
        bucket.on_written = check
        await self._until_copied()

    def _cut(self, key: str) -> None:
        content, written, when = self._history.bucket.objects[key]
        self._history.bucket.objects[key] = (content[: len(content) // 2], written, when)

    def _cut_version(self, key: str, content: bytes) -> None:
        """Cut the first version that is written, as if the store had lost half of it before it was read back."""
        if not self._unstored and is_version_object(key):
            self._unstored.append(key)
            self._cut(key)

    async def _repair_unstored(self, machine: Machine, ports: Ports) -> None:
        while not self._unstored:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(LOOK_S)
        client = await roles.connect_metadata(ports)
        pointers = {(each.topic_id, each.index): each for each in client.view.all(ManifestPointer)}
        sources = RepairSources(pointers=pointers, has_metadata=True)
        made = await self._repaired(self._store(self._history.bucket, ports), sources, ports)
        key = self._unstored[0]
        is_repaired = key in made and made[key].source is RepairedFrom.METADATA
        assert is_repaired, f"{key}, which metadata has, was not written again: {made.get(key)}"

    # -- damage

    async def _plant(self) -> tuple[list[str], list[str], str]:
        """Damage objects of the first store, others of the second, and one of both; returns their keys."""
        wanted: list[Reference] = []

        async def references(machine: Machine, ports: Ports) -> None:
            source = ManifestSource(SimulatedStore(self._history.bucket, ports.loop, ports.random))
            for pointer in self._pointers():
                manifest = await source.manifest(pointer)
                wanted.extend([segment_object(entry) async for entry in source.segments(manifest)])
                wanted.extend(side_objects(manifest))

        await self._history.in_checker(references)
        manifests = [each.object_key for each in self._pointers()]
        keys = [*dict.fromkeys(each.key for each in wanted)]
        data_keys = [key for key in map(data_key_key, filter(parse_segment_key, keys)) if key in self._history.bucket.objects]
        self._wanted = {key: self._history.bucket.objects[key][0] for key in (*keys, *manifests, *data_keys)}
        torn = [key for key, content in self._wanted.items() if self._second.objects.get(key, (b"",))[0] != content]
        assert not torn, f"{torn[0]} is not in the second copy as it was committed, and its version is marked there"
        self._require_owners()
        segments = [key for key in keys if key.startswith("segments/")]
        both = self._chance.choice(segments)
        keys.remove(both)
        data_keys = [key for key in data_keys if key != data_key_key(both)]
        self._chance.shuffle(keys)
        first, second = keys[:DAMAGES_MAX], keys[DAMAGES_MAX : 2 * DAMAGES_MAX]
        if self._chance.random() < 0.5:
            first.append(self._chance.choice(manifests))
        if data_keys and self._chance.random() < 0.5:
            first.append(self._chance.choice(data_keys))
        for bucket, damaged in ((self._history.bucket, first), (self._second, second)):
            for key in damaged:
                self._damage(bucket, key)
        self._remove(self._history.bucket, both)
        self._alter(self._second, both)
        of_damaged = {data_key_key(key) for key in first if parse_segment_key(key)}.intersection(data_keys).difference(first)
        if of_damaged and self._chance.random() < 0.5:
            first.append(min(of_damaged))
            self._damage(self._history.bucket, first[-1])
        self._history.world.note(
            f"damaged {len(first)} objects of the first store, {len(second)} of the second, {both} in both"
        )
        return first, second, both

    def _require_owners(self) -> None:
        owners = {key: each[0] for key, each in self._history.bucket.objects.items() if key.startswith(OWNERS_PREFIX)}
        lost = [key for key, content in owners.items() if self._second.objects.get(key, (b"",))[0] != content]
        assert not lost, f"{lost[0]} is not in the second copy as in the first"

    def _damage(self, bucket: Bucket, key: str) -> None:
        if self._chance.random() < 0.5:
            self._remove(bucket, key)
        else:
            self._alter(bucket, key)

    def _remove(self, bucket: Bucket, key: str) -> None:
        del bucket.objects[key]
        bucket.changed(key, None, self._history.world.loop.time(), self._chance)

    def _alter(self, bucket: Bucket, key: str) -> None:
        content, written, when = bucket.objects[key]
        if is_data_key(key):
            later = content.replace(b'"format_version": 1', b'"format_version": 9')
            bucket.objects[key] = (later, written, when)
            return
        position = self._chance.randrange(HEADER_BYTES if self._chance.random() < 0.25 else len(content))
        altered = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        bucket.objects[key] = (altered, written, when)

    async def _readers_see_no_damage(self, machine: Machine, ports: Ports) -> None:
        """Read all records from both stores together, with the object that is damaged in both back for the time of the read."""
        kept = self._history.bucket.objects.copy()
        for key, content in self._wanted.items():
            if key not in kept and self._second.objects.get(key, (b"",))[0] != content:
                self._history.bucket.objects[key] = (content, 0, 0)
        both = StoreWithCopy(self._store(self._history.bucket, ports), self._store(self._second, ports), ports.clock)
        await self._history.read_everything(both, ports)
        for key in self._history.bucket.objects.keys() - kept.keys():
            if self._wanted.get(key) == self._history.bucket.objects[key][0] and self._history.bucket.objects[key][1] == 0:
                del self._history.bucket.objects[key]

    def _store(self, bucket: Bucket, ports: Ports) -> SimulatedStore:
        return SimulatedStore(bucket, ports.loop, ports.random)

    # -- repair

    async def _repair(self, first: Sequence[str], second: Sequence[str], both: str) -> None:
        results: dict[str, Repair] = {}

        async def repair(machine: Machine, ports: Ports) -> None:
            here, there = self._store(self._history.bucket, ports), self._store(self._second, ports)
            results.update(await self._repaired(here, RepairSources(copy=there), ports))
            of_second = await self._repaired(there, RepairSources(copy=here), ports)
            results.update({f"second:{key}": made for key, made in of_second.items()})

        await self._history.in_checker(repair)
        left = [key for key in first if self._history.bucket.objects.get(key, (b"",))[0] != self._wanted[key]]
        left += [key for key in second if self._second.objects.get(key, (b"",))[0] != self._wanted[key]]
        assert not left, f"{left[0]} was not repaired: {results.get(left[0])} {results.get(f'second:{left[0]}')}"
        for bucket, name in ((self._history.bucket, both), (self._second, both)):
            is_damaged = bucket.objects.get(name, (b"",))[0] != self._wanted[name]
            claimed = [key for key, made in results.items() if key.endswith(name) and made.source is not None]
            assert is_damaged, f"{name} was damaged in both stores and is intact: the check is wrong"
            assert not claimed, f"{name} was reported as repaired from a damaged copy"
        untouched = [key for key, content in self._wanted.items() if key != both and self._both_differ(key, content)]
        assert not untouched, f"{untouched[0]} is not the committed object after the repair"
        assert self._history.bucket.objects.get(both) is None, f"{both} was replaced by a damaged copy"
        self._history.world.coverage.meet(REPAIRED, len([made for made in results.values() if made.source is not None]))
        for bucket in (self._history.bucket, self._second):
            bucket.objects[both] = (self._wanted[both], 0, bucket.objects.get(both, (b"", 0, 0))[2])

    def _both_differ(self, key: str, content: bytes) -> bool:
        return any(
            bucket.objects.get(key, (content,))[0] != content for bucket in (self._history.bucket, self._second)
        )  # fmt: skip

    async def _repaired(self, store: ObjectStore, sources: RepairSources, ports: Ports) -> dict[str, Repair]:
        limits = CopyLimits(background=ports.background, clock=ports.clock, take=unlimited)
        scrub = BucketScrub(store, ports.background, before_ms=0)
        repairer = Repairer(scrub, store, sources, limits)
        results: dict[str, Repair] = {}
        for topic_id, name, count in self._topics():
            topic = FoundTopic(topic_id=topic_id, name=name, partition_count=count)
            for index in range(count):
                _, repairs = await repairer.partition(topic, index)
                results.update({key: made for (_, key), made in repairs.items()})
        return results

    def _topics(self) -> list[tuple[UUID, str, int]]:
        found = {topic.topic_id: (topic.topic_id, topic.name, topic.partition_count) for topic, _ in self._partitions}
        return list(found.values())
