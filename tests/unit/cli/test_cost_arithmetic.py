"""Price files, and the arithmetic of a month's cost: minimum durations and sizes, requests, replays, another retention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stratalog.commands.cost import duration_s
from stratalog.cost.monthly import DAY_S, MONTH_DAYS, MONTH_S, Replays, monthly_cost
from stratalog.cost.prices import GB, Prices, load_prices, parse_prices, shipped_names, shipped_text
from stratalog.cost.usage import SWEEP_DAYS, Activity, Departure, Requests, TopicUsage
from stratalog_core.errors import Invalid, NotFound
from stratalog_tiering.store.azure import TIERS

STANDARD = load_prices("s3-standard")
KIB = 1024


def usage_of(**changes: object) -> TopicUsage:
    """One live segment of 10 GB and two copies of a GB on bookies; a GB was offloaded within the last day."""
    made = TopicUsage(
        topic="t",
        partitions=1,
        hot_bytes=2 * GB,
        live=Counter({10 * GB: 1}),
        activity=Activity(seconds=DAY_S, offloads=1, offloaded_bytes=GB),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def prices_with(**segments: float) -> Prices:
    return msgspec.structs.replace(STANDARD, segments=msgspec.structs.replace(STANDARD.segments, **segments))


def test_shipped_prices_are_complete() -> None:
    assert shipped_names() == [
        "azure-cold", "azure-cool", "azure-hot", "gcs-standard", "minio", "s3-glacier-ir", "s3-standard", "s3-standard-ia"
    ]  # fmt: skip
    for name in shipped_names():
        assert load_prices(name).name == name


@pytest.mark.parametrize(
    "names", [("s3-standard", "s3-standard-ia", "s3-glacier-ir"), ("azure-hot", "azure-cool", "azure-cold")]
)
def test_colder_classes_are_cheaper_to_keep_and_dearer_to_use(names: Sequence[str]) -> None:
    warm, *cold = prices = [load_prices(name) for name in names]
    colder = [each.segments for each in prices]
    assert [each.storage_per_gb_month for each in colder] == sorted((e.storage_per_gb_month for e in colder), reverse=True)
    assert [each.minimum_days for each in colder] == [0, 30, 90]
    uses = [(each.put_per_1000, each.get_per_1000, each.retrieval_per_gb) for each in colder]
    assert uses == sorted(uses)
    assert warm.other_objects is None
    others = msgspec.structs.replace(warm.segments, storage_class="")
    assert [each.other_objects for each in cold] == [others] * 2, "manifests and pages are in the bucket's default class"


def test_the_tiers_of_azure_are_those_that_the_store_accepts() -> None:
    assert [load_prices(f"azure-{tier.lower()}").segments.storage_class for tier in TIERS] == list(TIERS)


def test_a_price_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(shipped_text("s3-standard").replace('name = "s3-standard"', 'name = "mine"').replace("0.023", "0.02"))
    assert load_prices(str(file)).segments.storage_per_gb_month == 0.02


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("storage_per_gb_month = 0.023", "storage_per_gb_month = -1", "`float` >= 0"),
        ("put_per_1000 = 0.005", "", "missing required field `put_per_1000`"),
        ("put_per_1000", "put_per_thousand", "unknown field `put_per_thousand`"),
        ('currency = "USD"', "currency = 3", "Expected `str`"),
        ("[segments]", "[segments", "Expected ']'"),
    ],
)
def test_a_bad_price_file_is_refused_with_the_place_and_the_remedy(before: str, after: str, problem: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_prices(shipped_text("s3-standard").replace(before, after), "mine.toml")
    assert "price file mine.toml is not valid" in refused.value.message
    assert problem in refused.value.message
    assert "stratalog cost --print-prices s3-standard" in refused.value.message


def test_unknown_prices_are_refused_with_the_names() -> None:
    with pytest.raises(NotFound, match=f"no prices 'gold': choose one of {', '.join(shipped_names())}"):
        load_prices("gold")


def test_storage_and_hot_copies_cost_by_the_gigabyte() -> None:
    cost = monthly_cost(usage_of(removed=Counter({GB: 1}), others=Counter({GB // 2: 2})), STANDARD)
    assert cost.cold_bytes == 12 * GB
    assert cost.storage == pytest.approx(12 * 0.023)
    assert cost.hot == pytest.approx(2 * 0.08)
    assert cost.total == pytest.approx(cost.storage + 0.16)


def test_without_metadata_hot_copies_are_unknown_and_not_in_the_total() -> None:
    cost = monthly_cost(usage_of(hot_bytes=None), STANDARD)
    assert cost.hot is None
    assert cost.total == cost.storage


def test_small_segments_are_billed_with_the_minimum_size_and_other_objects_by_their_own_class() -> None:
    usage = usage_of(live=Counter({KIB: 1000, 256 * KIB: 10}), others=Counter({KIB: 1000}))
    cost = monthly_cost(usage, load_prices("s3-standard-ia"))
    assert cost.storage == pytest.approx((1000 * 128 * KIB + 10 * 256 * KIB) / GB * 0.0125 + 1000 * KIB / GB * 0.023)
    assert cost.cold_bytes == 1000 * KIB + 10 * 256 * KIB + 1000 * KIB


def test_a_segment_deleted_early_is_billed_for_the_rest_of_the_minimum_duration() -> None:
    usage = usage_of()
    usage.activity.merged_away = Counter({Departure(GB, 2): 3})
    usage.activity.expired = Counter({Departure(GB, 40): 1})
    cost = monthly_cost(usage, prices_with(minimum_days=30, storage_per_gb_month=1.0))
    # Three each day, all month, for 28 days each.
    assert cost.early_deletion == pytest.approx(3 * MONTH_DAYS * 28 / MONTH_DAYS)
    assert monthly_cost(usage, STANDARD).early_deletion == 0


def test_requests_are_projected_to_a_month_and_priced_by_their_class() -> None:
    usage = usage_of(sweep_listings=5 * SWEEP_DAYS)
    usage.activity.requests = Requests(segment_puts=10, segment_gets=20, other_puts=30, other_gets=40)
    cost = monthly_cost(usage, load_prices("s3-standard-ia"))
    assert cost.put_requests == round(10 * MONTH_DAYS) + round(35 * MONTH_DAYS)
    assert cost.get_requests == round(20 * MONTH_DAYS) + round(40 * MONTH_DAYS)
    thousands = MONTH_DAYS / 1000
    priced = 10 * 0.01 + 20 * 0.001 + 35 * 0.005 + 40 * 0.0004
    assert cost.requests == pytest.approx(priced * thousands, rel=0.01)


def test_replays_cost_requests_retrieval_and_egress() -> None:
    usage = usage_of(replay_requests=Requests(segment_gets=10_000, other_gets=1))
    prices = load_prices("s3-glacier-ir")
    cost = monthly_cost(usage, prices, Replays(per_month=3, egress_share=0.5))
    assert cost.get_requests == 30_003
    assert cost.egress == pytest.approx(3 * 10 * 0.5 * 0.09)
    workers = GB * MONTH_DAYS / GB * 0.03  # each new segment is read back once
    assert cost.retrieval == pytest.approx(3 * 10 * 0.03 + workers)
    assert monthly_cost(usage, prices).egress == 0


def test_another_retention_keeps_the_present_intake_for_that_long() -> None:
    usage = usage_of(removed=Counter({GB: 1}), replay_requests=Requests(segment_gets=100))
    month, year = (monthly_cost(usage, STANDARD, Replays(per_month=1), days) for days in (30, 365))
    assert (month.cold_bytes, year.cold_bytes) == (31 * GB, 366 * GB)
    assert [month.storage, year.storage] == pytest.approx([31 * 0.023, 366 * 0.023])
    assert (month.get_requests, year.get_requests) == (300, 3650)
    assert year.egress == pytest.approx(365 * 0.09)
    assert month.retention_days == 30


def test_a_retention_below_the_minimum_duration_is_billed_for_that() -> None:
    usage = usage_of()
    usage.activity.expired = Counter({Departure(GB, 1): 1})
    week = monthly_cost(usage, prices_with(minimum_days=90), retention_days=7)
    assert week.cold_bytes == 7 * GB
    assert week.storage == pytest.approx(90 * 0.023)
    assert week.early_deletion == 0  # the minimum is in the storage already


def test_small_segments_stay_small_with_another_retention() -> None:
    usage = usage_of(live=Counter({64 * KIB: 100}), activity=Activity(seconds=DAY_S, offloaded_bytes=GB))
    cost = monthly_cost(usage, prices_with(minimum_object_bytes=128 * KIB), retention_days=10)
    assert cost.storage == pytest.approx(2 * 10 * 0.023)


def test_the_observed_time_decides_the_projection() -> None:
    usage = usage_of(activity=Activity(seconds=MONTH_S, offloaded_bytes=73 * GB, requests=Requests(other_puts=1000)))
    cost = monthly_cost(usage, STANDARD, retention_days=30)
    assert cost.put_requests == 1000
    assert cost.cold_bytes == pytest.approx(73 * GB / MONTH_DAYS * 30)


def test_a_first_test_of_a_topic_is_not_projected_as_if_it_went_on_all_month() -> None:
    minute = Activity(seconds=60, offloaded_bytes=GB, requests=Requests(other_puts=10))
    cost = monthly_cost(usage_of(activity=minute), STANDARD, retention_days=1)
    assert (cost.put_requests, cost.cold_bytes) == (7300, 24 * GB)


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * DAY_S), ("12h", 43_200), ("15m", 900), ("2y", 730 * DAY_S)])
def test_durations(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0d", "1.5d", "forever"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="give a number and a unit, such as 30d"):
        duration_s(text)
