"""The cluster under measurement: real processes over a MinIO, with a proxy between the broker and the store when one is wanted.

One broker, so that its processor time and memory are those of the reads. It reads the store directly where speed counts; where
the store must be slow, frozen or counted byte by byte, it is started again with the proxy's address.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil
from chaos.links import Link
from chaos.proxy_process import ProxyProcess

from benchmarks.systems import Stratalog, cpu_s_of
from stratalog.local.launcher import LocalCluster
from stratalog.local.minio import NAME as MINIO
from stratalog.local.minio import store_url
from stratalog.local.plan import Sizes, Tables, plan_cluster, to_toml
from stratalog.local.secrets import store_environment
from stratalog_loadgen.processes.loads import Payload
from stratalog_loadgen.runs.produce import measure_produce
from stratalog_loadgen.settings import Topics, Traffic, Window
from stratalog_loadgen.topics import prepared

MIB: Final = 1024 * 1024
BROKER: Final = "broker-1"
_START_S: Final = 120.0
_QUIET_SAMPLES, _QUIET_SAMPLE_S, _QUIET_CPU_S = 3, 0.5, 0.02
_SIZES: Final = Sizes(metadata=1, bookies=3, brokers=1, tiering=1)
_HOT_ONLY: Final = {"remote.storage.enable": "false"}
_BROKER_LINK: Final = f"{BROKER}>{MINIO}"
_CONTROL_LINK: Final = f"control>{MINIO}"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of all measures. ``rounds`` is the number of pairs of a measure and its control."""

    rounds: int = 3
    history_mb: int = 1024
    catch_up_mb: int = 4096
    hot_mb: int = 512
    offload_mb: int = 512
    seeks: int = 100
    get_ms: float = 30.0
    window_s: float = 8.0
    cold_readers: int = 20
    records_per_s: int = 2_000
    catch_up_records_per_s: int = 20_000
    record_bytes: int = 1_000
    batch_bytes: int = 131_072
    segment_mb: int = 64
    broker_memory_mb: int = 512
    settle_s: float = 30.0


class FromStore(NamedTuple):
    """Bytes by who received them."""

    broker: int
    control: int


