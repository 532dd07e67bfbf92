"""A workload of OpenMessaging Benchmark: producers and subscriptions at once, or a backlog that is built up and drained."""

from __future__ import annotations

import msgspec

from stratalog_loadgen.processes.workers import OnProgress
from stratalog_loadgen.results.result import Result
from stratalog_loadgen.runs.consume import measure_catch_up, measure_tail
from stratalog_loadgen.workload_file import Plan, Workload


def measure_workload(bootstrap: str, workload: Workload, plan: Plan, *, on_progress: OnProgress = lambda _: None) -> Result:
    """With a backlog, the file's duration gives way to the time that draining takes, as in OpenMessaging Benchmark."""
    if plan.backlog_bytes:
        found = measure_catch_up(
            bootstrap,
            plan.topics,
            plan.traffic,
            plan.readers,
            history_bytes=plan.backlog_bytes,
            records_per_s=plan.records_per_s,
            on_progress=on_progress,
        )
    else:
        found = measure_tail(
            bootstrap,
            plan.topics,
            plan.traffic,
            plan.readers,
            plan.window,
            records_per_s=plan.records_per_s,
            on_progress=on_progress,
        )
    return msgspec.structs.replace(found, what=f"workload {workload.name}")
