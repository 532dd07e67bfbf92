"""Checks a cluster: processes, metadata quorum, bookies, brokers, ledgers, placement, offloading, history, store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from stratalog.health.coordinators import check_coordinators
from stratalog.health.disks import check_disks
from stratalog.health.finding import Finding, fail, ok, warn
from stratalog.hot.report import is_lacking, live_bookies
from stratalog.local import processes
from stratalog.local.state import ClusterState
from stratalog.target import existing_store
from stratalog.tier.session import metadata_session, store_session
from stratalog.tier.unrepaired import unrepaired_damage
from stratalog_core.errors import Invalid, NotFound, Refused, StratalogError
from stratalog_core.system import SystemClock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, Broker, Ledger, LedgerState, Partition, TieringWorker, TierStatus, Topic
from stratalog_tiering.format.object_keys import owner_key
from stratalog_tiering.store import ObjectStore, shown_url
from stratalog_tiering.worker.store_probe import probe_store, summary

_DAMAGED_SHOWN_MAX: Final = 10
_STORE_S_MAX: Final = 30.0
"""A store that accepts connections and does not answer is retried for minutes."""


def check_processes(data: Path, state: ClusterState) -> Finding:
    """Check for processes of the cluster in ``data`` that exited by themselves or are stopped."""
    restart = f"`stratalog up --data {data}`" if state.is_embedded else "`stratalog cluster restart NAME`"
    ended = [process.name for process in state.processes if process.pid is not None and processes.running(process) is None]
    stopped = [process.name for process in state.processes if process.pid is None]
    if ended:
        remedy = restart if state.is_embedded else f"see their logs, then {restart}"
        return fail("processes", f"{', '.join(ended)} exited", remedy)
    if stopped:
        return warn("processes", f"{', '.join(stopped)} stopped", restart)
    return ok("processes", f"{len(state.processes)} running")


async def check_metadata(addresses: list[str]) -> list[Finding]:
    """Check the quorum, and all other roles by its records."""
    try:
        async with metadata_session(addresses) as client:
            answers = ok("metadata", f"answers, at log index {client.view.index}")
            return [answers, *_check_view(client.view), *await check_disks(client.view), await check_coordinators(client)]
    except StratalogError as failure:
        return [fail("metadata", failure.message, "start a majority of the metadata nodes; see their logs")]


def _check_view(view: MetadataView) -> Iterator[Finding]:
    yield _check_bookies(view)
    brokers = [broker.broker_id for broker in view.all(Broker)]
    yield ok("brokers", f"{len(brokers)} live") if brokers else fail("brokers", "none is live", "start a broker")
    ownerless = sum(partition.owner not in brokers for partition in view.all(Partition))
    if ownerless:
        yield fail("partitions", f"{ownerless} without a live owner", "wait a few seconds, or start a broker")
    else:
        yield ok("partitions", f"{sum(1 for _ in view.all(Partition))}, all owned")
    yield check_ledgers(view)
    yield check_placement(view)
    yield _check_tiering(view)
    yield from check_history(view)


def _check_bookies(view: MetadataView) -> Finding:
    bookies = list(view.all(Bookie))
    live = [bookie for bookie in bookies if bookie.session_id]
    full = [bookie.bookie_id for bookie in live if bookie.read_only]
    if not live:
        return fail("bookies", f"none of {len(bookies)} is live", "start the bookies")
    if full:
        return fail("bookies", f"{', '.join(full)} read-only", "free disk space there, or add bookies")
    if any(not bookie.session_id and not bookie.draining for bookie in bookies):
        dead = ", ".join(bookie.bookie_id for bookie in bookies if not bookie.session_id and not bookie.draining)
        return warn("bookies", f"{dead} down, {len(live)} live", "start them: until then records have fewer copies")
    return ok("bookies", f"{len(live)} live")


def check_ledgers(view: MetadataView) -> Finding:
    """Check for ledgers with copies on bookies that are down, or on failed disks."""
    live = live_bookies(view)
    ledgers = list(view.all(Ledger))
    lacking = sum(
        any(is_lacking(live, name, ledger.ledger_id) for fragment in ledger.fragments for name in fragment.bookies)
        for ledger in ledgers
    )
    opened = sum(ledger.state is not LedgerState.CLOSED for ledger in ledgers)
    if lacking:
        return warn(
            "ledgers",
            f"{lacking} of {len(ledgers)} are missing a copy",
            "start the bookies that are down and repair failed disks, or wait for re-replication",
        )
    return ok("ledgers", f"{len(ledgers)} hot, {opened} of them open")


def check_placement(view: MetadataView) -> Finding:
    """Check whether copies share a host, either needlessly or because there are too few hosts."""
    bookies = list(view.all(Bookie))
    host_of = {bookie.bookie_id: bookie.failure_host for bookie in bookies}
    hosts = {bookie.failure_host for bookie in bookies if bookie.session_id and not bookie.draining}
    ensembles = [fragment.bookies for ledger in view.all(Ledger) for fragment in ledger.fragments]
    sharing = sum(len({host_of.get(name, name) for name in names}) < min(len(names), len(hosts)) for names in ensembles)
    copies = max((topic.replication_factor for topic in view.all(Topic)), default=1)
    if sharing:
        detail = f"{sharing} of {len(ensembles)} fragments of ledgers have two copies on one host"
        return warn("placement", detail, "the auditor moves closed ones apart: see the bookies' logs if this persists")
    if 1 < len(hosts) < copies:
        detail = f"{len(hosts)} hosts for up to {copies} copies: some share a host"
        return warn("placement", detail, "start bookies on more hosts, or set [bookie] host if addresses mislead")
    return ok("placement", f"copies span up to {min(copies, len(hosts))} of {len(hosts)} hosts")


def _check_tiering(view: MetadataView) -> Finding:
    workers = sum(1 for _ in view.all(TieringWorker))
    failing = [status for status in view.all(TierStatus) if status.last_error]
    if failing:
        detail = f"{len(failing)} partitions cannot be offloaded: {failing[0].last_error}"
        return fail("tiering", detail, "see `stratalog tier status` and the workers' logs")
    if not workers:
        return warn("tiering", "no live worker", "start one: until then bookies fill up")
    return ok("tiering", f"{workers} workers")


def check_history(view: MetadataView) -> list[Finding]:
    """Check for damage that the continuous scrub could not repair. Returns a finding per partition, and one for many more."""
    damaged = unrepaired_damage(view, view.all(Topic))
    findings = [fail("history", each.sentence, each.remedy) for each in damaged[:_DAMAGED_SHOWN_MAX]]
    others = len(damaged) - len(findings)
    if others:
        findings.append(
            fail("history", f"{others} more partitions have damage that is not repaired", "see `stratalog tier status`")
        )
    return findings or [ok("history", "no unrepaired damage is recorded")]


async def check_store(url: str) -> Finding:
    """Check that the store answers, and probe what it guarantees."""
    shown = shown_url(url).split("?", maxsplit=1)[0]
    remedy = "check its address, bucket and credentials (AWS_…, AZURE_…, GOOGLE_…)"
    try:
        async with asyncio.timeout(_STORE_S_MAX), store_session(existing_store(url)) as store:
            with suppress(NotFound):
                await store.head(owner_key(0))
            return await _probe(store)
    except TimeoutError:
        return fail("store", f"{shown}: no answer within {_STORE_S_MAX:.0f} s", remedy)
    except StratalogError as failure:
        return fail("store", f"{shown}: {failure.message}", remedy)


async def _probe(store: ObjectStore) -> Finding:
    try:
        report = await probe_store(store, SystemClock(), random.Random())
    except (Invalid, Refused) as refused:
        return warn(
            "store", f"{store.url} refuses writes: {refused.message}", "tiering workers need credentials that may write"
        )
    try:
        report.check_writable()
    except Invalid as unsafe:
        return fail("store", unsafe.message, "see `stratalog store info`")
    if report.warnings:
        return warn("store", f"{store.url}: {'; '.join(report.warnings)}", "see `stratalog store info`")
    return ok("store", f"{store.url} {summary(report)}")
