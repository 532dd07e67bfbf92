"""The lease of a job on the topics that it reads, so that nothing of them is deleted before the job has ended."""

from __future__ import annotations

import getpass
import logging
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stratalog_core.errors import Invalid, StratalogError
from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import is_wanted
from stratalog_tiering.cold.lease import DURATION_MS, HeldLease, LeaseExpired

RETRY_S: Final = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def reader_lease(bucket: Bucket, options: ReadOptions, job: str, duration_ms: int = DURATION_MS) -> Iterator[None]:
    """Hold a lease on the topics that ``options`` select, and renew it, while the job within reads them.

    Raises ``LeaseExpired`` instead of the job's own error, or at its end, if the lease could not be renewed in time. With
    credentials that may not write, the job runs without a lease, and a warning says so.
    """
    topics = [topic.topic_id for topic in bucket.topics() if is_wanted(options.wanted, topic.name)]
    holder = f"{job} by {getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
    lease = HeldLease(bucket.store, SystemClock(), random.SystemRandom().getrandbits(64), holder, topics, duration_ms)
    try:
        bucket.run(lease.acquire())
    except Invalid as refused:
        _log.warning("the job runs without a lease, so objects may be deleted after the grace period: %s", refused.message)
        yield
        return
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(bucket, lease, ended), name="stratalog-lease", daemon=True)
    renewing.start()
    try:
        yield
    except StratalogError as failure:
        _raise_expired(lease, failure)
        raise
    else:
        lease.check()
    finally:
        ended.set()
        renewing.join()
        _release(bucket, lease)


def _raise_expired(lease: HeldLease, failure: StratalogError) -> None:
    try:
        lease.check()
    except LeaseExpired as expired:
        raise expired from failure


def _renew(bucket: Bucket, lease: HeldLease, ended: threading.Event) -> None:
    pause_s = lease.renew_after_s
    while not ended.wait(pause_s):
        try:
            bucket.run(lease.renew())
            pause_s = lease.renew_after_s
        except LeaseExpired:
            return
        except StratalogError as failure:
            _log.warning("the job's lease was not renewed, and will be again: %s", failure.message)
            pause_s = min(RETRY_S, lease.renew_after_s)


def _release(bucket: Bucket, lease: HeldLease) -> None:
    try:
        bucket.run(lease.release())
    except StratalogError as failure:
        _log.info("the job's lease was not deleted and will expire: %s", failure.message)
