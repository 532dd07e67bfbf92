"""Are the bookies' disks well? Each live bookie is asked itself: metadata knows nothing of damage."""

from __future__ import annotations

from collections.abc import Iterator

from stratalog.health.finding import Finding, fail, ok, warn
from stratalog.hot.asking import ask_live
from stratalog_bookies.protocol.messages import BookieInfo, DiskInfo
from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataView

_CHECK = "disks"


async def check_disks(view: MetadataView) -> list[Finding]:
    """One finding for each thing that is wrong, or one that says that all is well."""
    answers = await ask_live(view)
    findings = [finding for name, answer in answers.items() for finding in _of_bookie(name, answer)]
    disks = sum(len(answer.disks) for answer in answers.values() if isinstance(answer, BookieInfo))
    return findings or [ok(_CHECK, f"{disks} of {len(answers)} bookies, no damage known")]


def _of_bookie(name: str, answer: BookieInfo | StratalogError) -> Iterator[Finding]:
    if isinstance(answer, StratalogError):
        yield fail(_CHECK, f"{name} does not answer: {answer.message}", "see its log, or start it again")
        return
    if answer.keeps_all:
        detail = f"{name} keeps ledgers: {answer.keeps_all}"
        yield fail(_CHECK, detail, "restore the newest copy of this cluster's metadata")
    for disk in answer.disks:
        yield from _of_disk(f"{name}, disk {disk.position}", disk)


def _of_disk(name: str, disk: DiskInfo) -> Iterator[Finding]:
    if disk.state == "failed":
        remedy = "mount or replace the disk and start the bookie again; its ledgers are copied to others meanwhile"
        yield fail(_CHECK, f"{name} failed: {disk.reason}", remedy)
        return
    if disk.damaged_entries or disk.damaged_files:
        detail = f"{name}: {disk.damaged_entries} damaged entries, {disk.damaged_files} broken log files, not mended"
        yield fail(_CHECK, detail, "start the bookies that hold the other copies, then `stratalog bookie scrub --all --wait`")
    if disk.state == "read_only":
        yield fail(_CHECK, f"{name} takes no records: {disk.reason}", "free space there, or add bookies")
    if disk.unmovable_files:
        detail = f"{name}: {disk.unmovable_files} log files cannot be compacted, their space is not given back"
        yield warn(_CHECK, detail, "`stratalog bookie scrub --all --wait` mends what keeps them")
