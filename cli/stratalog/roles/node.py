"""The settings that every process has besides its component's: metadata quorum, store, logging."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_core.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The table ``[node]`` of a configuration file, or ``STRATALOG_NODE_…``."""

    metadata: tuple[str, ...] = setting((), help="addresses of the metadata nodes, as HOST:PORT")
    store: str = setting(
        "",
        help="object store: a directory, s3://bucket/prefix?endpoint=URL&region=NAME, az://container/prefix?account=NAME or"
        " gs://bucket/prefix",
    )
    second_store: str = setting("", help="store of a second copy of the history, like store; empty: none")
    cache_dir: str = setting("", help="directory for cold blocks, used if [cold] disk_bytes is not 0; emptied at start")
    log_level: str = setting("info", help="minimum severity that is logged", choices=("debug", "info", "warning", "error"))
    log_file: str = setting("", help="file to log to; standard error if empty")
    stop_timeout_s: float = setting(15.0, help="time for an orderly stop after SIGTERM", minimum=0.1, maximum=600)
    turn_us: int = setting(
        0,
        help="CPU time slice of a broker, bookie or metadata node; set 100 on machines shared with other load; 0: the system's",
        minimum=0,
        maximum=100_000,
    )
