"""One run: cluster, clients, faults, recovery, final reads, verdict. Results are files in one directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from chaos import copier, transactions
from chaos.administrator import Administrator
from chaos.checker import Verdict, check, offending
from chaos.client import Client
from chaos.cluster import ChaosCluster, log_tail
from chaos.compaction import sends as compacted
from chaos.compaction.checks import CompactionChecks
from chaos.consumers import AsyncGroupMember, GroupMember, Replayer, TailReader
from chaos.copier import CopierChecks
from chaos.edn import write_edn
from chaos.final_reads import read_everything
from chaos.history import Recorder, read_history
from chaos.java_producer import JavaProducer
from chaos.nemesis import Nemesis
from chaos.producers import LibrdkafkaProducer, PythonProducer
from chaos.progress import Progress, Unavailability, Window
from chaos.schedule import Fault, Schedule, Step
from chaos.stalls import Stalls, longest_wait_s, processor_waits_s
from chaos.transactions import TransactionChecks
from chaos.workload import KEYS, TOPICS, Values

LIVENESS_S: Final = 240.0
"""All partitions must accept records this soon after the faults end; generous, for shared machines."""
START_S: Final = 120.0
TAKEOVER_S: Final = 30.0
"""Sessions end after 4 s, and a client's requests after 10 s; doubled, plus an allowance for a busy machine."""
_FINAL_READ_S: Final = 400.0
_COMMAND_S: Final = 400.0
_SETTLE_S: Final = 90.0
_POLL_S: Final = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. ``results`` is an empty directory."""

    seconds: float
    seed: int
    results: Path
    only: tuple[str, ...] = ()
    """Words that select faults; see :class:`chaos.schedule.Schedule`."""
    sends_per_s: float = 160.0


@dataclass(slots=True)
class Result:
    """The result of a run. ``problems`` are failures other than the history's anomalies."""

    verdict: Verdict | None = None
    unavailability: list[Unavailability] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Processes that ended by themselves, with the end of their logs. The run restarts them, as a supervisor would."""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return self.verdict is not None and self.verdict.is_clean and not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The workloads with topics of their own, each with its clients and its checks."""

    transactions: TransactionChecks
    compaction: CompactionChecks
    copier: CopierChecks


