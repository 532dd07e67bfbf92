"""Measures the lag of the second copy for ``stratalog tier status``: compares metadata with the markers in the second store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stratalog.tier.report import PartitionTier
from stratalog.tier.session import store_session
from stratalog_core.bounded_map import bounded_map
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.offload.topic_descriptors import descriptor_of

_READS_AT_ONCE: Final = 16
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The part of a partition that the second copy has: nothing if ``version`` is 0."""

    version: int = 0
    end_offset: int = 0


async def copied_partitions(topics: Sequence[Topic], reports: Sequence[PartitionTier], url: str) -> list[Row]:
    """Return a row per report of `tier_report` about ``topics``, in order, with the columns of the second copy.

    The copy is read after the reports were made: a lag of 0 means that it has all that they say is committed. Raises
    ``Corrupt`` if its newest version is damaged, ``Unavailable``.
    """
    async with store_session(url) as store:
        archive = Archive(store)

        async def copied(place: tuple[Topic, int]) -> Copied:
            topic, index = place
            pointer: ManifestPointer | None = await archive.pointer(descriptor_of(topic), index)
            return Copied() if pointer is None else Copied(version=pointer.manifest_version, end_offset=pointer.end_offset)

        places = [(topic, index) for topic in topics for index in range(topic.partition_count)]
        found = await bounded_map(copied, places, _READS_AT_ONCE)
    return [
        {
            "copied_version": each.version,
            "copied_end_offset": each.end_offset,
            "copy_lag_versions": max(0, report.manifest_version - each.version),
            "copy_lag_records": max(0, report.cold_end_offset - max(each.end_offset, report.cold_start_offset)),
        }
        for report, each in zip(reports, found, strict=True)
    ]
