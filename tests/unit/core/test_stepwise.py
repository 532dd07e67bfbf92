"""Decoding in steps gives what decoding at once gives, and makes no long call into the decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core import stepwise
from stratalog_core.stepwise import decode_map


class Part(msgspec.Struct, frozen=True, array_like=True):
    number: int
    content: bytes = b""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parts: tuple[Part, ...]
    others: tuple[Part, ...] = ()


ELEMENTS: dict[str, type[Any]] = {"parts": Part, "others": Part, "absent": Part}
parts = st.lists(st.builds(Part, st.integers(0, 1 << 40), st.binary(max_size=9)), max_size=20).map(tuple)


@given(st.text(max_size=5), parts, parts)
def test_steps_give_what_one_call_gives(name: str, first: tuple[Part, ...], second: tuple[Part, ...]) -> None:
    whole = Whole(name=name, parts=first, others=second)
    body = msgspec.msgpack.encode(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepwise, "AT_ONCE_BYTES", 0)
        assert decode_map(body, Whole, ELEMENTS) == whole
        assert decode_map(memoryview(body), Whole, {}) == whole


@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=6), st.none()).map(msgspec.msgpack.encode))
def test_malformed_bytes_raise_what_one_call_raises(body: bytes) -> None:
    for at_once_bytes in (0, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stepwise, "AT_ONCE_BYTES", at_once_bytes)
            with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
                decode_map(body, Whole, ELEMENTS)


def test_each_element_of_a_large_map_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Whole(name="large", parts=tuple(Part(number, bytes(20)) for number in range(10_000)))
    body = msgspec.msgpack.encode(whole)
    assert len(body) > stepwise.AT_ONCE_BYTES
    steps: list[int] = []

    made = msgspec.msgpack.Decoder

    class Counting:
        def __init__(self, kind: type[Any]) -> None:
            self._decoder = made(kind)

        def decode(self, content: Any) -> Any:
            steps.append(len(memoryview(content)))
            return self._decoder.decode(content)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", Counting)
    assert decode_map(body, Whole, {"parts": Part}) == whole
    assert len(steps) == 10_000
    assert max(steps) < 40
