"""``stratalog ready``: only a process that serves is ready."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from unit.broker.mini_cluster import MiniCluster, in_thread, run_cluster

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode
from stratalog.local.ports import free_ports
from stratalog.local.readiness import wait_for_brokers, wait_for_registrations
from stratalog_core.errors import StratalogError, Unavailable


def ready(role: str, environment: dict[str, str], timeout_s: float = 60.0) -> str:
    """Output of a check that succeeds; raises what makes it fail."""
    done = CliRunner().invoke(stratalog, ["ready", role, "--timeout", str(timeout_s)], env=environment)
    if isinstance(done.exception, StratalogError):
        raise done.exception
    assert done.exit_code == ExitCode.OK, done.output
    return done.output


@pytest.mark.parametrize("role", ["metadata", "bookie", "broker", "tiering"])
def test_a_role_that_does_not_run_is_not_ready(role: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    environment = {
        "STRATALOG_NODE_METADATA": address,
        "STRATALOG_METADATA_LISTEN": address,
        "STRATALOG_METADATA_DATA_DIR": str(tmp_path),
        "STRATALOG_BOOKIE_LISTEN": address,
        "STRATALOG_BOOKIE_BOOKIE_ID": "bookie-1",
        "STRATALOG_BOOKIE_DATA_DIRS": str(tmp_path),
        "STRATALOG_BROKER_LISTEN": address,
        "STRATALOG_BROKER_BROKER_ID": "1",
        "STRATALOG_TIERING_WORKER_ID": "tiering-1",
    }
    with pytest.raises(Unavailable):
        ready(role, environment, timeout_s=0.5)


async def test_a_broker_is_ready_while_all_its_listeners_answer_and_it_is_registered(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, listen=("127.0.0.1:0", "inside=127.0.0.1:0")) as cluster:
        environment = environment_of(cluster)
        assert "broker 1 is registered" in await in_thread(lambda: ready("broker", environment))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            listen = f"{environment['STRATALOG_BROKER_LISTEN']},other=127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(Unavailable):
                await in_thread(lambda: ready("broker", environment | {"STRATALOG_BROKER_LISTEN": listen}, timeout_s=0.5))
        with pytest.raises(Unavailable, match="broker 9 is not registered"):
            await in_thread(lambda: ready("broker", environment | {"STRATALOG_BROKER_BROKER_ID": "9"}))


def environment_of(cluster: MiniCluster) -> dict[str, str]:
    (record,) = cluster.broker.advertised_brokers.live()
    (inside,) = record.endpoints
    return {
        "STRATALOG_NODE_METADATA": ",".join(cluster.addresses),
        "STRATALOG_BROKER_LISTEN": f"{cluster.broker.kafka_address},inside=127.0.0.1:{inside.port}",
        "STRATALOG_BROKER_BROKER_ID": str(record.broker_id),
    }


async def test_a_broker_that_answers_and_is_not_registered_is_waited_for(tmp_path: Path) -> None:
    async with run_cluster(tmp_path, brokers=0) as cluster:
        broker = (await cluster.start_broker(1, registers=False)).server
        address = broker.kafka_address

        def wait(timeout_s: float) -> None:
            wait_for_registrations(cluster.addresses, [address, "bookie-1"], lambda: None, timeout_s=timeout_s)

        await in_thread(lambda: wait_for_brokers(address, [address], lambda: None, timeout_s=60))
        with pytest.raises(Unavailable, match=f"{address} did not register"):
            await in_thread(lambda: wait(0.5))
        await broker.start()
        await in_thread(lambda: wait(60))
