"""Topic configs of Kafka that have one value here, with what it means."""

from __future__ import annotations

from typing import Final

from stratalog_metadata.topic_rules.config_keys import ConfigKey, ConfigKind


def _fixed(name: str, kind: ConfigKind, value: str, documentation: str, reason: str, broker_name: str = "") -> ConfigKey:
    return ConfigKey(
        name=name, kind=kind, default=value, documentation=documentation, reason=reason, is_fixed=True, broker_name=broker_name
    )  # fmt: skip


FIXED_TOPIC_CONFIGS: Final = (
    _fixed(
        "flush.messages", ConfigKind.LONG, "1", "Every batch is on disk before it is acknowledged.",
        "every batch is on disk before it is acknowledged", "log.flush.interval.messages",
    ),
    _fixed(
        "flush.ms", ConfigKind.LONG, "0", "Every batch is on disk before it is acknowledged.",
        "every batch is on disk before it is acknowledged", "log.flush.interval.ms",
    ),
    _fixed(
        "index.interval.bytes", ConfigKind.INT, "0", "Every batch is indexed.", "every batch is indexed",
        "log.index.interval.bytes",
    ),
    _fixed(
        "preallocate", ConfigKind.BOOLEAN, "false", "Ledgers share a bookie's log files and have no files of their own.",
        "ledgers have no files of their own; [bookie] spare_files preallocates log files", "log.preallocate",
    ),
    _fixed(
        "remote.log.delete.on.disable", ConfigKind.BOOLEAN, "false", "No config deletes records in the object store.",
        "no change of a config deletes records; delete them with DeleteRecords",
    ),
    _fixed(
        "unclean.leader.election.enable", ConfigKind.BOOLEAN, "false", "Acknowledged records are never discarded.",
        "acknowledged records are never discarded",
    ),
)  # fmt: skip
