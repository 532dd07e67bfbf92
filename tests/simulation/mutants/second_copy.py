"""Planted faults of the second copy, of repairs and of readers' leases, run in ``history``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from stratalog_core.errors import Corrupt, Invalid, Unavailable
from stratalog_tiering.copies import copying, repair, replication
from stratalog_tiering.copies.repair import RepairedFrom, Repairer
from stratalog_tiering.copies.replication import sweep_partition
from stratalog_tiering.copies.second import SecondCopy, put_if_absent
from stratalog_tiering.format import manifest, object_frame, partition_tree
from stratalog_tiering.format.object_keys import DATA_PREFIXES, OWNERS_PREFIX, owner_key
from stratalog_tiering.maintenance import orphans, retention
from stratalog_tiering.offload import topic_descriptors
from stratalog_tiering.store import with_copy
from stratalog_tiering.worker import copying as copy_work


def copies_are_not_verified() -> None:
    """A copy or a repair takes whatever bytes the other store has."""
    read = copying._read_verified

    async def trusting(store: Any, wanted: Any, limits: Any, upload: Any = None) -> None:
        try:
            await read(store, wanted, limits, upload)
        except Corrupt:
            return

    copying._read_verified = trusting


def the_second_copy_is_swept_of_what_the_first_store_lacks() -> None:
    """Garbage of the second copy is what a listing of the first store does not show: a loss there becomes one in both."""

    async def sweep(ports: Any, second: Any, state: Any) -> int:
        deleted = await sweep_partition(ports, second, state)
        for make_prefix in DATA_PREFIXES:
            prefix = make_prefix(state.log.topic_id, state.log.index)
            present = {info.key async for info in ports.store.list(prefix)}
            gone = [info.key async for info in second.store.list(prefix) if info.key not in present]
            await second.store.delete(gone)
            deleted += len(gone)
        return deleted

    copy_work.sweep_partition = sweep  # type: ignore[attr-defined]


def versions_are_marked_although_a_segment_was_not_copied() -> None:
    """A segment that cannot be copied is only logged."""
    copy = replication._copy_segment

    async def copy_segment(ports: Any, second: Any, entry: Any) -> int:
        try:
            return await copy(ports, second, entry)
        except Corrupt:
            return 0

    replication._copy_segment = copy_segment


def altered_headers_count_as_those_of_a_later_release() -> None:
    """The format version and the flags of an object are looked at before its digest."""
    decode: Callable[..., Any] = object_frame.unframe

    def unframe(content: bytes, magic: bytes, kind: Any, name: str, *others: Any) -> Any:
        _, version, flags, _ = object_frame._HEADER.unpack_from(content)
        object_frame._check_known(name, version, flags)
        return decode(content, magic, kind, name, *others)

    manifest.unframe = partition_tree.unframe = unframe  # type: ignore[attr-defined,assignment]


def what_looks_like_a_later_release_is_read_from_one_store() -> None:
    """Readers look for another copy only of an object that contradicts its digest."""
    with_copy._ALTERED = (Corrupt,)  # type: ignore[assignment,misc]


def altered_data_keys_are_left() -> None:
    """A data key whose format version is altered counts as one of a later release."""

    async def refuse(*_: Any) -> RepairedFrom:
        raise Invalid("upgrade this release")

    Repairer._segment_with_data_key = refuse  # type: ignore[method-assign,assignment]


def segments_with_a_damaged_data_key_stay() -> None:
    """Where a data key is damaged, nothing else is restored."""
    restore = Repairer._from_copy

    async def from_copy(repairer: Any, entry: Any, *, with_data_key: bool) -> None:
        if with_data_key:
            await repairer._data_key(entry)
            await repairer._require_sound(entry)
        else:
            await restore(repairer, entry, with_data_key=False)

    Repairer._from_copy = from_copy  # type: ignore[method-assign,assignment]


def the_second_copy_has_no_grace_period() -> None:
    """Objects that the newest version does not need go at once."""
    replication.version_at = lambda versions, at_ms: next(iter(versions), None)  # type: ignore[attr-defined]


async def _no_leases(store: Any, now_ms: int) -> list[Any]:
    return []


def retention_ignores_leases() -> None:
    """Objects that a manifest lists as removed are deleted after the grace period, even if a lease holder reads them."""
    retention.leases_in_force = _no_leases  # type: ignore[attr-defined]


def the_sweep_ignores_leases() -> None:
    """Superseded manifests are deleted after the grace period, even if a lease holder uses them."""
    orphans.leases_in_force = _no_leases  # type: ignore[attr-defined]


def a_damaged_version_in_the_second_copy_stops_copying() -> None:
    """Without the newest version in the second copy it is not known which objects are there, and nothing is copied."""
    keys_of = replication._keys_of

    async def required(second: Any, version: Any) -> frozenset[str]:
        try:
            return await keys_of(second, version)
        except (Corrupt, Invalid) as damaged:
            raise Unavailable(damaged.message) from damaged

    replication._keys_of = required


def a_damaged_descriptor_stops_the_offload() -> None:
    """The next version of a topic's descriptor is not written after one that cannot be read."""
    read = topic_descriptors.read_topic  # type: ignore[attr-defined]

    async def required(store: Any, key: str) -> Any:
        try:
            return await read(store, key)
        except Corrupt as damaged:
            raise Unavailable(damaged.message) from damaged

    topic_descriptors.read_topic = required  # type: ignore[attr-defined]


async def _nothing(store: Any, pointer: Any, now_ms: int) -> None:
    pass


def versions_are_not_repaired_from_metadata() -> None:
    """A version that was damaged before it was read back is repaired from the second copy only, which does not have it."""
    repair.put_unstored = _nothing  # type: ignore[attr-defined]


def owners_are_copied_by_their_position() -> None:
    """The bucket's owners get consecutive numbers in the second copy, although the first store has lost one."""

    async def copy_owners(copy: SecondCopy, ports: Any) -> None:
        contents = [await ports.store.get(info.key) async for info in ports.store.list(OWNERS_PREFIX)]
        for number, content in enumerate(contents):
            await put_if_absent(copy.store, owner_key(number), content)

    SecondCopy._copy_owners = copy_owners  # type: ignore[method-assign,assignment]


def copies_that_were_emptied_stay_so() -> None:
    """A worker believes that the second store has what it once copied."""
    SecondCopy.lost = lambda copy, pointer_key: None  # type: ignore[method-assign,assignment]


def owners_of_an_emptied_copy_are_lost() -> None:
    """Only the history is copied again to a second store that was emptied."""
    SecondCopy.lost = lambda copy, pointer_key: copy.known.pop(pointer_key)  # type: ignore[method-assign,assignment]


IN_HISTORY: Final = (
    copies_that_were_emptied_stay_so,
    owners_of_an_emptied_copy_are_lost,
    a_damaged_version_in_the_second_copy_stops_copying,
    a_damaged_descriptor_stops_the_offload,
    versions_are_not_repaired_from_metadata,
    owners_are_copied_by_their_position,
    retention_ignores_leases,
    the_sweep_ignores_leases,
    copies_are_not_verified,
    the_second_copy_is_swept_of_what_the_first_store_lacks,
    versions_are_marked_although_a_segment_was_not_copied,
    the_second_copy_has_no_grace_period,
    altered_headers_count_as_those_of_a_later_release,
    what_looks_like_a_later_release_is_read_from_one_store,
    altered_data_keys_are_left,
    segments_with_a_damaged_data_key_stay,
)
