"""Frames cut from a stream however it arrives, and memory that is used again only when nobody sees it any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.connections import framing
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.rpc.frame_protocol import FrameProtocol

_MIB = 1024 * 1024


class Receiver(FrameProtocol):
    """Keeps views of the frames whose numbers are in ``keeps``, and a copy of each as it was when it came."""

    first_buffer_bytes = 10_000
    read_buffer_bytes = 40_000
    copied_bytes_max = 64

    def __init__(self, buffers: ReceiveBuffers, keeps: frozenset[int]) -> None:
        super().__init__(buffers)
        self.keeps = keeps
        self.kept: dict[int, memoryview] = {}
        self.copies: list[bytes] = []

    def frame_received(self, kind: int, method: int, correlation: int, body: memoryview) -> None:
        if len(self.copies) in self.keeps:
            self.kept[len(self.copies)] = body
        self.copies.append(framing.pack_header(kind, method, correlation, len(body)) + bytes(body))


@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 5000), st.integers(30_000, 70_000)), max_size=12),
    reads=st.lists(st.sampled_from([1, 3, 100, 9000, 30_000, 65_536]), min_size=1, max_size=8),
    keeps=st.frozensets(st.integers(0, 11)),
)
async def test_frames_are_as_they_were_sent_and_stay_so(sizes: list[int], reads: list[int], keeps: frozenset[int]) -> None:
    frames = [
        framing.pack_header(framing.REQUEST, 1, number, size) + bytes([number]) * size for number, size in enumerate(sizes)
    ]
    buffers = ReceiveBuffers(400_000)
    receivers = [Receiver(buffers, keeps), Receiver(buffers, frozenset())]
    stream = memoryview(b"".join(frames))
    position = turn = 0
    while position < len(stream):
        rooms = [receiver.get_buffer(-1) for receiver in receivers]
        taken = min(*map(len, rooms), max(reads[turn % len(reads)], len(stream) // 50), len(stream) - position)
        assert taken, "a buffer without room would end the connection"
        for receiver, room in zip(receivers, rooms, strict=True):
            room[:taken] = stream[position : position + taken]
            room.release()
            receiver.buffer_updated(taken)
        position += taken
        turn += 1
    for receiver in receivers:
        assert receiver.copies == frames
    assert {number: bytes(view) for number, view in receivers[0].kept.items()} == {
        number: frame[framing.HEADER_BYTES :] for number, frame in enumerate(frames) if number in keeps
    }


def test_a_buffer_is_taken_again_when_its_last_view_is_gone() -> None:
    buffers = ReceiveBuffers()
    first = buffers.take(_MIB)
    owner = first.obj
    part = first[10:20]
    first.release()
    other = buffers.take(_MIB)
    assert other.obj is not owner, "a view of the first is left"
    part.release()
    assert buffers.take(_MIB).obj is owner


def test_buffers_are_taken_again_only_for_about_their_size() -> None:
    buffers = ReceiveBuffers()
    owner = buffers.take(_MIB).obj
    assert len(buffers.take(1000)) == 1000
    assert buffers.take(1000).obj is not owner
    assert buffers.take(2 * _MIB).obj is not owner
    assert buffers.take(_MIB - 100_000).obj is owner


def test_what_is_kept_is_bounded() -> None:
    buffers = ReceiveBuffers(4 * _MIB)
    views = [buffers.take(_MIB) for _ in range(10)]
    owners = {id(view.obj) for view in views[-4:]}
    views.clear()
    again = [buffers.take(_MIB) for _ in range(4)]
    assert {id(view.obj) for view in again} == owners
    huge = buffers.take(3 * _MIB).obj
    assert buffers.take(3 * _MIB).obj is not huge


async def test_frames_of_the_same_size_lie_together_once_one_has_come() -> None:
    """A read each would be a call into the interpreter each, and what is read before a size is known is copied."""
    assert reads_of(40, 8000) <= 2 + 40 / 4, "four frames fit into a buffer"


async def test_what_comes_at_once_is_read_at_once() -> None:
    """Small frames that fill the first buffer come in a larger one from then on."""
    assert reads_of(60, 2000) <= 2 + 60 / 18, "nineteen frames fit into a buffer"


async def test_a_large_frame_takes_one_read() -> None:
    """Which brings the head of the next one, and so its size."""
    assert reads_of(10, 100_000) <= 1 + 10


def reads_of(frames: int, size: int) -> int:
    """How often a socket is read that always holds all that is to come."""
    receiver = Receiver(ReceiveBuffers(), frozenset())
    stream = memoryview(b"".join(framing.pack_header(framing.REQUEST, 1, 0, size) + bytes(size) for _ in range(frames)))
    position = reads = 0
    while position < len(stream):
        room = receiver.get_buffer(-1)
        taken = min(len(room), len(stream) - position)
        room[:taken] = stream[position : position + taken]
        room.release()
        receiver.buffer_updated(taken)
        position, reads = position + taken, reads + 1
    assert len(receiver.copies) == frames
    return reads
