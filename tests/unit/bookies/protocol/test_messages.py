"""Messages to a bookie: round trips, bounds, and answers to malformed bodies."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from stratalog_bookies.protocol import messages
from stratalog_bookies.protocol.ids import ID_MAX
from stratalog_bookies.protocol.messages import EntryState, Range, Status
from stratalog_core.errors import Invalid

ENTRY = st.tuples(st.integers(0, ID_MAX), st.integers(0, ID_MAX), st.integers(-1, 2**62), st.binary(max_size=300))


def joined(parts: list[bytes | bytearray | memoryview]) -> memoryview:
    return memoryview(b"".join(parts))


@given(entries=st.lists(ENTRY, max_size=20), flags=st.integers(0, 1))
def test_adds_come_back_as_they_were(entries: list[tuple[int, int, int, bytes]], flags: int) -> None:
    headers = [messages.pack_entry(ledger, entry, lac, (payload,), flags) for ledger, entry, lac, payload in entries]
    body = joined(messages.encode_add(headers, [payload for *_, payload in entries]))
    at = messages.payloads_start(len(entries))
    for (ledger, entry, lac, payload), header in zip(entries, messages.decode_add(body), strict=True):
        crc = crc32c(payload, crc32c(struct.pack(">QQqI", ledger, entry, lac, len(payload))))
        assert header == (ledger, entry, lac, len(payload), crc, flags)
        assert body[at : at + len(payload)] == payload
        at += len(payload)


def test_a_payload_in_several_buffers_has_the_crc_of_the_whole() -> None:
    assert messages.pack_entry(1, 2, 3, (b"ab", b"", b"cd")) == messages.pack_entry(1, 2, 3, (b"abcd",))


@given(
    st.lists(
        st.tuples(st.integers(0, ID_MAX), st.integers(0, ID_MAX), st.integers(0, ID_MAX)),
        max_size=20,
    )
)
def test_reads_come_back_as_they_were(ranges: list[tuple[int, int, int]]) -> None:
    wanted = [Range(*each) for each in ranges]
    assert messages.decode_read(joined(messages.encode_read(wanted, 12345, 1))) == (wanted, 12345, 1)
    assert messages.decode_read_headers(joined(messages.encode_read_headers(wanted, 61, 7))) == (wanted, 61, 7)


@given(
    tables=st.lists(st.tuples(st.sampled_from(Status), st.integers(-1, 100), st.lists(ENTRY, max_size=4)), max_size=6),
    head_bytes=st.none() | st.integers(0, 100),
    unreadable=st.booleans(),
)
def test_answers_come_back_as_they_were(
    tables: list[tuple[Status, int, list[tuple[int, int, int, bytes]]]], head_bytes: int | None, unreadable: bool
) -> None:
    state = EntryState.UNREADABLE if unreadable else EntryState.PRESENT
    entries = [entry for *_, listed in tables for entry in listed]
    headers = [messages.pack_entry(ledger, entry, lac, (payload,), state) for ledger, entry, lac, payload in entries]
    payloads = [] if unreadable else [payload[:head_bytes] for *_, payload in entries]
    body = joined(messages.encode_read_answer([(status, to, len(listed)) for status, to, listed in tables], headers, payloads))
    for (status, to, listed), answer in zip(tables, messages.decode_read_answer(body, head_bytes), strict=True):
        assert (answer.status, answer.decided_to) == (status, to)
        for (ledger, entry, lac, payload), found in zip(listed, answer.entries, strict=True):
            assert (found.entry_id, found.lac, found.payload_bytes, found.state) == (entry, lac, len(payload), state)
            assert found.payload == (b"" if unreadable else payload[:head_bytes])
            if not unreadable and head_bytes is None:
                assert messages.entry_matches(ledger, found)
                assert not messages.entry_matches(ledger + 1, found)


@given(st.lists(st.sampled_from(Status), max_size=50))
def test_statuses_come_back_as_they_were(statuses: list[Status]) -> None:
    assert list(messages.decode_statuses(memoryview(messages.encode_statuses(statuses)))) == statuses


@given(body=st.binary(max_size=200))
def test_garbage_is_invalid_and_nothing_else(body: bytes) -> None:
    for decode in (
        messages.decode_add,
        messages.decode_read,
        messages.decode_read_headers,
        messages.decode_read_answer,
        messages.decode_statuses,
        lambda view: messages.decode(messages.LedgerIds, view),
    ):
        try:
            decode(memoryview(body))
        except Invalid:
            continue


def test_limits_are_named() -> None:
    with pytest.raises(Invalid, match="maximum is 65536"):
        messages.decode_add(memoryview(struct.pack(">I", 65_537)))
    with pytest.raises(Invalid, match="maximum is 65536"):
        messages.decode_read(memoryview(struct.pack(">IIB", 65_537, 0, 0)))
    with pytest.raises(Invalid, match="head_bytes is 2000"):
        messages.decode_read_headers(memoryview(struct.pack(">IHI", 0, 2000, 0)))
    with pytest.raises(Invalid, match="malformed LedgerIds"):
        messages.decode(messages.LedgerIds, b"\xc1")


def test_unknown_fields_are_ignored_and_defaults_left_out() -> None:
    later = messages.encode(messages.LedgerSummary(ledger_id=7, entries=3))
    assert messages.decode(messages.LedgerTail, later) == messages.LedgerTail(ledger_id=7)
    assert messages.encode(messages.LedgerTail(ledger_id=7)) == b"\x81\xa9ledger_id\x07"
