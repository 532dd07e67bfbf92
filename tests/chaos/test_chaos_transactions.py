"""The checks of committed records notice each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from chaos import transactions
from chaos.history import Recorder
from chaos.outcomes import State
from chaos.transactions import CommittedReader, TransactionalClient, is_explained, record_name, wrong_reads, wrong_records

STATES = {"p-1": State.COMMITTED, "p-2": State.ABORTED, "p-3": State.UNKNOWN}


def records(*names: str) -> list[list[tuple[int, str]]]:
    """The transactions in every partition, in this order."""
    return [[(offset, f"{name}/{partition}") for offset, name in enumerate(names)] for partition in range(3)]


@pytest.mark.parametrize("names", [("p-1",), ("p-1", "p-3")])
def test_whole_transactions_in_order_are_right(names: tuple[str, ...]) -> None:
    assert wrong_records(STATES, records(*names)) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (records("p-1", "p-2"), "aborted p-2 is readable in [0, 1, 2]"),
        (records(), "committed p-1 lacks [0, 1, 2]"),
        ([*records("p-1")[:2], []], "committed p-1 lacks [2]"),
        ([*records("p-1", "p-3")[:1], *records("p-1")[1:]], "p-3 is torn: only in [0]"),
        (records("p-1", "p-1"), "p-1/0 at 0@1 comes after p-1"),
        (records("p-3", "p-1"), "p-1/0 at 0@1 comes after p-3"),
        (records("p-1", "q-1"), "'q-1/0' at 0@1 was never sent there"),
        (records("p-1")[::-1], "'p-1/2' at 0@0 was never sent there"),
    ],
)
def test_each_fault_is_named(found: list[list[tuple[int, str]]], problem: str) -> None:
    assert problem in wrong_records(STATES, found)


def test_what_was_read_must_be_there_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "history", [])
    reader = CommittedReader("reader", recorder, "nowhere", "topic", 3, seed=1)
    recorder.close()
    reader.seen = {(0, 0): "p-1/0", (1, 0): "p-2/1"}
    assert wrong_reads(reader, records("p-1")) == ["p-2/1 at (1, 0) was read as committed and is missing at the end"]


def test_the_filler_is_not_part_of_the_name() -> None:
    assert record_name(b"p-1/0" + bytes(20)) == "p-1/0"


@pytest.mark.parametrize(
    ("code", "is_aborting", "is_ongoing", "explained"),
    [
        (KafkaError.INVALID_TXN_STATE, True, False, True),
        (KafkaError.INVALID_TXN_STATE, True, True, False),
        (KafkaError.INVALID_TXN_STATE, False, True, False),
        (KafkaError.INVALID_TXN_STATE, False, False, False),
        (KafkaError.PRODUCER_FENCED, False, True, True),
        (KafkaError._FENCED, False, True, True),
        (KafkaError._TIMED_OUT, False, True, True),
        (KafkaError.UNKNOWN_PRODUCER_ID, True, False, False),
    ],
)
def test_a_fatal_error_of_a_producer_needs_an_explanation(
    code: int, is_aborting: bool, is_ongoing: bool, explained: bool
) -> None:
    assert is_explained(code, is_aborting=is_aborting, is_ongoing=is_ongoing) is explained


class Refused(TransactionalClient):
    """Its one record is delivered."""

    def write(self, producer: Producer) -> Callable[[State], None]:
        self.note_delivery(None, MagicMock())
        return lambda state: None


def test_a_run_names_a_fatal_error_that_nothing_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "history", [])
    client = Refused("producer", recorder, "nowhere", per_s=1000, seed=1)
    recorder.close()
    refusal = KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, "refused", fatal=True))
    refusing = MagicMock(**{"commit_transaction.side_effect": refusal, "abort_transaction.side_effect": refusal})
    monkeypatch.setattr(transactions, "Producer", lambda config: refusing)
    monkeypatch.setattr(client.stopping, "wait", lambda timeout: False)
    for _ in range(20):
        # Sessions that end because a producer dies are no failures.
        client.run_session()
    (name,) = client.fatal_errors
    assert name == "INVALID_TXN_STATE"
    assert client.final_problems("nowhere")[0].startswith("producer ended with a fatal error that nothing explains: INVALID")