class ChaosRun:
    """One run. Call ``run`` once; other threads may read ``step``, ``progress`` and ``phase`` during it."""

    def __init__(self, options: Options, say: Say) -> None:
        self._options = options
        self._say = say
        self.progress = Progress(KEYS)
        self.phase = "starting the cluster"
        self._history = options.results / "history.jsonl"
        self._recorder = Recorder(self._history, [self.progress])
        self._result = Result()
        self._windows: list[Window] = []
        self._bounds: list[float] = []
        """For each window, the maximum time in seconds for which a partition may confirm nothing on an idle machine."""
        self._waits_s: list[float] = []
        """For each window, for how long a process of the cluster had to wait for a processor."""
        self._stalls = Stalls()
        self._checks: Checks | None = None

    def run(self) -> Result:
        """Run everything. No process is left running, even after an error."""
        cluster = ChaosCluster(self._options.results / "cluster")
        clients: list[Client] = []
        self._stalls.start()
        try:
            cluster.start(START_S)
            cluster.create_topics()
            clients = self._clients(cluster.bootstrap)
            for client in clients:
                client.start()
            self._break(cluster)
            self._finish(cluster, clients)
            self._enter("stopping the cluster")
            cluster.close()
        finally:
            for client in clients:
                client.stop()
            cluster.destroy()
            self._recorder.close()
            self._stalls.stop()
        self._judge()
        return self._result

    def _clients(self, bootstrap: str) -> list[Client]:
        recorder, values, seed = self._recorder, Values(), self._options.seed
        checks = self._checks = Checks(
            transactions=TransactionChecks(recorder, bootstrap, seed=seed + 20),
            compaction=CompactionChecks(recorder, bootstrap, self._options.results, seed=seed + 40),
            copier=CopierChecks(recorder, bootstrap, self._options.results, seed=seed + 50),
        )
        share = self._options.sends_per_s / 4

        def producer(name: str, number: int, *, idempotent: bool, timeout_ms: int) -> LibrdkafkaProducer:
            return LibrdkafkaProducer(
                name, recorder, values, bootstrap,
                per_s=share, seed=seed + number, idempotent=idempotent, delivery_timeout_ms=timeout_ms,
            )  # fmt: skip

        return [
            producer("idempotent-patient", 1, idempotent=True, timeout_ms=300_000),
            producer("idempotent-hasty", 2, idempotent=True, timeout_ms=8000),
            producer("plain", 3, idempotent=False, timeout_ms=8000),
            PythonProducer("python", recorder, values, bootstrap, per_s=share, seed=seed + 4, idempotent=False),
            Replayer("replayer", recorder, bootstrap, seed=seed + 5),
            TailReader("tail", recorder, bootstrap),
            GroupMember("member-1", recorder, bootstrap, seed=seed + 6),
            GroupMember("member-2", recorder, bootstrap, seed=seed + 7),
            GroupMember("balanced-1", recorder, bootstrap, seed=seed + 10, is_balanced=True),
            GroupMember("balanced-2", recorder, bootstrap, seed=seed + 11, is_balanced=True),
            AsyncGroupMember("member-3", recorder, bootstrap, seed=seed + 8),
            JavaProducer("java", recorder, bootstrap, self._options.results, per_s=round(share)),
            Administrator("administrator", recorder, bootstrap, seed=seed + 9),
            *checks.transactions.clients,
            *checks.compaction.clients,
            *checks.copier.clients,
        ]

    # -- faults

    def _break(self, cluster: ChaosCluster) -> None:
        nemesis = Nemesis(cluster, self._recorder, self._problem, self._options.seed)
        names = {role: cluster.names(role) for role in ("metadata", "bookie", "broker", "tiering", "store")}
        self._await_live(self._recorder.now_ns(), "at the start")
        schedule = Schedule(self._options.seed, names, cluster.links, self._options.only)
        for step in schedule.steps_within(self._options.seconds):
            self._take(step, nemesis, cluster)

    def _take(self, step: Step, nemesis: Nemesis, cluster: ChaosCluster) -> None:
        self._enter(" + ".join(map(str, step.faults)))
        began_ns, waits_s = self._recorder.now_ns(), processor_waits_s(cluster.pids())
        for fault in step.faults:
            nemesis.begin(fault)
        time.sleep(step.hold_s)
        for fault in step.in_order_of_repair:
            nemesis.end(fault)
        ended_ns = self._recorder.now_ns()
        self.phase = "recovering"
        self._note_ended(cluster, step.faults)
        self._await_live(ended_ns, f"after {' + '.join(map(str, step.faults))}")
        recovered_ns = self._recorder.now_ns()
        kind = step.faults[0].kind if len(step.faults) == 1 else "two at once"
        window = Window(kind=kind, began_ns=began_ns, ended_ns=ended_ns, recovered_ns=recovered_ns)
        self._windows.append(window)
        self._bounds.append(bound_s(step.faults, (ended_ns - began_ns) / 1e9))
        self._waits_s.append(longest_wait_s(waits_s, processor_waits_s(cluster.pids())))
        time.sleep(step.quiet_s)

    def _note_ended(self, cluster: ChaosCluster, faults: Sequence[Fault]) -> None:
        """Record and restart processes that ended by themselves."""
        for name in cluster.names():
            if not cluster.is_running(name):
                self._result.ended.append(
                    f"{name} during {' + '.join(map(str, faults))}: {' | '.join(log_tail(cluster.log(name)))}"
                )
                self._say(f"{name} ended by itself")
                cluster.launch(name)

    def _await_live(self, since_ns: int, when: str) -> None:
        """Wait until every partition has confirmed a record that was sent after ``since_ns``."""
        deadline = time.monotonic() + LIVENESS_S
        while silent := self.progress.silent_since(since_ns):
            if time.monotonic() > deadline:
                self._problem(f"partitions {silent} take no records {LIVENESS_S:.0f} s {when}")
                return
            time.sleep(_POLL_S)

    # -- the end

    def _finish(self, cluster: ChaosCluster, clients: Sequence[Client]) -> None:
        self._enter("healed, waiting for all")
        cluster.wait_until_whole(START_S)
        self._await_proofs()
        self._stop(clients)
        self._ask(clients, cluster)
        self._read("final-hot-and-cold", cluster, is_compacted=False)
        self._enter("moving everything to the store")
        offloaded = (*TOPICS, transactions.TOPIC, copier.INPUT, copier.OUTPUT)
        self._command(cluster, "tier", "offload", *offloaded, "--wait", "--delete-hot")
        for topic in compacted.TOPICS:
            self._command(cluster, "tier", "compact", topic)
        self._read("final-cold", cluster, is_compacted=True)
        self._enter("verifying")
        verified = json.loads(self._command(cluster, "tier", "verify", "--json") or "{}")
        self._result.numbers["cold records verified"] = sum(row["records"] for row in verified.get("partitions", ()))
        self._command(cluster, "doctor")
        for name in cluster.names():
            if not cluster.is_running(name):
                self._problem(f"{name} does not live at the end: {' | '.join(log_tail(cluster.log(name)))}")

    def _await_proofs(self) -> None:
        """Wait until readers have read compacted history in every partition, and copiers have copied records."""
        checks = self._checks
        assert checks is not None
        gone = checks.compaction.compacted().total()
        self._result.numbers["keyed records that readers found compacted away during the faults"] = gone
        deadline = time.monotonic() + LIVENESS_S
        while not checks.copier.has_copied() or checks.compaction.uncompacted():
            if time.monotonic() > deadline:
                late = f"{LIVENESS_S:.0f} s after the faults"
                if not checks.copier.has_copied():
                    self._problem(f"no copier has copied anything {late}")
                if uncompacted := checks.compaction.uncompacted():
                    self._problem(f"{uncompacted} are not compacted {late}")
                return
            time.sleep(1)

    def _stop(self, clients: Sequence[Client]) -> None:
        self._enter("stopping the clients")
        for client in clients:
            client.stop()
        for client in clients:
            if not client.join(_SETTLE_S):
                self._problem(f"client {client.name} did not stop within {_SETTLE_S:.0f} s")
            if client.sessions_given_up:
                self._result.numbers[f"sessions of {client.name} without progress, begun anew"] = client.sessions_given_up
            if client.failure:
                self._problem(f"client {client.name} failed: {client.failure}")

    def _ask(self, clients: Sequence[Client], cluster: ChaosCluster) -> None:
        for client in clients:
            for problem in client.final_problems(cluster.bootstrap):
                self._problem(problem)

    def _read(self, name: str, cluster: ChaosCluster, *, is_compacted: bool) -> None:
        self._enter(f"reading everything ({name})")
        ends = read_everything(name, self._recorder, cluster.bootstrap, _FINAL_READ_S)
        if len(ends) < len(KEYS):
            self._problem(f"{name}: of {sorted(set(KEYS) - set(ends))} the end was not read within {_FINAL_READ_S:.0f} s")
        self._result.numbers[f"records in {name}"] = sum(ends.values())
        checks = self._checks
        assert checks is not None
        finds = (checks.transactions.find, partial(checks.compaction.find, is_compacted=is_compacted), checks.copier.find)
        with ThreadPoolExecutor(len(finds)) as side_by_side:
            found = [side_by_side.submit(find) for find in finds]
        for findings in (future.result() for future in found):
            for problem in findings.problems:
                self._problem(f"{name}: {problem}")
            self._result.numbers |= {f"{what} in {name}": number for what, number in findings.numbers.items()}

    def _command(self, cluster: ChaosCluster, *words: str) -> str:
        """Run one ``stratalog`` command; a failure is a problem."""
        command = [sys.executable, "-m", "stratalog", *words, "--data", str(cluster.data)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except subprocess.TimeoutExpired:
            self._problem(f"`stratalog {' '.join(words)}` did not end within {_COMMAND_S:.0f} s")
            return ""
        (self._options.results / f"{'-'.join(words[:2])}.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            self._problem(f"`stratalog {' '.join(words)}` ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._say(phase)

    def _problem(self, text: str) -> None:
        self._say(f"PROBLEM {text}")
        self._result.problems.append(text)

    # -- the verdict

    def _judge(self) -> None:
        self._enter("checking the history")
        result, directory = self._result, self._options.results
        result.verdict = check(read_history(self._history))
        result.unavailability = self.progress.unavailability(self._windows)
        self._judge_unavailability()
        states = Counter(self._checks.transactions.outcomes.states().values()) if self._checks is not None else {}
        result.numbers |= {f"transactions {state.value}": count for state, count in states.items()}
        result.numbers |= {"seed": self._options.seed, "seconds": self._options.seconds, "faults": len(self._windows)}
        result.numbers |= {f"sends {type}": count for type, count in sorted(self.progress.counts.items())}
        stalls = self._stalls
        result.numbers["machine busy: longest wait of this process, and sum of those over 0.5 s (seconds)"] = [
            round(stalls.longest_s, 2),
            round(stalls.total_s, 2),
        ]
        result.numbers["machine busy: longest wait of a process of the cluster, during one fault (seconds)"] = round(
            max(self._waits_s, default=0.0), 2
        )
        write_edn(read_history(self._history), directory / "history.edn")
        if not result.verdict.is_clean:
            lines = [json.dumps(msgspec.to_builtins(found)) for found in offending(result.verdict, read_history(self._history))]
            (directory / "offending.jsonl").write_text("\n".join(lines) + "\n")
        (directory / "summary.json").write_text(json.dumps(msgspec.to_builtins(result), indent=2) + "\n")

    def _judge_unavailability(self) -> None:
        """Report partitions that were silent for longer than their fault and the load of the machine explain."""
        gaps = self.progress.longest_gaps_s(self._windows)
        for window, gap_s, bound, wait_s in zip(self._windows, gaps, self._bounds, self._waits_s, strict=True):
            problem = wrong_silence(gap_s, bound, self._stalls.total_s + wait_s)
            if problem:
                self._problem(f"{window.kind}: {problem}")


def wrong_silence(gap_s: float, bound: float, busy_s: float) -> str:
    """Return what is wrong if a partition confirmed nothing for longer than fault and load explain, else an empty string."""
    if gap_s <= bound + busy_s:
        return ""
    return f"a partition confirmed nothing for {gap_s:.1f} s; the bound is {bound:.0f} s, and {busy_s:.1f} s for a busy machine"


def bound_s(faults: Sequence[Fault], held_s: float) -> float:
    """Return how long a partition may confirm nothing: a takeover, plus the duration of faults without a way around."""
    return TAKEOVER_S + (held_s if any(fault.blocks for fault in faults) else 0.0)
