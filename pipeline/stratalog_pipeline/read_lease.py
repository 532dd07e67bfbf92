"""The lease of one read by Spark. The planner writes it and ends; each task that reads the bucket renews it when it is due.

It is written after planning, because what leaves the history during planning is kept for a grace period.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from uuid import UUID

from stratalog_core.errors import StratalogError
from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_tiering.cold.lease import SharedLease, user_name

_log = logging.getLogger(__name__)


def write_lease(bucket: Bucket, options: ReadOptions, topic_ids: Iterable[UUID], begun_ms: int) -> SharedLease | None:
    """Write the lease of a read of these topics whose planning began at the wall time ``begun_ms``.

    None, and a line in the log, if that fails; None if nothing is read or the options do not want a lease.
    """
    topics = [*topic_ids]
    if not topics or not options.takes_lease:
        return None
    lease = SharedLease.of(f"Spark by {user_name()}", topics, begun_ms)
    try:
        bucket.run(lease.write(bucket.store))
    except StratalogError as failure:
        _log.info("the read has no lease, so what it reads may be deleted after the grace period: %s", failure.message)
        return None
    return lease


@contextmanager
def kept(bucket: Bucket, lease: SharedLease | None) -> Iterator[None]:
    """Renew ``lease`` while a task within reads."""
    if lease is None:
        yield
        return
    with bucket.running(lease.keep(bucket.store, SystemClock())):
        yield
