"""Behind ``stratalog tier scrub --repair``: opens the sources of intact bytes, and describes each repair."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from stratalog.hot.session import ledger_session
from stratalog.tier.session import store_session
from stratalog_core.ports import Background
from stratalog_core.system import SystemClock
from stratalog_metadata.records import ManifestPointer, Topic
from stratalog_tiering.config import TieringSettings
from stratalog_tiering.copies.hot_repair import HotLedgers
from stratalog_tiering.copies.repair import Repair, RepairSources
from stratalog_tiering.offload.ownership import check_claim, cluster_id_in
from stratalog_tiering.offload.ports import worker_ports
from stratalog_tiering.offload.topic_descriptors import descriptor_of
from stratalog_tiering.store import ObjectStore

WRITER: Final = "tier-scrub"
"""The writer's name in manifests that a repair commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairFrom:
    """The second copy's URL, None without one, and the metadata nodes of the cluster, none if only the bucket is given."""

    copy: str | None = None
    addresses: Sequence[str] = ()


@asynccontextmanager
async def repair_sources(wanted: RepairFrom, store: ObjectStore, background: Background) -> AsyncIterator[RepairSources]:
    """Open the sources. Raises ``Invalid`` if ``store`` is not the bucket of the cluster, ``Unavailable``."""
    async with AsyncExitStack() as stack:
        copy = await stack.enter_async_context(store_session(wanted.copy)) if wanted.copy is not None else None
        if not wanted.addresses:
            yield RepairSources(copy=copy)
            return
        metadata, ledgers = await stack.enter_async_context(ledger_session(wanted.addresses))
        await check_claim(store, cluster_id_in(metadata))
        ports = worker_ports(
            TieringSettings(worker_id=WRITER), metadata, store, ledgers, SystemClock(), random.SystemRandom(), background
        )  # fmt: skip
        yield RepairSources(
            copy=copy,
            hot=HotLedgers(ports),
            pointers={(each.topic_id, each.index): each for each in metadata.view.all(ManifestPointer)},
            topics={each.topic_id: descriptor_of(each) for each in metadata.view.all(Topic) if not each.internal},
            has_metadata=True,
        )


def repair_row(repair: Repair | None) -> dict[str, Any]:
    """Return the result of a repair for JSON. None: there is no repair for this kind of finding."""
    if repair is None:
        return {"repaired_from": None, "not_repaired": "there is no repair for it"}
    return {"repaired_from": repair.source.value if repair.source is not None else None, "not_repaired": repair.problem}


def repair_text(row: Mapping[str, Any]) -> str:
    """Return a line about the repair of a finding."""
    source = row["repaired_from"]
    return f"repaired from the {source}" if source else f"not repaired: {row['not_repaired']}"
