"""A reservation that is written late, when the topic was attached, does not delete it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.tiering.attach.test_attach import claim, log_directory, new_topic, pending, ports, write_logs

from stratalog_core.errors import Conflict
from stratalog_core.system import ThreadBackground
from stratalog_metadata.state.commands import Command
from stratalog_tiering.attach.attachment import AttachPorts, attach
from stratalog_tiering.attach.kafka_logs import kafka_topic

__all__ = ["log_directory", "ports"]
Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
MakePorts = Callable[..., AttachPorts]


async def test_a_late_reservation_does_not_delete_the_topic_that_was_attached(
    cluster: Cluster, ports: MakePorts, log_directory: Path, make_batches: Batches, background: ThreadBackground
) -> None:
    """The first proposal of a reservation got no answer, and arrives after the second one was used."""
    write_logs(log_directory, "flights-0", {0: make_batches(0, [2])})
    await claim(cluster)
    source = kafka_topic([log_directory], None, background)
    topic, proposed, propose = new_topic(source), list[Command](), cluster.metadata.propose

    async def noting(command: Command, timeout_s: float = 10.0) -> Any:
        proposed.append(command)
        return await propose(command, timeout_s)

    cluster.metadata.propose = noting
    await attach(ports(), topic, source, expiry_ms=1000)
    cluster.metadata.propose = propose
    with pytest.raises(Conflict):
        await cluster.metadata.propose(proposed[0])
    assert pending(cluster) == []
