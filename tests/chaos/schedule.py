"""Draws faults, their targets and durations from a seed, so that a run can be repeated. It applies none of them.

It shuffles all kinds of faults and applies each once before it shuffles again, so a long run has every kind often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chaos.faulty_files import HEALTHY, DiskFault
from chaos.links import CLIENTS, Link, between
from chaos.modes import Mode
from stratalog_core.errors import Invalid

Names = Mapping[str, Sequence[str]]
"""Names of the processes by role."""
UNDONE_BY_COMMANDS: Final = ("drain", "decommission", "replace")
"""Actions of operators that are undone by a command to the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. ``kind`` groups equal ones in the summary; ``links`` or ``processes`` are its targets."""

    kind: str
    action: str
    processes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    mode: Mode = "pass"
    disk: DiskFault = HEALTHY
    offset_ms: int = 0
    """By how much the clock jumps."""
    blocks: bool = True
    """Whether partitions may refuse records for as long as it lasts; otherwise only until a takeover."""

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(self.processes or self.links[:3])}{' …' if len(self.links) > 3 else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Faults that start together, last for ``hold_s`` and end together; then ``quiet_s`` without faults."""

    faults: tuple[Fault, ...]
    hold_s: float
    quiet_s: float

    @property
    def duration_s(self) -> float:
        return self.hold_s + self.quiet_s

    @property
    def in_order_of_repair(self) -> list[Fault]:
        """The faults with operators' actions last: undoing one needs a quorum, which another fault may prevent."""
        return sorted(self.faults, key=lambda fault: fault.action in UNDONE_BY_COMMANDS)


_ROLES: Final = ("metadata", "bookie", "broker", "tiering", "store")
_SPARED: Final = {"metadata": 1, "bookie": 1, "broker": 2, "tiering": 2, "store": 1}
"""The number of processes of a role that may be missing while all partitions still accept records after takeovers."""
_JUMPS_MS: Final = (-90_000, -5_000, 5_000, 60_000)
"""Forward jumps are shorter than the grace period of removed objects."""
ROTTING: Final = "bookie-1"
"""The only bookie whose disk rots, so that every entry keeps other copies."""
_COMBINED_SHARE: Final = 0.35
_ALL_SHARE: Final = 0.15
_HOLD_S: Final = (2.0, 7.0)
_LONG_PAUSE_S: Final = (8.0, 12.0)
"""Longer than every lease."""
_QUIET_S: Final = (0.5, 2.0)
_MODES: Final[tuple[Mode, ...]] = ("cut", "cut-forward", "cut-backward", "slow", "reset")
_PAIRS: Final = (
    (CLIENTS, "broker"),
    ("broker", "metadata"),
    ("broker", "bookie"),
    ("broker", "store"),
    ("bookie", "metadata"),
    ("metadata", "metadata"),
    ("tiering", "metadata"),
    ("tiering", "bookie"),
    ("tiering", "store"),
)
_DISKS: Final = {
    "write error": DiskFault(failing=("write",)),
    "sync error": DiskFault(failing=("sync",)),
    "read error": DiskFault(failing=("read",)),
    "full": DiskFault(is_full=True),
    "slow": DiskFault(delay_s=0.05),
}
RESTART_AFTER: Final = frozenset({"write error", "sync error"})
"""After these faults a disk is not used again until its process restarts."""


