"""Rows about brokers, from the metadata view and the brokers' load reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.protocol.broker_loads import BrokerLoad
from stratalog_metadata.records import Broker, DrainedBroker, Partition

Row = dict[str, Any]


def broker_rows(view: MetadataView, loads: Iterable[BrokerLoad]) -> list[Row]:
    """Return one row per live or drained broker. Rates cover the last few seconds and are None without a report."""
    live = {broker.broker_id: broker for broker in view.all(Broker)}
    drained = {each.broker_id for each in view.all(DrainedBroker)}
    counts = Counter(partition.owner for partition in view.all(Partition))
    rates = {load.broker_id: load for load in loads}
    return [
        _row(broker_id, live.get(broker_id), counts[broker_id], rates.get(broker_id), is_drained=broker_id in drained)
        for broker_id in sorted(live.keys() | drained)
    ]


def _row(broker_id: int, broker: Broker | None, partitions: int, load: BrokerLoad | None, *, is_drained: bool) -> Row:
    return {
        "broker": broker_id,
        "state": _state(broker, partitions, is_drained=is_drained),
        "rack": broker.rack if broker is not None else "",
        "address": f"{broker.host}:{broker.port}" if broker is not None else "",
        "partitions": partitions,
        "in_bytes_per_s": load.bytes_in_per_s if load is not None else None,
        "out_bytes_per_s": load.bytes_out_per_s if load is not None else None,
        "unreadable_records": load.unreadable_records if load is not None else None,
    }


def _state(broker: Broker | None, partitions: int, *, is_drained: bool) -> str:
    """Return the broker's state in a word or two."""
    if broker is None:
        return "down, drained"
    if broker.stopping:
        return "stopping"
    if is_drained:
        return "draining" if partitions else "drained"
    return "live"
