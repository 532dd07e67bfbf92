"""The client's copy of all records, updated in the order of the log. No I/O.

Always: it only moves forward, by whole commands. Subscribers are called after the copy has changed, in the order of the log. A
subscriber that raises has missed a change for good: ``on_failed`` is called, and its owner must not act on the view again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from stratalog_metadata.client.api import OnChanges
from stratalog_metadata.protocol.messages import KeyChange
from stratalog_metadata.records import Record, Versioned
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.record_map import RecordMap
from stratalog_metadata.state.snapshot import StateImage

Kind = TypeVar("Kind", bound=Record)
_log = logging.getLogger(__name__)


def _raise(failure: Exception) -> None:
    raise failure


class LocalView:
    """See :class:`stratalog_metadata.client.api.MetadataView`."""

    def __init__(self, on_failed: Callable[[Exception], None] = _raise) -> None:
        self._on_failed = on_failed
        self._records = RecordMap()
        self._index = 0
        self._subscribers: dict[int, OnChanges] = {}
        self._next_subscriber = 1
        self._waiting: dict[int, list[asyncio.Future[None]]] = defaultdict(list)

    @property
    def index(self) -> int:
        return self._index

    def get(self, key: str) -> Versioned | None:
        return self._records.get(key)

    def find(self, kind: type[Kind], key: str) -> Kind | None:
        stored = self._records.get(key)
        return stored.record if stored is not None and isinstance(stored.record, kind) else None

    def all(self, kind: type[Kind]) -> Iterator[Kind]:
        tag = kind.__struct_config__.tag
        assert isinstance(tag, str)
        for stored in self._records.of_kind(tag):
            assert isinstance(stored.record, kind)
            yield stored.record

    def with_prefix(self, prefix: str) -> list[Versioned]:
        return self._records.scan(prefix)

    def subscribe(self, on_changes: OnChanges) -> Callable[[], None]:
        number = self._next_subscriber
        self._next_subscriber += 1
        self._subscribers[number] = on_changes

        def stop() -> None:
            self._subscribers.pop(number, None)

        return stop

    async def reached(self, index: int) -> None:
        """Wait until the view contains the command at ``index``."""
        if self._index < index:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[index].append(future)
            await future

    def follow(self, index: int, commands: Iterable[Sequence[KeyChange]]) -> None:
        """Apply the changes of the commands after ``self.index``, up to ``index``."""
        for changed in commands:
            changes = [Change(change.key, self._records.get(change.key), change.after) for change in changed]
            self._records.install(changes)
            self._tell(changes)
        self._advance(index)

    def jump(self, image: StateImage) -> None:
        """Replace all records by a snapshot; subscribers get the difference."""
        if image.index <= self._index:
            return
        after = {stored.record.key(): stored for stored in image.records}
        gone = [key for key in self._records.keys() if key not in after]  # noqa: SIM118 - not a dict
        changes = [Change(key, self._records.get(key), None) for key in gone]
        for key, stored in after.items():
            before = self._records.get(key)
            if before is None or before.version != stored.version:
                changes.append(Change(key, before, stored))
        self._records.install(changes)
        self._tell(changes)
        self._advance(image.index)

    def _advance(self, index: int) -> None:
        self._index = max(self._index, index)
        for waited in [waited for waited in self._waiting if waited <= self._index]:
            for future in self._waiting.pop(waited):
                if not future.done():
                    future.set_result(None)

    def _tell(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        for on_changes in list(self._subscribers.values()):
            try:
                on_changes(changes)
            except Exception as failure:
                # The other subscribers still follow the log, so that the process can stop in order.
                _log.exception("a subscriber of the metadata view failed")
                self._on_failed(failure)
