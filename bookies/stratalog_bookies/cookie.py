"""Which bookie a disk belongs to, and whether what is mounted is what the cluster knows. Pure.

Each disk bears a cookie file; the bookie's record in metadata bears the same cookie. A known bookie whose disk has none has
lost that disk's entries: it must not come up as if it were healthy, because it would answer "no such entry" for
acknowledged ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from stratalog_bookies.log_format import COOKIE_BYTES
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_metadata.records import Bookie

COOKIE_FILE: Final = "cookie"
FORMAT_VERSION: Final = 1


class DiskCookie(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a disk's cookie file (JSON, for people to read). ``cookie`` is the bookie's: 32 hexadecimal digits."""

    format_version: int
    cluster_id: str
    bookie_id: str
    cookie: str
    disk: int
    disks: int


def disk_key(cookie: str, disk: int) -> bytes:
    """16 bytes that differ for every disk of every bookie; seeds the log's checksums."""
    return hashlib.sha256(f"{cookie}/{disk}".encode()).digest()[:COOKIE_BYTES]


def encode_cookie(cookie: DiskCookie) -> bytes:
    return msgspec.json.format(msgspec.json.encode(cookie)) + b"\n"


def decode_cookie(content: bytes, directory: str) -> DiskCookie:
    """Raises ``Corrupt``, or ``Invalid`` for another format version."""
    try:
        cookie = msgspec.json.decode(content, type=DiskCookie)
    except MALFORMED as malformed:
        raise Corrupt(f"the cookie in {directory} cannot be read: {malformed}") from malformed
    if cookie.format_version != FORMAT_VERSION:
        raise Invalid(f"{directory} has format version {cookie.format_version}; this bookie reads version {FORMAT_VERSION}")
    return cookie


def check_disks(
    record: Bookie | None, found: Sequence[DiskCookie | None], *, cluster_id: str, bookie_id: str, directories: Sequence[str]
) -> str | None:
    """The bookie's cookie if all disks are what the cluster knows, None if bookie and disks are new.

    Raises ``Invalid`` with what is wrong and what to do.
    """
    for disk, (cookie, directory) in enumerate(zip(found, directories, strict=True)):
        if cookie is not None:
            _check_owner(cookie, directory, cluster_id, bookie_id, disk, len(found))
    cookies = {cookie.cookie for cookie in found if cookie is not None}
    if len(cookies) > 1:
        raise Invalid(f"the disks of bookie {bookie_id} bear different cookies: they were not set up together")
    known = record.cookie if record is not None else next(iter(cookies), None)
    if record is not None:
        _check_known(record, found, directories)
    elif cookies and None in found:
        return _interrupted(found, directories, bookie_id)
    return known


def _check_owner(cookie: DiskCookie, directory: str, cluster_id: str, bookie_id: str, disk: int, disks: int) -> None:
    for what, expected, has in (
        ("cluster", cluster_id, cookie.cluster_id),
        ("bookie", bookie_id, cookie.bookie_id),
        ("place in data_dirs", disk, cookie.disk),
        ("number of disks", disks, cookie.disks),
    ):
        if expected != has:
            raise Invalid(f"{directory} is of {what} {has!r}, not {expected!r}: mount the right disk or correct the settings")


def _check_known(record: Bookie, found: Sequence[DiskCookie | None], directories: Sequence[str]) -> None:
    for cookie, directory in zip(found, directories, strict=True):
        if cookie is None:
            raise Invalid(
                f"{directory} is empty, but the cluster knows bookie {record.bookie_id} and what it stored: mount its disk, or"
                " start an empty disk under a new bookie_id and have the old one's ledgers replicated again"
            )
        if cookie.cookie != record.cookie:
            raise Invalid(
                f"{directory} bears cookie {cookie.cookie}, but bookie {record.bookie_id} is known by {record.cookie}:"
                " mount its own disk, or start this one under a new bookie_id"
            )


def _interrupted(found: Sequence[DiskCookie | None], directories: Sequence[str], bookie_id: str) -> str | None:
    """A first start writes the cookies disk after disk, from the first on; it may have stopped half way, before registering."""
    written = [cookie for cookie in found if cookie is not None]
    if list(found[: len(written)]) != written:
        missing = directories[list(found).index(None)]
        raise Invalid(f"{missing} has no cookie though a later disk of bookie {bookie_id} has one: mount the right disk")
    return written[0].cookie
