"""The lease of a job on the topics that it reads, so that nothing of them is deleted before the job has ended."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

from stratalog_core.system import SystemClock
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import ReadOptions
from stratalog_pipeline.planning import is_wanted
from stratalog_tiering.cold.lease import DURATION_MS, HeldLease, held, holder_name


@contextmanager
def reader_lease(
    bucket: Bucket, options: ReadOptions, job: str, more_ids: Collection[UUID] = (), duration_ms: int = DURATION_MS
) -> Iterator[None]:
    """Hold a lease on the topics that ``options`` select and on ``more_ids``, and renew it, while the job within reads them.

    Raises ``LeaseExpired`` instead of the job's own error, or at its end, if the lease could not be renewed in time. With
    credentials that may not write, the job runs without a lease, and a warning says so.
    """
    number = random.SystemRandom().getrandbits(64)
    selected = [topic.topic_id for topic in bucket.topics() if is_wanted(options.wanted, topic.name)]
    topics = list(dict.fromkeys((*selected, *more_ids)))
    lease = held(HeldLease(bucket.store, SystemClock(), number, holder_name(job), topics, duration_ms))
    bucket.run(lease.__aenter__())
    try:
        yield
    except BaseException as failure:
        bucket.run(lease.__aexit__(type(failure), failure, failure.__traceback__))
        raise
    else:
        bucket.run(lease.__aexit__(None, None, None))
