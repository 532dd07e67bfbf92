"""Brings disks up at start: checks cookies against the cluster, sets up new disks, recovers existing ones.

On a first start, all disks get their cookie (a disk with a cookie has a state file), then the record is written. A start may
stop at any point and be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk import recovery
from stratalog_bookies.disk.core.contents import Contents
from stratalog_bookies.disk.core.cookie import (
    COOKIE_FILE,
    FORMAT_VERSION,
    DiskCookie,
    claim,
    decode_cookie,
    disk_key,
    encode_cookie,
)
from stratalog_bookies.disk.core.disk_core import DiskCore
from stratalog_bookies.disk.core.log import Log
from stratalog_bookies.disk.log_files import LogFiles
from stratalog_bookies.disk.missing_disk import MissingFiles
from stratalog_bookies.node.hanging_disks import unless_disk_hangs
from stratalog_bookies.node.registration import Registration
from stratalog_core.errors import Corrupt, StorageFailed, StratalogError
from stratalog_core.ports import Background, Files, Random
from stratalog_metadata.records import Bookie as BookieRecord

_log = logging.getLogger(__name__)


async def claim_disks(
    settings: BookieSettings, disks: Sequence[Files], registration: Registration, random: Random, background: Background
) -> tuple[str, dict[int, str]]:
    """Check the disks' cookies against the cluster and set up new disks.

    Returns the bookie's cookie, and the reason for each disk that cannot be used. Raises ``Invalid`` if none can.
    """
    cluster_id = await registration.cluster_id()
    known = await registration.read()
    record = known.record if known is not None and isinstance(known.record, BookieRecord) else None
    found = await _cookies(settings, disks, background, is_known=record is not None)
    claimed = claim(
        record, found, cluster_id=cluster_id, bookie_id=settings.bookie_id, directories=settings.data_dirs
    )  # fmt: skip
    cookie = claimed.cookie or f"{random.getrandbits(128):032x}"
    for disk, files in enumerate(disks):
        if found[disk] is None and disk not in claimed.lost:
            new = _disk_cookie(settings, cluster_id, cookie, disk)
            await background.run(partial(_set_up, files, new, settings.log_file_bytes))
    return cookie, claimed.lost


async def _cookies(
    settings: BookieSettings, disks: Sequence[Files], background: Background, *, is_known: bool
) -> list[DiskCookie | StratalogError | None]:
    """The disks' cookies. A known bookie does not wait for a disk that hangs if another one has a cookie."""
    found: list[DiskCookie | StratalogError | None] = [None] * len(disks)

    def has_another() -> bool:
        return is_known and any(isinstance(each, DiskCookie) for each in found)

    async def read(disk: int, files: Files, directory: str) -> None:
        reading = background.run(partial(_try_read_cookie, files, directory))
        try:
            found[disk] = await unless_disk_hangs(reading, files, directory, settings, background, has_another)
        except StorageFailed as hangs:
            found[disk] = hangs

    await asyncio.gather(*(read(disk, *each) for disk, each in enumerate(zip(disks, settings.data_dirs, strict=True))))
    return found


def _try_read_cookie(files: Files, directory: str) -> DiskCookie | StratalogError | None:
    try:
        return _read_cookie(files, directory)
    except OSError as failure:
        return StorageFailed(f"{directory} cannot be read: {failure}", read_only=False)
    except StratalogError as wrong:
        return wrong


def cookie_content(settings: BookieSettings, cluster_id: str, cookie: str, disk: int) -> bytes:
    """Correct content of a disk's cookie file."""
    return encode_cookie(_disk_cookie(settings, cluster_id, cookie, disk))


def _disk_cookie(settings: BookieSettings, cluster_id: str, cookie: str, disk: int) -> DiskCookie:
    return DiskCookie(
        format_version=FORMAT_VERSION, cluster_id=cluster_id, bookie_id=settings.bookie_id, cookie=cookie, disk=disk,
        disks=len(settings.data_dirs),
    )  # fmt: skip


def _read_cookie(files: Files, directory: str) -> DiskCookie | None:
    try:
        return decode_cookie(files.read(COOKIE_FILE), directory)
    except FileNotFoundError:
        if recovery.holds_data(files):
            raise Corrupt(f"{directory} holds data but no file {COOKIE_FILE!r}: restore it from a backup") from None
        return None


def _set_up(files: Files, cookie: DiskCookie, log_file_bytes: int) -> None:
    recovery.create(LogFiles(files, disk_key(cookie.cookie, cookie.disk), log_file_bytes))
    files.write_atomic(COOKIE_FILE, encode_cookie(cookie))


def missing_disk(cookie: str, disk: int, settings: BookieSettings, reason: str) -> tuple[LogFiles, DiskCore]:
    """A substitute for a disk that cannot be used; it has failed from the start."""
    key = disk_key(cookie, disk)
    store = LogFiles(MissingFiles(reason), key, settings.log_file_bytes)
    contents = Contents(index_bytes_max=0, tombstones_max=settings.tombstones_max)
    core = DiskCore(contents, Log(key, 1, settings.log_file_bytes), ledgers_max=settings.ledgers_max)
    core.fail(reason)
    return store, core


def recover_disk(files: Files, cookie: str, disk: int, settings: BookieSettings) -> tuple[LogFiles, DiskCore]:
    """Recover one disk. Blocking. Raises ``Corrupt`` or ``OSError``."""
    key = disk_key(cookie, disk)
    store = LogFiles(files, key, settings.log_file_bytes, direct=settings.direct_io)
    contents = Contents(index_bytes_max=settings.index_bytes_max, tombstones_max=settings.tombstones_max)
    core = recovery.recover(store, contents, key, ledgers_max=settings.ledgers_max)
    _log.info("disk %d: %d ledgers in %d log files", disk, len(contents.ledgers), len(contents.files))
    return store, core
