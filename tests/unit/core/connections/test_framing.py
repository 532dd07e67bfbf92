"""Frames and errors on the wire between our own processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.connections import framing
from stratalog_core.errors import (
    Corrupt,
    LedgerFenced,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Retriable,
    StratalogError,
    Unavailable,
    error_from_wire,
)

KINDS = (NotLeader, LedgerFenced, OutcomeUnknown, StratalogError)
texts = st.text(max_size=20)
values = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts | st.lists(st.integers(0, 9), max_size=3)


@given(st.sampled_from([framing.REQUEST, framing.REPLY, framing.ERROR]), st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1))
def test_headers_come_back(kind: int, method: int, correlation: int) -> None:
    header = framing.pack_header(kind, method, correlation, 5)
    assert framing.unpack_header(b"..." + header + b"12345", 3) == (framing.HEADER_BYTES + 5, kind, method, correlation)


@pytest.mark.parametrize("length", [0, 11, framing.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_lengths_outside_the_limits_are_refused(length: int) -> None:
    with pytest.raises(Corrupt, match="outside 12"):
        framing.unpack_header(length.to_bytes(4, "big") + framing.pack_header(framing.REQUEST, 1, 2, 0)[4:])


def test_another_version_or_kind_is_refused() -> None:
    frame = bytearray(framing.pack_header(framing.REQUEST, 1, 2, 0))
    frame[5] = 2
    with pytest.raises(Corrupt, match="version 2"):
        framing.unpack_header(frame)
    with pytest.raises(Corrupt, match="kind 3"):
        framing.unpack_header(framing.pack_header(3, 1, 2, 0))


@given(
    st.sampled_from([NotLeader, LedgerFenced, OutcomeUnknown, StratalogError]),
    texts,
    st.dictionaries(texts, values, max_size=3),
)
def test_errors_come_back_with_their_class_and_detail(
    kind: type[StratalogError], message: str, detail: dict[str, object]
) -> None:
    detail.pop("message", None)
    detail.pop("self", None)
    found = framing.decode_error(framing.encode_error(kind(message, **detail)))
    assert type(found) is kind
    assert (found.message, found.detail) == (message or kind.code, detail)


def test_a_class_without_a_code_travels_as_what_it_is_a_kind_of() -> None:
    class OverloadedTwice(Overloaded):
        pass

    assert type(framing.decode_error(framing.encode_error(OverloadedTwice("wait")))) is Overloaded


def test_an_unknown_code_becomes_a_plain_error_and_noise_is_corrupt() -> None:
    found = error_from_wire("from_the_future", "text", {"a": 1})
    assert type(found) is StratalogError
    assert isinstance(framing.decode_error(b"\xc1noise"), Corrupt)


def test_classes_say_what_the_caller_must_do() -> None:
    assert issubclass(Unavailable, Retriable)
    assert not issubclass(OutcomeUnknown, Retriable)
    assert str(Unavailable()) == "unavailable"