class Stage:
    """The running cluster and the topics that measures share."""

    def __init__(self, data: Path, options: Options) -> None:
        self.options = options
        self.system = Stratalog(data)
        self._data = data
        self._local = LocalCluster(data, say)
        self._is_through_proxy = False
        self._cold: dict[int, str] = {}
        self._hot = ""
        plan = plan_cluster(
            data, _SIZES, cluster_id=urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("="), store=None, minio=True
        )
        (store,) = plan.state.of_role("store")
        self._direct = store.address
        self._local.lay_out(plan)
        (data / "logs").mkdir(exist_ok=True)
        links = [Link(source=source, target=MINIO, address=store.address) for source in (BROKER, "control")]
        self._proxy = ProxyProcess(links, data / "logs" / "proxy.log")
        self._broker: Tables = plan.configurations[BROKER]
        self._configure_broker(store.address)

    def start(self) -> None:
        self._local.start((), timeout_s=_START_S)

    def close(self) -> None:
        self._local.stop(())
        self._proxy.close()

    # -- broker and store

    @property
    def bootstrap(self) -> str:
        return self.system.bootstrap

    @property
    def credentials(self) -> dict[str, str]:
        """Environment of a process that uses the store."""
        return dict(store_environment(self._data))

    def store(self, *, through_proxy: bool = False) -> str:
        """The store's URL for a control, which has a link of its own through the proxy."""
        return store_url(self._proxy.addresses[_CONTROL_LINK] if through_proxy else self._direct)

    def read_directly(self) -> None:
        """Have the broker read the store without the proxy."""
        if self._is_through_proxy:
            self.restart_broker()

    def restart_broker(self, *, through_proxy: bool = False) -> None:
        """Start the broker again, with empty caches. The links of the proxy pass everything again."""
        self.set_store("pass")
        self._is_through_proxy = through_proxy
        self._configure_broker(self._proxy.addresses[_BROKER_LINK] if through_proxy else self._direct)
        self._local.restart([BROKER], timeout_s=_START_S)

    def wait_until_idle(self) -> None:
        """Wait until the broker is idle: one that serves goes on loading Kafka's message classes, a second of CPU in all.

        At most for ``settle_s``: it is no reason to fail if a machine is too busy to tell.
        """
        process, quiet = self.broker_process(), 0
        deadline, before = time.monotonic() + self.options.settle_s, cpu_s_of(process)
        while quiet < _QUIET_SAMPLES and time.monotonic() < deadline:
            time.sleep(_QUIET_SAMPLE_S)
            now = cpu_s_of(process)
            quiet = quiet + 1 if now - before <= _QUIET_CPU_S else 0
            before = now

    def set_store(self, mode: str) -> None:
        """``pass``, ``late`` by the time of the options for each request, or ``cut``: no byte passes."""
        assert mode in ("pass", "late", "cut"), mode
        self._proxy.set_mode(mode, [_BROKER_LINK, _CONTROL_LINK], delay_s=self.options.get_ms / 1000)  # type: ignore[arg-type]

    def bytes_from_store(self) -> FromStore:
        """Bytes that the store has sent through the proxy so far, headers included."""
        return FromStore(*map(self._proxy.backward_bytes, (_BROKER_LINK, _CONTROL_LINK)))

    def broker_process(self) -> psutil.Process:
        return psutil.Process(next(pid for role, pid in self.system.pids() if role == "broker"))

    def _configure_broker(self, store: str) -> None:
        node = {**self._broker["node"], "store": store_url(store)}
        broker = {**self._broker["broker"], "memory_bytes": self.options.broker_memory_mb * MIB}
        tables = {**self._broker, "node": node, "broker": broker}
        (self._data / "config" / f"{BROKER}.toml").write_text(to_toml(tables))

    # -- topics

    @property
    def traffic(self) -> Traffic:
        return Traffic(payload=Payload(record_bytes=self.options.record_bytes), batch_bytes=self.options.batch_bytes)

    def cold_topic(self, partitions: int) -> str:
        """A topic of that many partitions whose ``history_mb`` are in the object store only; made once."""
        if partitions not in self._cold:
            say(f"writing and offloading {self.options.history_mb} MB in {partitions} partitions")
            topic = self.filled_topic(partitions, self.options.history_mb)
            self.system.make_cold(topic)
            self._cold[partitions] = topic
        return self._cold[partitions]

    def hot_topic(self) -> str:
        """A topic of ``hot_mb`` on bookies that is never offloaded; made once."""
        if not self._hot:
            self._hot = self.filled_topic(4, self.options.hot_mb, hot_only=True)
        return self._hot

    def filled_topic(self, partitions: int, megabytes: int, *, hot_only: bool = False, segment_mb: int = 0) -> str:
        """A new topic with that much in it, on bookies."""
        topic = self.new_topic(partitions, hot_only=hot_only, segment_mb=segment_mb)
        records = max(partitions, megabytes * 1_000_000 // self.options.record_bytes)
        measure_produce(self.bootstrap, Topics(name=topic), self.traffic, Window(warmup_s=0.0), records=records)
        return topic

    def new_topic(self, partitions: int, *, hot_only: bool = False, segment_mb: int = 0) -> str:
        """A new topic whose ledgers are sealed at ``segment_mb`` (0: that of the options)."""
        configs = _HOT_ONLY if hot_only else {"segment.bytes": str((segment_mb or self.options.segment_mb) * MIB)}
        with prepared(self.bootstrap, Topics(partitions=partitions, keep=True, configs=configs)) as place:
            return place.names[0]

    def stored_bytes(self, topic: str) -> int:
        """Bytes of the topic's segments in the object store."""
        partitions = json.loads(self.system.output("tier", "status", topic, "--json"))["partitions"]
        return sum(int(partition["cold_bytes"]) for partition in partitions)


@contextmanager
def running(data: Path, options: Options) -> Iterator[Stage]:
    """A started cluster below ``data``, an empty directory; stopped at the end."""
    stage = Stage(data, options)
    try:
        stage.start()
        yield stage
    finally:
        stage.close()


def say(line: str) -> None:
    """Progress, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