@dataclass(slots=True)
class Schedule:
    """An endless sequence of steps for the processes ``names`` and the links between them.

    ``only``: words of which a fault's kind must contain one ("kill", "broker"); empty: every fault. ``steps`` raises
    ``Invalid`` if no kind matches.
    """

    seed: int
    names: Names
    links: Sequence[Link]
    only: Sequence[str] = ()
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def steps(self) -> Iterator[Step]:
        """Yield the steps of this seed."""
        while True:
            kinds = self._shuffled_kinds()
            while kinds:
                kind = kinds.pop()
                faults = [self._fault(kind)]
                if kinds and self._random.random() < _COMBINED_SHARE:
                    faults.append(self._fault(kinds.pop()))
                hold = _LONG_PAUSE_S if any("long pause" in fault.kind for fault in faults) else _HOLD_S
                yield Step(faults=tuple(faults), hold_s=self._random.uniform(*hold), quiet_s=self._random.uniform(*_QUIET_S))

    def steps_within(self, seconds: float) -> Iterator[Step]:
        """Yield the first steps of this seed, which last for ``seconds`` at most.

        Commands, restarts and recovery do not count: a slow machine needs longer for the same faults.
        """
        for step in self.steps():
            seconds -= step.duration_s
            if seconds < 0:
                return
            yield step

    def _shuffled_kinds(self) -> list[tuple[str, ...]]:
        actions = ("kill", "stop", "pause", "long pause")
        kinds: list[tuple[str, ...]] = [(action, role) for action in actions for role in _ROLES]
        kinds += [("roll", role) for role in ("metadata", "bookie", "broker", "tiering")]
        kinds += [("clock", role) for role in ("metadata", "bookie", "broker", "tiering")]
        kinds += [("drain", "broker"), ("decommission", "bookie"), ("replace", "metadata"), ("rot", "bookie")]
        kinds += [("link", mode, *pair) for mode in _MODES for pair in _PAIRS]
        kinds += [("isolate", mode, role) for mode in ("cut", "reset") for role in _ROLES]
        kinds += [("everything", action) for action in ("kill", "pause")]
        kinds += [("disk", trouble, role) for trouble in _DISKS for role in ("metadata", "bookie")]
        chosen = [kind for kind in kinds if not self.only or set(kind) & set(self.only)]
        if not chosen:
            words = ", ".join(sorted({word for kind in kinds for word in kind}))
            raise Invalid(f"no fault is called {' or '.join(self.only)}; the words are {words}")
        self._random.shuffle(chosen)
        return chosen

    def _fault(self, words: tuple[str, ...]) -> Fault:
        if words[0] == "link":
            return self._link(*words[1:])
        if words[0] == "isolate":
            return self._isolate(*words[1:])
        if words[0] == "disk":
            trouble, role = words[1:]
            names = self._some(role, 0.3)
            return Fault(
                kind=f"disk {trouble} {role}", action="disk", processes=names, disk=_DISKS[trouble], blocks=_blocks(role, names)
            )
        if words[0] == "everything":
            names = tuple(name for role in _ROLES for name in self.names[role])
            return Fault(kind=f"{words[1]} everything", action=words[1], processes=names)
        action, role = words
        kind = f"{action} {role}"
        if action in (*UNDONE_BY_COMMANDS, "roll"):
            names = tuple(self.names[role]) if action == "roll" else self._one(role)
            return Fault(kind=kind, action=action, processes=names, blocks=False)
        if action == "rot":
            return Fault(kind=kind, action=action, processes=(ROTTING,), blocks=False)
        if action == "clock":
            jump = self._random.choice(_JUMPS_MS)
            return Fault(kind=kind, action=action, processes=self._some(role), offset_ms=jump, blocks=False)
        names = self._some(role)
        action = "pause" if "pause" in action else action
        return Fault(kind=kind, action=action, processes=names, blocks=_blocks(role, names))

    def _one(self, role: str) -> tuple[str, ...]:
        return (self._random.choice(list(self.names[role])),)

    def _some(self, role: str, others_share: float = 0.25) -> tuple[str, ...]:
        """Return one process of the role; sometimes two, sometimes all."""
        names = list(self.names[role])
        draw = self._random.random()
        count = len(names) if draw < _ALL_SHARE else min(2, len(names)) if draw < _ALL_SHARE + others_share else 1
        return tuple(self._random.sample(names, count))

    def _link(self, mode: str, source: str, target: str) -> Fault:
        links = [link.name for link in self.links if _role(link.source) == source and _role(link.target) == target]
        count = len(links) if self._random.random() < _ALL_SHARE else self._random.randint(1, max(1, len(links) // 2))
        return Fault(
            kind=f"{mode} {source} to {target}",
            action="link",
            links=tuple(self._random.sample(links, count)),
            mode=_mode(mode),
        )

    def _isolate(self, mode: str, role: str) -> Fault:
        (name,) = self._random.sample(list(self.names[role]), 1)
        others = [CLIENTS, *(other for names in self.names.values() for other in names if other != name)]
        links = tuple(between(self.links, (name,), others))
        return Fault(kind=f"isolate {role} ({mode})", action="link", links=links, mode=_mode(mode))


def _blocks(role: str, names: Sequence[str]) -> bool:
    return len(names) > _SPARED[role]


def _mode(text: str) -> Mode:
    return next(mode for mode in _MODES if mode == text)


def _role(name: str) -> str:
    role = name.partition("-")[0]
    return "store" if role == "minio" else role
