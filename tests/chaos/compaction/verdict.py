"""Checks what compaction left: the last record of each key, and the offsets that readers passed over.

An unknown send may have taken effect or not, at any time after it was begun. The rules:

- each record is what was sent under its key, at the offset where it was acknowledged, and of no aborted transaction;
- the newest record of a key is the last acknowledged one, or an unknown one after it;
- a key may have no record only if a tombstone of it may be its newest record, or the topic expired it;
- a reader passes over a record only if a newer one of its key had been sent by then, it is a tombstone, or it expired;
- after everything was compacted each key has one record at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from chaos.compaction.readings import Gap, Seen
from chaos.compaction.sends import Place, Send, by_key
from chaos.outcomes import State

Starts = Mapping[Place, int]
"""The first offset of each partition; records below it have expired."""


def wrong_identities(sends: Sequence[Send], records: Mapping[tuple[Place, int], Seen]) -> Iterator[str]:
    """Yield the records that are not what was sent there, in any reading."""
    for (place, offset), seen in records.items():
        name = f"{place[0]}-{place[1]}@{offset}"
        send = sends[seen.number] if 0 <= seen.number < len(sends) else None
        if send is None or send.place != place or send.key != seen.key:
            yield f"{name} holds number {seen.number} under {seen.key!r}, which was never sent there"
        elif send.value != seen.value:
            yield f"{name} holds other bytes than number {seen.number}"
        elif send.state is State.ABORTED:
            yield f"{name} holds number {seen.number} of an aborted transaction"
    for send in sends:
        there = records.get((send.place, send.offset)) if send.offset is not None else None
        if send.state is State.COMMITTED and there is not None and there.number != send.number:
            name = f"{send.place[0]}-{send.place[1]}@{send.offset}"
            yield f"{name} holds number {there.number}; {send.number} was acknowledged there"


def wrong_last_records(
    sends: Sequence[Send], records: Mapping[Place, Sequence[Seen]], starts: Starts, *, is_compacted: bool, is_quick: bool
) -> Iterator[str]:
    """Yield the keys whose newest record in one reading of everything is not their last one.

    ``is_compacted``: everything had been compacted before. ``is_quick``: the reading was shorter than the time for which
    tombstones are kept. A slower one may have got a record and not the tombstone that deletes it.
    """
    found = defaultdict[tuple[Place, bytes | None], list[Seen]](list)
    for place, seen in _all(records):
        found[place, seen.key].append(seen)
    for (place, key), sent in by_key(sends).items():
        present = found[place, key]
        name = f"{key.decode()} in {place[0]}-{place[1]}"
        if is_compacted and len(present) > 1:
            yield f"{name} has {len(present)} records after a compaction: offsets {[seen.offset for seen in present]}"
        problem = _wrong_last(sent, present[-1] if present else None, sends, starts.get(place, 0), is_quick)
        if problem:
            yield f"{name}: {problem}"


def _all(records: Mapping[Place, Sequence[Seen]]) -> Iterator[tuple[Place, Seen]]:
    for place, seens in records.items():
        for seen in seens:
            yield place, seen


def _wrong_last(sent: Sequence[Send], newest: Seen | None, sends: Sequence[Send], start: int, is_quick: bool) -> str:
    """Return what is wrong with the newest record of a key, or an empty string."""
    last = max(_acknowledged(sent), key=_offset_of, default=None)
    if last is None:
        return ""
    last_offset = _offset_of(last)
    told = f"the last acknowledged record is {_told(last)}"
    if newest is None:
        is_deletion_possible = last.is_tombstone or any(send.is_tombstone and send.state is State.UNKNOWN for send in sent)
        return "" if is_deletion_possible or last_offset < start else f"no record is left; {told}"
    if newest.offset < last_offset:
        if last.is_tombstone and not is_quick:
            return ""
        return f"number {newest.number} at {newest.offset} is the newest; {told}"
    is_unknown = 0 <= newest.number < len(sends) and sends[newest.number].state is State.UNKNOWN
    if newest.offset > last_offset and not is_unknown:
        return f"number {newest.number} at {newest.offset} is the newest and was acknowledged elsewhere; {told}"
    return ""


def _acknowledged(sent: Iterable[Send]) -> Iterator[Send]:
    return (send for send in sent if send.state is State.COMMITTED and send.offset is not None)


def _offset_of(send: Send) -> int:
    assert send.offset is not None
    return send.offset


def _told(send: Send) -> str:
    return f"number {send.number} at {send.offset}{', a tombstone' if send.is_tombstone else ''}"


class Passed:
    """Acknowledged records that readers passed over."""

    def __init__(self, sends: Sequence[Send]) -> None:
        self._offsets: dict[Place, list[tuple[int, Send]]] = defaultdict(list)
        self._superseded_s: dict[int, float] = {}
        """By number, when the first record of its key was begun that may have taken effect after it."""
        for send in _acknowledged(sends):
            self._offsets[send.place].append((_offset_of(send), send))
        for offsets in self._offsets.values():
            offsets.sort(key=lambda pair: pair[0])
        for sent in by_key(sends).values():
            following_s = min((send.invoked_s for send in sent if send.state is State.UNKNOWN), default=inf)
            for send in reversed(sent):
                self._superseded_s[send.number] = following_s
                if send.state is not State.ABORTED:
                    following_s = min(following_s, send.invoked_s)

    def within(self, gap: Gap) -> Iterator[Send]:
        """Yield the acknowledged records in the gap."""
        offsets = self._offsets.get(gap.place, [])
        first = bisect_left(offsets, gap.before + 1, key=lambda pair: pair[0])
        for offset, send in offsets[first:]:
            if offset >= gap.after:
                return
            yield send

    def is_superseded(self, send: Send, moment_s: float) -> bool:
        """Return whether a record of the key had been begun by then that may have taken effect after this one."""
        return self._superseded_s[send.number] <= moment_s

    def wrong(self, gaps: Iterable[Gap], starts: Starts) -> Iterator[str]:
        """Yield the records that a reader passed over and should have got."""
        for gap in gaps:
            for send in self.within(gap):
                is_expired = _offset_of(send) < starts.get(gap.place, 0)
                if not (is_expired or send.is_tombstone or self.is_superseded(send, gap.moment_s)):
                    name = f"{gap.place[0]}-{gap.place[1]}"
                    yield f"{name}: a reader came from {gap.before} to {gap.after}, without {_told(send)}"

    def compacted(self, gaps: Iterable[Gap]) -> Counter[Place]:
        """Return by place how many records readers found compacted away, while newer ones of their keys were there."""
        gone = {send.number: send for gap in gaps for send in self.within(gap) if self.is_superseded(send, gap.moment_s)}
        return Counter(send.place for send in gone.values())
