"""Which bookie a disk belongs to, and whether the mounted disks are those that the cluster knows.

Each disk has a cookie file; the bookie's record in metadata has the same cookie. A known bookie whose disk has no cookie has
lost that disk's entries. It must not start as healthy, because it would answer "no such entry" for acknowledged entries. It
does no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from stratalog_bookies.disk.core.log_format import COOKIE_BYTES
from stratalog_core.errors import Corrupt, Invalid, StratalogError
from stratalog_core.malformed import MALFORMED
from stratalog_metadata.records import Bookie

COOKIE_FILE: Final = "cookie"
FORMAT_VERSION: Final = 1


class DiskCookie(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a disk's cookie file (JSON, human-readable). ``cookie`` identifies the bookie: 32 hexadecimal digits."""

    format_version: int
    cluster_id: str
    bookie_id: str
    cookie: str
    disk: int
    disks: int


def disk_key(cookie: str, disk: int) -> bytes:
    """16 bytes that differ for every disk of every bookie; the seed of the log's checksums."""
    return hashlib.sha256(f"{cookie}/{disk}".encode()).digest()[:COOKIE_BYTES]


def encode_cookie(cookie: DiskCookie) -> bytes:
    return msgspec.json.format(msgspec.json.encode(cookie)) + b"\n"


def decode_cookie(content: bytes, directory: str) -> DiskCookie:
    """Decode a cookie file. Raises ``Corrupt``, or ``Invalid`` for another format version."""
    try:
        cookie = msgspec.json.decode(content, type=DiskCookie)
    except MALFORMED as malformed:
        raise Corrupt(f"the cookie in {directory} cannot be read: {malformed}") from malformed
    if cookie.format_version != FORMAT_VERSION:
        raise Invalid(f"{directory} has format version {cookie.format_version}; this bookie reads version {FORMAT_VERSION}")
    return cookie


class Claim(NamedTuple):
    """The bookie's cookie (None: bookie and disks are new), and why each unusable disk cannot be used."""

    cookie: str | None
    lost: dict[int, str]


FoundCookie = DiskCookie | StratalogError | None
"""A disk's cookie, None if it has none, or why it cannot be read."""


def claim(
    record: Bookie | None, found: Sequence[FoundCookie], *, cluster_id: str, bookie_id: str, directories: Sequence[str]
) -> Claim:
    """Decide which disks belong to the bookie.

    A known bookie starts with the disks that are its own, at least one. On a first start every disk must be right. Raises
    ``Invalid`` with the reason and the remedy.
    """
    lost: dict[int, str] = {}
    for disk, each in enumerate(found):
        try:
            if isinstance(each, StratalogError):
                raise each
            _check_one(record, each, directories[disk], cluster_id, bookie_id, disk, len(found))
        except StratalogError as wrong:
            if record is None:
                raise
            lost[disk] = wrong.message
    if record is not None and len(lost) == len(found):
        raise Invalid("; ".join(lost.values()))
    if record is not None:
        return Claim(record.cookie, lost)
    cookies = [each for each in found if not isinstance(each, StratalogError)]
    return Claim(check_disks(None, cookies, cluster_id=cluster_id, bookie_id=bookie_id, directories=directories), {})


def _check_one(
    record: Bookie | None, cookie: DiskCookie | None, directory: str, cluster_id: str, bookie_id: str, disk: int, disks: int
) -> None:
    if cookie is not None:
        _check_owner(cookie, directory, cluster_id, bookie_id, disk, disks)
    if record is not None:
        _check_known(record, (cookie,), (directory,))


def check_disks(
    record: Bookie | None, found: Sequence[DiskCookie | None], *, cluster_id: str, bookie_id: str, directories: Sequence[str]
) -> str | None:
    """The bookie's cookie if all disks are those that the cluster knows; None if bookie and disks are new.

    Raises ``Invalid`` with the reason and the remedy.
    """
    for disk, (cookie, directory) in enumerate(zip(found, directories, strict=True)):
        if cookie is not None:
            _check_owner(cookie, directory, cluster_id, bookie_id, disk, len(found))
    cookies = {cookie.cookie for cookie in found if cookie is not None}
    if len(cookies) > 1:
        raise Invalid(f"the disks of bookie {bookie_id} have different cookies: they were not set up together")
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
            raise Invalid(
                f"{directory} belongs to {what} {has!r}, not {expected!r}: mount the right disk or correct the settings"
            )


def _check_known(record: Bookie, found: Sequence[DiskCookie | None], directories: Sequence[str]) -> None:
    for cookie, directory in zip(found, directories, strict=True):
        if cookie is None:
            raise Invalid(
                f"{directory} is empty, but the cluster knows bookie {record.bookie_id} and what it stored: mount its disk, or"
                " start an empty disk under a new bookie_id and have the old one's ledgers replicated again"
            )
        if cookie.cookie != record.cookie:
            raise Invalid(
                f"{directory} has cookie {cookie.cookie}, but bookie {record.bookie_id} has {record.cookie}:"
                " mount its own disk, or start this one under a new bookie_id"
            )


def _interrupted(found: Sequence[DiskCookie | None], directories: Sequence[str], bookie_id: str) -> str | None:
    """The cookie of an interrupted first start, which writes the disks in order and registers last. Raises ``Invalid``."""
    written = [cookie for cookie in found if cookie is not None]
    if list(found[: len(written)]) != written:
        missing = directories[list(found).index(None)]
        raise Invalid(f"{missing} has no cookie though a later disk of bookie {bookie_id} has one: mount the right disk")
    return written[0].cookie
