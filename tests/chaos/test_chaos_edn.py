"""Histories are written as Jepsen's Kafka workload writes them."""

from __future__ import annotations

from chaos.edn import edn_lines, to_edn
from chaos.history import NEMESIS, Operation


def test_a_send_names_key_value_and_when_known_its_offset() -> None:
    send = Operation(index=4, time_ns=17, process=3, type="invoke", f="send", key=2, value=9)
    assert to_edn(send) == "{:index 4, :time 17, :type :invoke, :process 3, :f :send, :value [[:send 2 9]]}"
    done = Operation(index=5, time_ns=18, process=3, type="ok", f="send", key=2, value=9, offset=40, client="a")
    assert ':value [[:send 2 [40 9]]], :client "a"}' in to_edn(done)
    unknown = Operation(index=5, time_ns=18, process=3, type="info", f="send", key=2, value=9, error='a "b"\\')
    assert to_edn(unknown).endswith(':type :info, :process 3, :f :send, :value [[:send 2 9]], :error "a \\"b\\"\\\\"}')


def test_a_poll_maps_keys_to_pairs_of_offset_and_value() -> None:
    poll = Operation(index=0, time_ns=1, process=3, type="ok", f="poll", polled={2: ((0, 7), (1, 8)), 0: ((5, 1),)})
    assert ":value [[:poll {0 [[5 1]], 2 [[0 7] [1 8]]}]]" in to_edn(poll)
    assert ":value [[:poll]]" in to_edn(Operation(index=0, time_ns=1, process=3, type="invoke", f="poll"))


def test_an_assignment_says_whether_it_goes_to_the_beginning() -> None:
    assign = Operation(index=0, time_ns=1, process=3, type="invoke", f="assign", keys=(0, 2), from_beginning=True)
    assert to_edn(assign).endswith(":f :assign, :value [0 2], :seek-to-beginning? true}")


def test_rebalances_stand_in_the_log_of_their_poll_and_commits_nowhere() -> None:
    history = [
        Operation(index=0, time_ns=0, process=3, type="invoke", f="poll"),
        Operation(index=1, time_ns=1, process=3, type="ok", f="rebalance", keys=(1, 2)),
        Operation(index=2, time_ns=2, process=3, type="ok", f="poll", polled={}),
        Operation(index=3, time_ns=3, process=3, type="ok", f="commit", committed={1: 4}),
    ]
    invoked, completed = edn_lines(history)
    assert ":rebalance-log" not in invoked
    assert completed.endswith(":value [[:poll {}]], :rebalance-log [{:keys [1 2]}]}")


def test_faults_are_the_nemesis_s() -> None:
    fault = Operation(index=0, time_ns=0, process=NEMESIS, type="info", f="fault", error="begin kill bookie")
    assert ':process :nemesis, :f :fault, :value "begin kill bookie"}' in to_edn(fault)
