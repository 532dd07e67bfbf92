"""Names that a request repeats.

A response may be much larger than the names in its request: the description of one group can have megabytes. A request that
repeats a name a hundred thousand times would need gigabytes, so a name is answered in full once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def repeated_names(names: Iterable[Name]) -> frozenset[Name]:
    """Return those names that there are more than once."""
    listed = list(names)
    if len(set(listed)) == len(listed):
        return frozenset()
    return frozenset(name for name, is_repeated in first_or_repeated(listed) if is_repeated)


def first_or_repeated(names: Iterable[Name]) -> Iterator[tuple[Name, bool]]:
    """Yield each name, and whether it came before."""
    seen = set[Name]()
    for name in names:
        yield name, name in seen
        seen.add(name)
