"""Cookies: which disks a bookie may start with."""

from __future__ import annotations

import pytest

from stratalog_bookies.disk.core.cookie import DiskCookie, check_disks, decode_cookie, disk_key, encode_cookie
from stratalog_core.errors import Corrupt, Invalid
from stratalog_metadata.records import Bookie

COOKIE = "ab" * 16


def cookie(disk: int = 0, disks: int = 2, cookie: str = COOKIE, bookie_id: str = "b1", cluster_id: str = "c1") -> DiskCookie:
    return DiskCookie(format_version=1, cluster_id=cluster_id, bookie_id=bookie_id, cookie=cookie, disk=disk, disks=disks)


def check(known: str | None, *found: DiskCookie | None) -> str | None:
    record = None if known is None else Bookie(bookie_id="b1", address="h:1", cookie=known)
    return check_disks(record, found, cluster_id="c1", bookie_id="b1", directories=[f"/d{disk}" for disk in range(len(found))])


def test_a_new_bookie_has_new_disks() -> None:
    assert check(None, None, None) is None


def test_a_known_bookie_has_all_its_disks() -> None:
    assert check(COOKIE, cookie(0), cookie(1)) == COOKIE


def test_a_first_start_that_was_interrupted_goes_on() -> None:
    assert check(None, cookie(0), None) == COOKIE
    assert check(None, cookie(0), cookie(1)) == COOKIE
    with pytest.raises(Invalid, match="/d0 has no cookie though"):
        check(None, None, cookie(1))


@pytest.mark.parametrize(
    ("known", "found", "message"),
    [
        (COOKIE, (None, None), "/d0 is empty, but the cluster knows bookie b1"),
        (COOKIE, (cookie(0), None), "/d1 is empty, but the cluster knows bookie b1"),
        (COOKIE, (cookie(0, cookie="cd" * 16), cookie(1, cookie="cd" * 16)), "but bookie b1 has"),
        (COOKIE, (cookie(0), cookie(1, cookie="cd" * 16)), "have different cookies"),
        (COOKIE, (cookie(1), cookie(0)), "place in data_dirs"),
        (COOKIE, (cookie(0, disks=1), cookie(1)), "number of disks"),
        (COOKIE, (cookie(0, bookie_id="b2"), cookie(1)), "belongs to bookie 'b2', not 'b1'"),
        (None, (cookie(0, cluster_id="c2"), None), "belongs to cluster 'c2', not 'c1'"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    known: str | None, found: tuple[DiskCookie | None, ...], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        check(known, *found)


def test_cookie_files_come_back_as_they_were() -> None:
    assert decode_cookie(encode_cookie(cookie()), "/d0") == cookie()
    with pytest.raises(Corrupt, match="the cookie in /d0 cannot be read"):
        decode_cookie(b"{", "/d0")
    with pytest.raises(Invalid, match="format version 2"):
        decode_cookie(encode_cookie(cookie()).replace(b'"format_version": 1', b'"format_version": 2'), "/d0")


def test_every_disk_has_a_key_of_its_own() -> None:
    assert len({disk_key(COOKIE, 0), disk_key(COOKIE, 1), disk_key("cd" * 16, 0)}) == 3
