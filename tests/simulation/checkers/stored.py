"""Reads the entries on a bookie's disk that would survive a power cut, from its log files, without the bookie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.cookie import COOKIE_FILE, decode_cookie, disk_key
from stratalog_core.errors import Corrupt

if TYPE_CHECKING:
    from simulation.world.disk import Disk

_PREFIX: Final = "log/"
_SUFFIX: Final = ".log"


def stored_entries(disk: Disk) -> Iterator[tuple[int, int]]:
    """Yield ledger and entry id of each durable, undamaged entry. Damaged entries and files do not count."""
    cookie = disk.durable(COOKIE_FILE)
    if not cookie:
        return
    owner = decode_cookie(cookie, disk.name)
    key = disk_key(owner.cookie, owner.disk)
    for path in sorted(disk.content):
        if path.startswith(_PREFIX) and path.endswith(_SUFFIX):
            generation = int(path.removeprefix(_PREFIX).removesuffix(_SUFFIX), 16)
            yield from _entries_of(disk.durable(path), log_format.frame_seed(key, generation))


def _entries_of(content: bytes, seed: int) -> Iterator[tuple[int, int]]:
    try:
        frames = log_format.scan(content, seed).frames
    except Corrupt:
        return
    view = memoryview(content)
    for frame in frames:
        if frame.kind == log_format.ENTRIES and log_format.payloads_match(view, frame):
            yield from ((header[0], header[1]) for header in log_format.entries_of(view, frame))
