"""Checks the bookies' disks. Asks each live bookie, because metadata does not know of corruption."""

from __future__ import annotations

from collections.abc import Iterator

from stratalog.health.finding import Finding, fail, ok, warn
from stratalog.hot.asking import ask_live
from stratalog_bookies.protocol.messages import BookieInfo, DiskInfo
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView

_CHECK = "disks"


async def check_disks(view: MetadataView) -> list[Finding]:
    """Return one finding per problem, or a single OK finding."""
    answers = await ask_live(view)
    findings = [finding for name, answer in answers.items() for finding in _of_bookie(name, answer)]
    disks = sum(len(answer.disks) for answer in answers.values() if isinstance(answer, BookieInfo))
    return findings or [ok(_CHECK, f"{disks} disks of {len(answers)} bookies, no known corruption")]


def _of_bookie(name: str, answer: BookieInfo | StratalogError) -> Iterator[Finding]:
    if isinstance(answer, StratalogError):
        yield fail(_CHECK, f"{name} does not answer: {answer.message}", "see its log, or restart it")
        return
    if answer.keeps_all:
        detail = f"{name} deletes no ledgers: {answer.keeps_all}"
        yield fail(_CHECK, detail, "restore the newest copy of this cluster's metadata")
    for disk in answer.disks:
        yield from _of_disk(f"{name}, disk {disk.position}", disk)


def _of_disk(name: str, disk: DiskInfo) -> Iterator[Finding]:
    if disk.state == "failed":
        remedy = (
            "if the disk still has its data, mount it and restart the bookie; else start a bookie with a new bookie_id on empty"
            " disks, and decommission this one. Meanwhile its ledgers are copied to others"
        )
        yield fail(_CHECK, f"{name} failed: {disk.reason}", remedy)
        return
    if disk.damaged_entries or disk.damaged_files:
        detail = f"{name}: {disk.damaged_entries} corrupt entries and {disk.damaged_files} corrupt log files are not repaired"
        yield fail(_CHECK, detail, "start the bookies that hold the other copies, then `stratalog bookie scrub --all --wait`")
    if disk.state == "read_only":
        remedy = "free space there, look after a disk that hangs, or add bookies"
        yield fail(_CHECK, f"{name} accepts no records: {disk.reason}", remedy)
    if disk.unmovable_files:
        detail = f"{name}: {disk.unmovable_files} log files cannot be compacted, and their space is not freed"
        yield warn(_CHECK, detail, "run `stratalog bookie scrub --all --wait` to repair their corrupt entries")
