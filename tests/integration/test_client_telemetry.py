"""Unmodified clients push the metrics that an operator subscribed to, and the brokers show them."""

from __future__ import annotations

import time
from http.client import HTTPConnection

import pytest
from confluent_kafka import Producer
from integration.process_cluster import ProcessCluster

from stratalog_loadgen import java_tools as tools

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("java_tools")]
_TIMEOUT_S = 120.0
_COMMAND = "org.apache.kafka.tools.ClientMetricsCommand"


def _shown(cluster: ProcessCluster) -> str:
    """Return the metrics of all brokers."""
    pages = []
    for process in cluster.processes("broker"):
        host, _, port = str(process["http"]).rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", "/metrics")
        pages.append(connection.getresponse().read().decode())
        connection.close()
    return "".join(pages)


def test_librdkafka_and_java_push_their_metrics(cluster: ProcessCluster) -> None:
    topic, name = cluster.new_topic(), cluster.new_group()
    options = ("--bootstrap-server", cluster.bootstrap, "--name", name)
    metrics = "org.apache.kafka.producer.,org.apache.kafka.consumer."
    tools.run_tool(_COMMAND, *options, "--alter", "--metrics", metrics, "--interval", "200")
    try:
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "client.id": "pushing", "log_level": 0})
        deadline = time.monotonic() + _TIMEOUT_S
        while 'client_id="pushing"' not in (shown := _shown(cluster)) and time.monotonic() < deadline:
            producer.produce(topic, b"value")
            producer.poll(0.2)
        producer.flush(_TIMEOUT_S)
        assert 'metric="org.apache.kafka.producer.connection.creation' in shown
        # The last push of a Java consumer comes when it is closed.
        tools.consume(cluster.bootstrap, topic, records=1)
        deadline = time.monotonic() + _TIMEOUT_S
        while 'metric="org.apache.kafka.consumer.' not in (shown := _shown(cluster)):
            assert time.monotonic() < deadline, shown
            time.sleep(0.2)
        assert "stratalog_broker_telemetry_pushes_total" in shown
    finally:
        tools.run_tool(_COMMAND, *options, "--delete")
