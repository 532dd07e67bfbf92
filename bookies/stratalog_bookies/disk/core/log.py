"""The write end of a disk's log: where each frame goes, and which frames are written together.

A frame is placed when it arrives, after the last one, in the group that is filling. The shell takes a group, writes it with one
``pwritev`` from the received buffers, syncs, and reports it; meanwhile the next group fills. Invariants:

- Groups are taken, and become durable, in order and one at a time. A group is in one file.
- A group begins where the previous one ends, so everything before it is durable when it is written.
- The write of a group is padded with zeros to the end of a page, and the next group begins inside that page. The page is thus
  written whole the first time, and a recycled file is never read before it is overwritten.

It knows nothing of entries and ledgers, does no I/O, and never rolls to a file that the shell has not prepared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stratalog_bookies.disk.core import log_format
from stratalog_bookies.disk.core.log_format import ControlItem
from stratalog_core.ports import Buffer

_ZEROS: Final = bytes(log_format.PAGE_BYTES)
GROUP_BUFFERS_MAX: Final = 64 * 1024
"""Maximum number of buffers in one write. A group with more is closed and the next one begun."""


class Write(NamedTuple):
    """Write ``buffers`` at ``position`` of the file, sync it, then call ``Log.written``."""

    sequence: int
    generation: int
    position: int
    buffers: list[Buffer]


@dataclass(slots=True)
class _Group:
    sequence: int
    generation: int
    start: int
    end: int
    buffers: list[Buffer] = field(default_factory=list)


class Log:
    """Tail of one disk's log. ``sequence`` numbers groups from 1; 0 means that there is nothing to wait for."""

    def __init__(self, cookie: bytes, generation: int, file_bytes: int) -> None:
        self.generation = generation
        self.tail = log_format.FIRST_FRAME
        self.sequence = 0
        self.durable_sequence = 0
        self.durable_generation = generation
        self.durable_position = log_format.FIRST_FRAME
        self.prepared_generation = generation
        self._cookie = cookie
        self._file_bytes = file_bytes
        self._seed = log_format.frame_seed(cookie, generation)
        self._filling: _Group | None = None
        self._closed: deque[_Group] = deque()
        self._writing: _Group | None = None
        self.append_control((ControlItem(log_format.FILE_START, 0, 0),))

    @property
    def has_next_file(self) -> bool:
        return self.prepared_generation > self.generation

    @property
    def writing(self) -> int | None:
        """Sequence of the group that is being written; None if there is none."""
        return None if self._writing is None else self._writing.sequence

    @property
    def room(self) -> int:
        """Bytes left for frames in the current file."""
        return self._file_bytes - self.tail

    def takes(self, frame_bytes: int) -> bool:
        """Whether frames of this many bytes, less than a file holds, can be placed now."""
        return frame_bytes <= self.room or self.has_next_file

    def append(self, kind: int, count: int, head: Buffer, payload: tuple[Buffer, ...], payload_bytes: int) -> int:
        """Place a frame that fits into ``room``; returns its payload's position. The buffers must not change afterwards."""
        group = self._filling or self._begin_group()
        position = self.tail
        header = log_format.pack_frame(self._seed, kind, count, position, group.start, head, payload_bytes)
        payload_end = position + log_format.FRAME_BYTES + len(head) + payload_bytes
        end = log_format.aligned(payload_end)
        assert end <= self._file_bytes, "a frame fits into one file"
        buffers = group.buffers
        buffers += (header, head, *payload)
        if end != payload_end:
            buffers.append(_ZEROS[: end - payload_end])
        self.tail = group.end = end
        if len(buffers) > GROUP_BUFFERS_MAX:
            self._close_group()
        return payload_end - payload_bytes

    def append_control(self, items: tuple[ControlItem, ...]) -> None:
        """Place control items in a frame that fits into ``room``."""
        self.append(log_format.CONTROL, len(items), log_format.pack_items(items), (), 0)

    def roll(self) -> None:
        """Continue in the next file, which must be prepared."""
        assert self.has_next_file, "a file is prepared before it is needed"
        self._close_group()
        previous_end = self.tail
        self.generation += 1
        self.tail = log_format.FIRST_FRAME
        self._seed = log_format.frame_seed(self._cookie, self.generation)
        self.append_control((ControlItem(log_format.FILE_START, 0, previous_end),))

    def take(self) -> Write | None:
        """The next group to write; None if there is none or one is being written."""
        if self._writing is not None:
            return None
        if not self._closed:
            self._close_group()
        if not self._closed:
            return None
        group = self._writing = self._closed.popleft()
        padding = min(-group.end % log_format.PAGE_BYTES, self._file_bytes - group.end)
        if padding:
            group.buffers.append(_ZEROS[:padding])
        return Write(group.sequence, group.generation, group.start, group.buffers)

    def written(self, sequence: int) -> None:
        """Mark the group that was taken as durable."""
        group, self._writing = self._writing, None
        assert group is not None, "a group is written before it is durable"
        assert group.sequence == sequence == self.durable_sequence + 1, "groups become durable in order"
        self.durable_sequence = sequence
        self.durable_generation = group.generation
        self.durable_position = group.end

    def is_durable(self, generation: int, position: int) -> bool:
        """Whether the frame at ``position`` is durable."""
        if generation == self.durable_generation:
            return position <= self.durable_position
        return generation < self.durable_generation

    def validate_state(self) -> None:
        """Assert the invariants. O(1): called before every write of a group."""
        assert self.durable_sequence <= self.sequence, "a group is placed before it is durable"
        assert self.durable_generation <= self.generation <= self.prepared_generation, "files are prepared, then written"
        group = self._writing
        if group is not None:
            follows = group.generation == self.durable_generation
            assert group.sequence == self.durable_sequence + 1, "groups are written in order"
            assert group.start == (self.durable_position if follows else log_format.FIRST_FRAME), "groups are contiguous"
            assert group.start < group.end <= self._file_bytes, "a group is in one file"

    def _begin_group(self) -> _Group:
        self.sequence += 1
        self._filling = _Group(self.sequence, self.generation, self.tail, self.tail)
        return self._filling

    def _close_group(self) -> None:
        if self._filling is not None:
            self._closed.append(self._filling)
            self._filling = None
