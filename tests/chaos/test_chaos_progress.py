"""Partitions that accept records, and for how long they did not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.history import Operation
from chaos.progress import Progress, Window, longest_gap_s
from chaos.run import TAKEOVER_S, bound_s, wrong_silence
from chaos.schedule import Fault
from chaos.stalls import longest_wait_s, processor_waits_s

SECOND = 1_000_000_000


def _send(progress: Progress, key: int, invoked_s: float, completed_s: float, outcome: Any = "ok") -> None:
    moments: list[tuple[Any, float]] = [("invoke", invoked_s), (outcome, completed_s)]
    for type, moment in moments:
        operation = Operation(index=0, time_ns=int(moment * SECOND), process=1, type=type, f="send", key=key, value=0)
        progress(operation)


def test_a_key_is_silent_until_something_sent_later_is_confirmed() -> None:
    progress = Progress([0, 1])
    _send(progress, 0, 1, 5)
    _send(progress, 1, 3, 4)
    _send(progress, 1, 6, 7, "info")
    assert progress.silent_since(2 * SECOND) == [0]
    assert progress.silent_since(5 * SECOND) == [0, 1]
    assert progress.counts == {"invoke": 3, "ok": 2, "info": 1}


def test_gaps_that_reach_into_the_window_count_in_full() -> None:
    window = Window(kind="kill", began_ns=10 * SECOND, ended_ns=12 * SECOND, recovered_ns=15 * SECOND)
    times = [moment * SECOND for moment in (1, 9, 11, 14, 20, 40)]
    assert longest_gap_s(times, window) == 6
    assert longest_gap_s([], window) == 5


def test_faults_that_others_can_go_around_do_not_extend_the_bound() -> None:
    around = Fault(kind="kill broker", action="kill", processes=("broker-1",), blocks=False)
    through = Fault(kind="kill broker", action="kill", processes=("broker-1", "broker-2", "broker-3"))
    assert bound_s([around], 7.0) == TAKEOVER_S
    assert bound_s([around, through], 7.0) == TAKEOVER_S + 7.0


def test_silence_beyond_the_bound_is_wrong_unless_the_machine_was_busy() -> None:
    assert wrong_silence(34.9, 35, 0) == ""
    assert wrong_silence(40, 35, 6) == ""
    assert wrong_silence(42, 35, 6).startswith("a partition confirmed nothing for 42.0 s; the bound is 35 s")


def test_a_process_that_shares_its_processor_waits_for_it() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the kernel does not count how long a thread waits for a processor")
    code = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    with ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen([sys.executable, "-c", code])) for _ in range(2)]
        for process in running:
            stack.callback(process.kill)
        pids = [process.pid for process in running]
        before, deadline = processor_waits_s(pids), time.monotonic() + 60
        while longest_wait_s(before, processor_waits_s(pids)) < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert processor_waits_s(pids) == {}
    assert longest_wait_s({1: 2.0, 2: 5.0}, {1: 2.5, 2: 5.1, 3: 0.4}) == 0.5


def test_unavailability_is_that_of_the_worst_partition_and_of_all_together() -> None:
    progress = Progress([0, 1])
    for moment in range(1, 20):
        if moment not in (5, 6, 7):
            _send(progress, 0, moment - 0.5, moment)
        _send(progress, 1, moment - 0.5, moment)
    window = Window(kind="kill", began_ns=5 * SECOND, ended_ns=6 * SECOND, recovered_ns=9 * SECOND)
    (row,) = progress.unavailability([window])
    assert (row.kind, row.times, row.partition_gap_max_s, row.cluster_gap_max_s, row.recovery_max_s) == ("kill", 1, 4, 1, 3)
