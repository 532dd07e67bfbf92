"""A topic's history elsewhere, as the batches of its partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stratalog_core.errors import Invalid
from stratalog_core.ports import Buffer


class PartitionSource(Protocol):
    """One partition. ``log_start_offset`` is where its readers begin, perhaps within its first batches."""

    @property
    def base_offset(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...

    def batches(self) -> AsyncIterator[Sequence[Buffer]]:
        """Whole batches in offset order, a few megabytes at a time. Raises ``Corrupt``, ``Invalid``, ``Unavailable``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSource:
    """``partitions`` are those that ever had records, by index. ``configs`` are those to take over."""

    name: str
    partition_count: int
    partitions: Mapping[int, PartitionSource]
    configs: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        return sum(partition.stored_bytes for partition in self.partitions.values())


def chosen_topic(where: str, names: Sequence[str], wanted: str | None) -> str:
    """The topic to attach: ``wanted``, or the only one. Raises ``Invalid`` that lists the names."""
    listed = ", ".join(names)
    if not names:
        raise Invalid(f"{where} holds no topic")
    if wanted is None and len(names) > 1:
        raise Invalid(f"{where} holds several topics: choose one with --topic; there are {listed}")
    if wanted is not None and wanted not in names:
        raise Invalid(f"{where} holds no topic {wanted!r}; there are {listed}")
    return wanted or names[0]
