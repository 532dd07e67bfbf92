"""Everything in one process: a quorum of one, one bookie, one broker, one tiering worker, on one event loop.

The components and their loopback connections are the same as in a cluster; only their number differs. An
acknowledgement makes the same promise, on one disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratalog.roles import bookie, broker, metadata, tiering
from stratalog.roles.runtime import Node


def embedded_overrides(
    data: Path, *, kafka: str, store: str | None, second_store: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return the settings of the command line, which override file and environment."""
    second = {"second_store": second_store} if second_store else {}
    return {
        "node": {"store": store or str(data / "store"), **second, "cache_dir": str(data / "cache")},
        "metadata": {"data_dir": str(data / "metadata"), "listen": "127.0.0.1:0"},
        "bookie": {"bookie_id": "bookie-1", "data_dirs": str(data / "bookie"), "listen": "127.0.0.1:0"},
        # There is only one bookie, so groups' offsets have one copy by choice.
        "broker": {
            "broker_id": 1,
            "listen": kafka,
            "offsets_topic_replication_factor": 1,
            "transaction_state_log_replication_factor": 1,
        },
        # The worker shares the process with the broker, whose clients must not wait.
        "tiering": {"worker_id": "tiering-1", "niceness": 0},
    }


async def start(node: Node) -> str:
    """Start all roles and return the address of the Kafka listener."""
    node.find_metadata_at(await metadata.start(node))
    await bookie.start(node)
    address = await broker.start(node)
    await tiering.start(node)
    return address
