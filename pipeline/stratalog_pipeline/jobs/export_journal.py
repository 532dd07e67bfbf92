"""The journal of an export: which offsets went into which files, so that each record is exported exactly once.

``_stratalog/N.plan.json`` is written before run N begins and names all of its files; ``N.done.json`` after the last of them is
complete. A run whose plan lacks its ``done`` was interrupted: the next one finishes it first. Both are created only if absent,
so of two exports that start at once one fails. Names that begin with ``_`` are ignored by readers of Parquet datasets.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from itertools import chain
from typing import Final, TypeVar
from uuid import UUID

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.planning import OffsetRange, PartitionName
from stratalog_pipeline.value_formats.values import Values

REQUESTS_MAX: Final = 32
"""An export's requests to a store at a time."""
PREFIX: Final = "_stratalog/"
_PLAN: Final = ".plan.json"
_DONE: Final = ".done.json"
_DIGITS: Final = 8
_FILE_KEY: Final = re.compile(r"topic=[^/]+/partition=[0-9]+/[0-9]{20}-[0-9]{20}\.parquet")
_Content = TypeVar("_Content")


class PlannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: the records at ``first`` (inclusive) to ``end`` (exclusive) of a partition."""

    topic: str
    topic_id: UUID
    partition: int
    first: int
    end: int

    @property
    def name(self) -> PartitionName:
        return PartitionName(topic=self.topic, topic_id=self.topic_id, partition=self.partition)

    @property
    def offsets(self) -> OffsetRange:
        return OffsetRange(first=self.first, end=self.end)

    @property
    def key(self) -> str:
        """Key of the object, with Hive's partition directories; names sort by offset."""
        return f"topic={self.topic}/partition={self.partition}/{self.first:020}-{self.end:020}.parquet"


def is_file_key(key: str) -> bool:
    """Whether an export's file may have this key."""
    return _FILE_KEY.fullmatch(key) is not None


class PlannedHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Which history a run planned up to ``end``: its manifest's version, and the size and head (hex) of its Merkle tree."""

    topic_id: UUID
    partition: int
    end: int
    version: int
    tree_size: int
    tree_head: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one run, and the options that decide what is in them.

    ``has_place``: topic and partition are columns. ``manifest_versions``: of the history that was planned, by topic and
    partition. ``values``: how values are decoded, with the schema of the target's first run; None: they are bytes.
    ``histories`` are those that the plans before do not have; plans of earlier releases have none.
    """

    include_headers: bool
    read_committed: bool
    files: tuple[PlannedFile, ...]
    has_place: bool = False
    manifest_versions: dict[str, dict[int, int]] = {}
    values: Values | None = None
    histories: tuple[PlannedHistory, ...] = ()


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A complete file. ``sha256`` is hex and over the whole object."""

    topic: str
    partition: int
    first: int
    end: int
    records: int
    size_bytes: int
    sha256: str
    key: str


class Journal:
    """The journal in one target. Each export loads it again."""

    def __init__(self, target: Bucket) -> None:
        """Read the journal. Raises ``Corrupt``, ``Unavailable``."""
        self._target = target
        found = target.run(_keys(target))
        plans = [key for key in found if key.endswith(_PLAN)]
        contents = target.run(bounded_map(target.store.get, plans, REQUESTS_MAX))
        self._plans = {_number(key): _decoded(key, each, Plan) for key, each in zip(plans, contents, strict=True)}
        self._done = {_number(key) for key in found if key.endswith(_DONE)}

    @property
    def last_run(self) -> int:
        return max(self._plans, default=0)

    def unfinished(self) -> Plan | None:
        """The plan of an interrupted run; only the last one can be one."""
        return None if self.last_run in self._done or not self._plans else self._plans[self.last_run]

    def first_plan(self) -> Plan | None:
        return self._plans[min(self._plans)] if self._plans else None

    def identity(self) -> str:
        """SHA-256 (hex) of the first plan, by which a journal is told from one that was begun again in the same target."""
        first = f"{PREFIX}{min(self._plans):0{_DIGITS}}{_PLAN}"
        return hashlib.sha256(self._target.run(self._target.store.get(first))).hexdigest()

    def plan(self, run: int) -> Plan:
        return self._plans[run]

    def finished_runs(self) -> list[int]:
        """The numbers of the runs whose files are complete, in order."""
        return sorted(self._done)

    def written(self, run: int) -> list[WrittenFile]:
        """The files of a finished run. Raises ``Corrupt``, ``Unavailable``."""
        key = f"{PREFIX}{run:0{_DIGITS}}{_DONE}"
        return _decoded(key, self._target.run(self._target.store.get(key)), list[WrittenFile])

    def ends(self) -> dict[tuple[UUID, int], int]:
        """The offset up to which each partition, by topic id and number, was planned."""
        ends: dict[tuple[UUID, int], int] = {}
        planned: chain[PlannedFile | PlannedHistory] = chain.from_iterable(
            (*plan.files, *plan.histories) for plan in self._plans.values()
        )
        for each in planned:
            ends[each.topic_id, each.partition] = max(each.end, ends.get((each.topic_id, each.partition), 0))
        return ends

    def histories(self) -> dict[tuple[UUID, int], PlannedHistory]:
        """The history of each partition, by topic id and number, that was planned last."""
        in_order = (self._plans[run] for run in sorted(self._plans))
        return {(each.topic_id, each.partition): each for plan in in_order for each in plan.histories}

    def topic_ids(self) -> dict[str, UUID]:
        """The id of each topic that was exported before."""
        return {file.topic: file.topic_id for plan in self._plans.values() for file in plan.files}

    def keys_after(self, run: int) -> set[str]:
        """The keys of the files of all later runs."""
        return {file.key for number, plan in self._plans.items() if number > run for file in plan.files}

    def begin(self, plan: Plan) -> None:
        """Record a new run. Raises ``Conflict`` if another export has started one."""
        number = self.last_run + 1
        try:
            self._put(f"{PREFIX}{number:0{_DIGITS}}{_PLAN}", msgspec.json.encode(plan))
        except Conflict:
            raise Conflict("another export to the same target has just started; run this again when it has ended") from None
        self._plans[number] = plan

    def finish(self, files: list[WrittenFile]) -> None:
        """Record that the last run is complete. Does nothing if another process did that."""
        with contextlib.suppress(Conflict):
            self._put(f"{PREFIX}{self.last_run:0{_DIGITS}}{_DONE}", msgspec.json.encode(files))
        self._done.add(self.last_run)

    def _put(self, key: str, content: bytes) -> None:
        self._target.run(self._target.store.put(key, [content]))


async def _keys(target: Bucket) -> list[str]:
    return [info.key async for info in target.store.list(PREFIX)]


def _number(key: str) -> int:
    return int(key.removeprefix(PREFIX)[:_DIGITS])


def _decoded(key: str, content: bytes, kind: type[_Content]) -> _Content:
    try:
        return msgspec.json.decode(content, type=kind)
    except MALFORMED as malformed:
        raise Corrupt(f"{key} in the target is not the journal of an export: {malformed}", key=key) from malformed
