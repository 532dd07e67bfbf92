"""A history in EDN, with the vocabulary of Jepsen's Kafka workload, so that Jepsen's own checker can read it.

Sends are ``{:f :send, :value [[:send key value]]}``, completed as ``[[:send key [offset value]]]``; polls ``[[:poll]]``,
completed as ``[[:poll {key [[offset value] …]}]]`` with the rebalances before them as ``:rebalance-log``; assignments carry
their keys; faults are operations of ``:nemesis``. Commits are left out (that workload takes them as part of a poll), and so are
producers' epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from chaos.history import NEMESIS, Operation


def write_edn(operations: Iterable[Operation], path: Path) -> None:
    """Write one map per line, in the order of the history."""
    with path.open("w") as stream:
        stream.writelines(line + "\n" for line in edn_lines(operations))


def edn_lines(operations: Iterable[Operation]) -> Iterator[str]:
    """Yield EDN maps; a rebalance is attached to the end of its process's poll."""
    rebalances: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.f == "rebalance":
            rebalances.setdefault(operation.process, []).append(operation)
        elif operation.f not in ("commit", "epoch"):
            completes = operation.f == "poll" and operation.type != "invoke"
            yield to_edn(operation, rebalances.pop(operation.process, ()) if completes else ())


def to_edn(operation: Operation, rebalances: Sequence[Operation] = ()) -> str:
    """Return one operation as an EDN map."""
    is_fault = operation.process == NEMESIS
    fields = [
        f":index {operation.index}",
        f":time {operation.time_ns}",
        f":type :{'info' if is_fault else operation.type}",
        f":process {':nemesis' if is_fault else operation.process}",
        f":f :{operation.f}",
        f":value {_value(operation)}",
    ]
    if operation.client:
        fields.append(f":client {_text(operation.client)}")
    if operation.from_beginning:
        fields.append(":seek-to-beginning? true")
    if rebalances:
        fields.append(f":rebalance-log [{' '.join('{:keys ' + _keys(rebalance) + '}' for rebalance in rebalances)}]")
    if operation.error and not is_fault:
        fields.append(f":error {_text(operation.error)}")
    return "{" + ", ".join(fields) + "}"


def _value(operation: Operation) -> str:
    if operation.f == "send":
        return _send(operation)
    if operation.f == "poll":
        return f"[[:poll {_polled(operation.polled)}]]" if operation.polled is not None else "[[:poll]]"
    return _text(operation.error) if operation.f == "fault" else _keys(operation)


def _keys(operation: Operation) -> str:
    return f"[{' '.join(map(str, operation.keys))}]"


def _send(operation: Operation) -> str:
    if operation.type == "ok":
        return f"[[:send {operation.key} [{'nil' if operation.offset is None else operation.offset} {operation.value}]]]"
    return f"[[:send {operation.key} {operation.value}]]"


def _polled(polled: Mapping[int, Sequence[tuple[int, int]]]) -> str:
    rows = (f"{key} [{' '.join(f'[{offset} {value}]' for offset, value in pairs)}]" for key, pairs in sorted(polled.items()))
    return "{" + ", ".join(rows) + "}"


def _text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
