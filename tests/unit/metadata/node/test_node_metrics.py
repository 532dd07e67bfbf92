"""The metrics of a metadata node match its Raft state, its records and the requests made."""

from __future__ import annotations

from pathlib import Path

from support.embedded_quorum import embedded_quorum

from stratalog_core.metrics.groups import Histogram
from stratalog_core.metrics.registry import Registry, Value
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import Command, Put


def _scraped(registry: Registry) -> dict[str, dict[tuple[str, ...], Value]]:
    prefix = "stratalog_metadata_"
    return {
        family.definition.name.removeprefix(prefix): {one.labels: one.value for one in family.samples}
        for family in registry.collect()
    }


async def test_a_leader_reports_its_state_and_work(tmp_path: Path) -> None:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport) as quorum:
        (server,) = quorum.servers
        registry = Registry()
        registry.add_source(server.metrics)
        before = _scraped(registry)
        for name in ("a", "b", "c"):
            applied = await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource=name, configs={})),)))
        after = _scraped(registry)
        assert after["is_leader"] == after["leaderships_total"] == {(): 1}
        assert after["commit_index"] == after["applied_index"] == {(): applied.index}
        assert after["apply_lag_entries"] == {(): 0}
        assert after["records"]["dynamic_config",] == 3
        proposed_before, proposed = before["commands_proposed_total"][()], after["commands_proposed_total"][()]
        assert isinstance(proposed, int)
        assert isinstance(proposed_before, int)
        assert proposed - proposed_before >= 3
        writes = after["log_write_seconds"][()]
        assert isinstance(writes, Histogram)
        assert 3 <= sum(writes.counts) <= applied.index + 5
    await transport.close()
