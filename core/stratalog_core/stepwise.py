"""Decodes large msgpack maps in steps, so that the decoding thread never holds the interpreter's lock for long.

One call into the decoder holds the interpreter's lock until it returns: 20 ms for a segment footer with 10,000 producers, 45
for a manifest page with 16,384 segments. The event loop's thread cannot run meanwhile. Locating the elements of an array takes
2 or 3 ms; then each element is decoded by a call of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from stratalog_core.ports import Buffer

AT_ONCE_BYTES: Final = 64 * 1024
"""Bodies up to this size are decoded in one call, and on the event loop: about 2 ms."""
Kind = TypeVar("Kind", bound=msgspec.Struct)
_EMPTY: Final = msgspec.Raw(msgspec.msgpack.encode([]))


def decode_map(body: Buffer, kind: type[Kind], elements: Mapping[str, type[Any]]) -> Kind:
    """Decode ``body`` as ``kind``. The fields in ``elements`` are tuples; they are decoded element by element if ``body`` is
    large.

    Raises what ``msgspec`` raises.
    """
    if len(body) <= AT_ONCE_BYTES:
        return msgspec.msgpack.decode(body, type=kind)
    fields = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])
    decoded: dict[str, tuple[Any, ...]] = {}
    for name, element in elements.items():
        if name in fields:
            decode = msgspec.msgpack.Decoder(element).decode
            # An interpreted loop, not map(): other threads can run only between its steps.
            decoded[name] = tuple([decode(each) for each in msgspec.msgpack.decode(fields[name], type=list[msgspec.Raw])])
            fields[name] = _EMPTY
    return msgspec.structs.replace(msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind), **decoded)
