"""The checks of exactly-once copies notice each kind of fault, and that the client did not use ``transaction.version`` 2."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos.copier import SERVED, wrong_copies, wrong_versions

INPUT = ["0", "1", "2"]


@pytest.mark.parametrize(
    ("source", "copies", "problem"),
    [
        (INPUT, ["0", "1"], "1 records were not copied: ['2']"),
        (INPUT, ["0", "1", "1", "2"], "1 copies are duplicates: ['1']"),
        (INPUT, ["0", "2", "1"], "copy 1 is 2 and should be 1"),
        (INPUT[1:], INPUT[1:], "the copier's input lacks 1 acknowledged records: ['0']"),
        (INPUT, [*INPUT, "9"], "1 copies are duplicates: ['9']"),
    ],
)
def test_each_fault_of_the_copies_is_named(source: list[str], copies: list[str], problem: str) -> None:
    assert wrong_copies(source, copies, {"0", "1"}) == [problem]


def test_copies_of_everything_in_order_are_right() -> None:
    assert wrong_copies(INPUT, INPUT, {"0", "1"}) == []


V2 = {("PRODUCE", 13): 5, ("END_TXN", 5): 3, ("TXN_OFFSET_COMMIT", 5): 3}


def test_older_versions_and_explicit_partitions_are_noticed() -> None:
    assert wrong_versions(Counter(V2)) == []
    old = {("PRODUCE", 11): 5, ("END_TXN", 4): 3, ("TXN_OFFSET_COMMIT", 5): 3, ("ADD_PARTITIONS_TO_TXN", 4): 1}
    assert wrong_versions(Counter(old)) == [
        "no PRODUCE of version 12 was served",
        "no END_TXN of version 5 was served",
        "partitions were added to transactions by version 1 of the protocol",
    ]


@pytest.mark.parametrize(("error", "found"), [(b"0", (b"END_TXN", b"5")), (b"47", None)])
def test_the_clients_log_tells_what_was_served(error: bytes, found: tuple[bytes, bytes] | None) -> None:
    line = (
        b"[kafka-producer-network] DEBUG NetworkClient - [Producer] Received END_TXN response from node 2 for request with"
        b" header RequestHeader(apiKey=END_TXN, apiVersion=5, clientId=producer-copier, correlationId=9, headerVersion=2):"
        b" EndTxnResponseData(throttleTimeMs=0, errorCode=" + error + b", producerId=1, producerEpoch=2)"
    )
    served = SERVED.search(line)
    assert (served.groups() if served else None) == found
