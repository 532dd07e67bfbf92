"""Real size of views: the memory that they keep alive, not the bytes that they show.

A view of 170 bytes of a 64 KiB receive buffer keeps 64 KiB. Caches and queues with a memory bound count the sizes computed
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stratalog_core.ports import Buffer

VIEW_BYTES: Final = 256
"""Size of a memoryview in a list: the object (184 bytes and 16 of the garbage collector), its slot, and the list's growth."""
COPY_BYTES: Final = 96
"""Size of a ``bytes`` object in a list, without its content."""
FRAME_BYTES: Final = 320
"""Size of a receive buffer without its content: the ``bytearray``, its export to views, and the allocator's header."""


def retained_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of memory that these buffers keep alive. A buffer behind several views is counted once."""
    frames: dict[int, int] = {}
    total = 0
    for buffer in buffers:
        if isinstance(buffer, memoryview):
            total += VIEW_BYTES
            frames[id(buffer.obj)] = frame_bytes(buffer)
        else:
            total += COPY_BYTES + len(buffer)
    return total + sum(frames.values())


def frame_bytes(view: memoryview) -> int:
    """Return the bytes of memory of the whole object behind ``view``."""
    return FRAME_BYTES + len(view.obj)  # type: ignore[arg-type]
