"""Does the same with several things that were named: goes on after a failure, and reports each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratalog_core.errors import StratalogError


def with_each(names: Sequence[str], act: Callable[[str], object], done: str) -> None:
    """Call ``act`` with each name. Raises the first failure, with the messages of all and the names that are ``done``."""
    finished: list[str] = []
    failures: list[StratalogError] = []
    for name in names:
        try:
            act(name)
        except StratalogError as failure:
            failures.append(failure)
        else:
            finished.append(name)
    if failures:
        first, texts = failures[0], [failure.message for failure in failures]
        first.message = "; ".join([*texts, *([f"{done} {', '.join(finished)}"] if finished else [])])
        raise first
