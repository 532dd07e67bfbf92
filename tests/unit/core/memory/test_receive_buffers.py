"""Memory for frames: what is kept, and what a frame that is only announced takes."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from stratalog_core.memory.receive_buffers import KEPT_BYTES_MAX, MAPPED_BYTES, ReceiveBuffers, announced_memory


def test_a_very_large_frame_that_is_only_announced_takes_no_memory() -> None:
    assert isinstance(announced_memory(MAPPED_BYTES - 1).obj, bytearray)
    usual = announced_memory(1000)
    assert (len(usual), usual.readonly, usual.format) == (1000, False, "B")
    mapped = announced_memory(MAPPED_BYTES)
    assert isinstance(mapped.obj, mmap.mmap)
    assert len(mapped) == MAPPED_BYTES
    buffers = ReceiveBuffers()
    assert isinstance(buffers.take(MAPPED_BYTES + 1).obj, mmap.mmap)
    assert KEPT_BYTES_MAX >= 2 * MAPPED_BYTES, "two of the largest that are used again can be remembered"


@pytest.mark.parametrize("size", [100, 65_536, 1024 * 1024, KEPT_BYTES_MAX // 2])
def test_none_begins_at_the_beginning_of_a_page(size: int) -> None:
    """To there, some processors copy at a tenth of their speed what a sender has at the beginning of a page."""
    buffers = ReceiveBuffers()
    for memory in (buffers.take(size), buffers.take(size)):
        assert len(memory) == size
        assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 4096 >= 256
