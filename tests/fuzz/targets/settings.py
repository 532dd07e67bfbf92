"""Files that people edit, and the frames that carry everything between our processes."""

from __future__ import annotations

from functools import partial

from fuzz.target import Target, scratch_directory
from stratalog.local.state import ClusterState, ProcessState, load_state, save_state, state_path
from stratalog_bookies.config import BookieSettings
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_core.config import load
from stratalog_core.connections import framing
from stratalog_core.errors import Conflict
from stratalog_metadata.node.config import MetadataSettings
from stratalog_pipeline.options import parse_options
from stratalog_tiering.config import TieringSettings

_SECTIONS = {"metadata": MetadataSettings, "bookie": BookieSettings, "broker": BrokerSettings, "tiering": TieringSettings}
_CONFIGURATION = b"""
[metadata]
data_dir = "data"
peers = ["1=127.0.0.1:1"]
election_timeout_ms = 500
[bookie]
bookie_id = "b"
data_dirs = ["a", "b"]
collect_interval_s = 0.5
[broker]
broker_id = 1
listen = "127.0.0.1:0"
auto_create_topics = false
[tiering]
worker_id = "w"
"""


def load_configuration(content: bytes) -> None:
    with scratch_directory() as directory:
        file = directory / "stratalog.toml"
        file.write_bytes(content)
        for section, settings in _SECTIONS.items():
            load(settings, section=section, file=file)


def load_cluster(content: bytes) -> None:
    with scratch_directory() as directory:
        state_path(directory).write_bytes(content)
        save_state(directory, load_state(directory))


def clusters() -> list[bytes]:
    process = ProcessState(name="broker-1", role="broker", address="127.0.0.1:1", pid=3, started_at=1.5)
    with scratch_directory() as directory:
        save_state(directory, ClusterState(bootstrap="b", metadata="m", store="s", processes=(process,)))
        return [state_path(directory).read_bytes()]


def parse_spark_options(name: str, content: bytes) -> None:
    parse_options({"path": "file:///x", "subscribe": "a", name: content.decode("utf-8", "replace")})


def read_frame(content: bytes) -> None:
    """Length, header, and the body as an error answer."""
    if len(content) >= framing.HEADER_BYTES:
        framing.unpack_header(content)
        framing.encode_error(framing.decode_error(content[framing.HEADER_BYTES :]))


def frames() -> list[bytes]:
    body = framing.encode_error(Conflict("no", key="k", expected=[1, None], found={"a": b"b"}))
    return [framing.pack_header(framing.ERROR, 3, 7, len(body)) + body]


TARGETS = (
    Target(name="configuration", run=load_configuration, seeds=lambda: [_CONFIGURATION]),
    Target(name="cluster-file", run=load_cluster, seeds=clusters),
    Target(
        name="spark-offsets",
        run=partial(parse_spark_options, "startingOffsets"),
        seeds=lambda: [b'{"a": {"0": 23, "1": -2}}', b"earliest"],
    ),
    Target(name="frame", run=read_frame, seeds=frames),
)
