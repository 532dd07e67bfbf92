"""The names of SQL views, without a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Conflict
from stratalog_pipeline import views

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket


@pytest.mark.parametrize("others", [("shop.orders", "shop_orders"), ("Orders", "orders")])
def test_topics_whose_views_spark_could_not_tell_apart_are_refused(cold_bucket: ColdBucket, others: tuple[str, str]) -> None:
    for topic in others:
        cold_bucket.add_topic(topic, [[[bytes(build_batch([Record(offset=0, timestamp_ms=1, key=None, value=b"v")]))]]])
    no_session: Any = None
    with pytest.raises(Conflict, match=rf"topics '{others[0]}' and '{others[1]}' would both be view"):
        views(no_session, cold_bucket.url)
