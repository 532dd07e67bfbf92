"""All records in memory, by key, and ordered by key within each kind.

Always: the first part of a key is the kind of its record, so a scan touches one kind only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from stratalog_metadata.records import Versioned
from stratalog_metadata.state.changes import Change

_BULK = 64


class _Kind:
    """Records of one kind. The sorted keys are built on demand and maintained while that is cheap."""

    __slots__ = ("records", "sorted_keys")

    def __init__(self) -> None:
        self.records: dict[str, Versioned] = {}
        self.sorted_keys: list[str] | None = None

    def ordered(self) -> list[str]:
        if self.sorted_keys is None:
            self.sorted_keys = sorted(self.records)
        return self.sorted_keys

    def put(self, key: str, record: Versioned) -> None:
        if self.sorted_keys is not None and key not in self.records:
            insort(self.sorted_keys, key)
        self.records[key] = record

    def remove(self, key: str) -> None:
        if self.records.pop(key, None) is not None and self.sorted_keys is not None:
            del self.sorted_keys[bisect_left(self.sorted_keys, key)]


class RecordMap:
    """Read by ``apply`` and by views; changed only by :meth:`install` and :meth:`replace`."""

    __slots__ = ("_kinds",)

    def __init__(self, records: Iterable[Versioned] = ()) -> None:
        self._kinds: dict[str, _Kind] = {}
        self.replace(records)

    def __len__(self) -> int:
        return sum(len(kind.records) for kind in self._kinds.values())

    def __iter__(self) -> Iterator[Versioned]:
        """All records, ordered by key."""
        return iter(self.scan(""))

    def counts(self) -> dict[str, int]:
        """How many records there are of each kind."""
        return {name: len(kind.records) for name, kind in self._kinds.items()}

    def get(self, key: str) -> Versioned | None:
        kind = self._kinds.get(_kind_of(key))
        return None if kind is None else kind.records.get(key)

    def of_kind(self, name: str) -> list[Versioned]:
        """Records of the kind whose keys begin with ``name/``, ordered by key."""
        kind = self._kinds.get(name)
        return [] if kind is None else [kind.records[key] for key in kind.ordered()]

    def scan(self, prefix: str) -> list[Versioned]:
        """Records whose key begins with ``prefix``, ordered by key."""
        if "/" not in prefix:
            names = sorted(name for name in self._kinds if f"{name}/".startswith(prefix))
            return [record for name in names for record in self.of_kind(name)]
        kind = self._kinds.get(_kind_of(prefix))
        if kind is None:
            return []
        keys = kind.ordered()
        found = []
        for position in range(bisect_left(keys, prefix), len(keys)):
            if not keys[position].startswith(prefix):
                break
            found.append(kind.records[keys[position]])
        return found

    def keys(self) -> Iterator[str]:
        for kind in self._kinds.values():
            yield from kind.records

    def install(self, changes: Iterable[Change]) -> None:
        """Apply changes: each ``after`` becomes the record of its key."""
        changes = list(changes)
        if len(changes) > _BULK:
            # Sorting once later is cheaper than many insertions into a long list.
            for name in {_kind_of(change.key) for change in changes}:
                if name in self._kinds:
                    self._kinds[name].sorted_keys = None
        for change in changes:
            kind = self._kinds.get(_kind_of(change.key))
            if kind is None:
                kind = self._kinds[_kind_of(change.key)] = _Kind()
            if change.after is None:
                kind.remove(change.key)
            else:
                kind.put(change.key, change.after)

    def replace(self, records: Iterable[Versioned]) -> None:
        """Replace all records."""
        self._kinds = {}
        for versioned in records:
            key = versioned.record.key()
            self._kinds.setdefault(_kind_of(key), _Kind()).records[key] = versioned


def _kind_of(key: str) -> str:
    return key.partition("/")[0]
