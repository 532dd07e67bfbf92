"""Internal topics with many batches: what a takeover holds of them is bounded, and so is what it has to replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from unit.broker.partitions.test_internal_topics import offsets_of_one_broker, restart

from stratalog_bookies.client import LedgerClient
from stratalog_bookies.client.core.entry import Entry
from stratalog_broker.partitions import ledger_trimming
from stratalog_core.errors import Unavailable
from stratalog_metadata.records import Ledger

COMMITS = 20
EXPECTED = {number: 100 + number for number in range(COMMITS)}


class Reads:
    """The reads of whole entries of all ledger clients; the one numbered ``failing`` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = -1) -> None:
        self.bytes_max: list[int] = []
        self.lengths: list[int] = []
        read = LedgerClient.read

        async def counted(client: LedgerClient, ledger: Ledger, first: int, last: int, max_bytes: int) -> Sequence[Entry]:
            self.bytes_max.append(max_bytes)
            if len(self.bytes_max) - 1 == failing:
                raise Unavailable("no bookie answers")
            entries = await read(client, ledger, first, last, max_bytes)
            self.lengths.append(sum(len(entry.payload) for entry in entries))
            return entries

        monkeypatch.setattr(LedgerClient, "read", counted)


@pytest.mark.parametrize("failing", [-1, 0, 2])
async def test_a_log_is_read_in_pieces_while_it_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        for partition, offset in EXPECTED.items():
            await offsets.commit(partition, offset)
        reads = Reads(monkeypatch, failing)
        await restart(cluster, checkpoint_part_bytes=600)
        assert await offsets.committed() == EXPECTED
    assert max(reads.lengths) <= 600
    assert len(reads.bytes_max) > 3
    assert cluster.broker.partitions.takeover_metrics.takeover_failures == (0 if failing < 0 else 1)


async def test_a_ledger_is_as_large_as_its_checkpoint_or_its_replay_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_trimming, "LEDGER_BYTES", 1000)
    async with offsets_of_one_broker(tmp_path) as (cluster, offsets):
        await offsets.commit(0, 100)
        log = cluster.broker.partitions.find(offsets.identity)
        assert log is not None
        sizes: dict[int, int] = {}
        for number in range(300):
            await offsets.commit(number, 100)
            log.update_topic(log.topic)
            if log.core.open is not None:
                sizes[log.core.open.ledger_id] = log.core.open.payload_bytes
    (_, first), *others = sizes.items()
    assert 500 < first < 1000
    assert 4 <= len(others) <= 10, "checkpoints grow to 20 KB, so that ledgers grow, too"
    assert sum(sizes.values()) > 30_000
