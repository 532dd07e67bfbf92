"""Starts scrubs in bookies and follows their progress and results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from stratalog.hot.report import Row
from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.messages import DiskScrub, ScrubDisks, ScrubStatus
from stratalog_core.errors import NotFound, Unavailable
from stratalog_core.ports import Transport
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, bookie_key

_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.2

OnProgress = Callable[[int, int], None]
"""Called with the bytes checked and the total bytes."""


class BookieScrub:
    """The scrubs of one bookie's disks."""

    def __init__(self, transport: Transport, bookie: Bookie) -> None:
        self.name = bookie.bookie_id
        self._channel = transport.channel(bookie.address)
        self.disks: tuple[DiskScrub, ...] = ()

    async def ask(self, *, start: bool = False) -> None:
        """Read the state of the scrubs, after starting them if ``start``.

        Raises the bookie's error, or ``Unavailable``, also if the bookie has restarted since its scrubs began.
        """
        body = messages.encode(ScrubDisks(start=start))
        answer = await self._channel.call(messages.SCRUB, (body,), _TIMEOUT_S)
        before, self.disks = self.disks, messages.decode(ScrubStatus, answer).disks
        numbers = {disk.position: disk.number for disk in self.disks}
        # A disk that does not work any more after a restart is not listed.
        if any(numbers.get(disk.position, -1) < disk.number for disk in before):
            raise Unavailable(f"bookie {self.name} restarted during its scrub: start the scrub again")

    @property
    def is_finished(self) -> bool:
        """Whether everything is checked, and repair of all corruption has been tried."""
        return not any(disk.running or disk.untried_entries for disk in self.disks)

    @property
    def is_whole(self) -> bool:
        return not any(disk.waiting_entries or disk.broken_files for disk in self.disks)

    def unchecked(self) -> list[str]:
        """Return a sentence for each disk of which not everything was checked."""
        return [
            f"{self.name}, disk {disk.position} was not checked completely: {disk.unchecked}"
            for disk in self.disks
            if disk.unchecked
        ]

    def rows(self) -> list[Row]:
        """Return one row per disk. ``unhealable`` counts corrupt entries without a good copy elsewhere."""
        return [
            {
                "bookie": self.name,
                "disk": disk.position,
                "state": _state(disk),
                "checked_bytes": disk.checked_bytes,
                "total_bytes": disk.total_bytes,
                "entries": disk.checked_entries,
                "damaged": disk.damaged_entries,
                "healed": disk.healed_entries,
                "unhealable": disk.waiting_entries - disk.untried_entries,
                "broken_files": disk.broken_files,
                "repaired_files": disk.repaired_files,
                "examples": list(disk.examples),
                "unchecked": disk.unchecked,
            }
            for disk in self.disks
        ]


def _state(disk: DiskScrub) -> str:
    if disk.running:
        return "running"
    if not disk.number:
        return "never"
    return "incomplete" if disk.unchecked else "finished"


def bookies_to_scrub(view: MetadataView, name: str | None) -> list[Bookie]:
    """Return the bookie of this name, or all live bookies. Raises ``NotFound``, or ``Unavailable`` if none is live."""
    if name is None:
        live = [each for each in view.all(Bookie) if each.session_id]
        if not live:
            raise Unavailable("no bookie is live: see `stratalog bookie list`")
        return live
    found = view.find(Bookie, bookie_key(name))
    if found is None:
        raise NotFound(f"no bookie {name!r}: see `stratalog bookie list`")
    if not found.session_id:
        raise Unavailable(f"bookie {name} is down: start it first")
    return [found]


async def follow(scrubs: Sequence[BookieScrub], on_progress: OnProgress) -> None:
    """Return when all scrubs are finished. Raises a bookie's error, or ``Unavailable``."""
    while True:
        disks = [disk for scrub in scrubs for disk in scrub.disks]
        on_progress(sum(disk.checked_bytes for disk in disks), sum(disk.total_bytes for disk in disks))
        unfinished = [scrub for scrub in scrubs if not scrub.is_finished]
        if not unfinished:
            return
        await asyncio.sleep(_POLL_S)
        await asyncio.gather(*(scrub.ask() for scrub in unfinished))
