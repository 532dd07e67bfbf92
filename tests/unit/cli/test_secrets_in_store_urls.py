"""A secret in a store's URL is refused, and is repeated nowhere: errors, logs, reports, files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog.health.cluster import check_store
from stratalog.health.finding import Verdict
from stratalog_core.errors import Invalid
from stratalog_pipeline.options import parse_options
from stratalog_tiering.store import check_store_url, location_url, s3_location, shown_url

KEY, SECRET = "AKIAEXAMPLEKEY", "wJalrXUtnFEMI/K7MDENG+bPx@RfiCY"
PLANTED = (
    f"s3://{KEY}:{SECRET}@bucket/prefix",
    f"s3://{KEY}:{SECRET}/bucket",
    f"s3://:{SECRET}@bucket",
    f"s3://bucket?endpoint=http://{KEY}:{SECRET}@127.0.0.1:9000",
    f"s3://bucket?endpoint={quote(f'http://{KEY}:{SECRET}@127.0.0.1:9000', safe='')}",
    f"s3://bucket?endpoint=http://127.0.0.1:9000?secret={SECRET}",
    f"s3://bucket?access_key={KEY}&secret_key={SECRET}",
    f"s3://bucket?{SECRET}",
    f"s3://bucket?sse={SECRET}",
    f"s3://bucket?sse=AES256&sse_kms_key_id={SECRET}",
    f"s3://bucket/prefix#{SECRET}",
    f"az://{KEY}:{SECRET}@container/prefix?account=mine",
    f"az://container/{SECRET}@prefix?account=mine",
    f"az://container?account={SECRET}",
    f"az://container?account=mine&sv=2022-11-02&sig={SECRET}",
    f"az://container?account=mine&endpoint=https://mine.blob.core.windows.net?sig={SECRET}",
    f"az://container?account=mine&endpoint=https://{KEY}:{SECRET}@mine.blob.core.windows.net",
    f"az://container/prefix?account=mine#{SECRET}",
    f"https://{KEY}:{SECRET}@127.0.0.1/bucket",
    f"file://{KEY}:{SECRET}@/history",
    f"/history?secret={SECRET}",
)
PIECES = ("wJalrXUtnFEMI", "K7MDENG", "bPx", "RfiCY")


def assert_hidden(text: str) -> None:
    assert not [piece for piece in PIECES if piece in text], text


@pytest.mark.parametrize("url", PLANTED)
async def test_it_is_refused_without_being_repeated(url: str) -> None:
    assert_hidden(shown_url(url))
    finding = await check_store(url)
    assert finding.verdict is Verdict.FAIL
    assert_hidden(repr(finding))
    with pytest.raises(Invalid) as refused:
        parse_options({"path": url, "store": "/other", "subscribe": "events"})
    assert_hidden(refused.value.message)
    if url.startswith("s3:"):
        for parse in (check_store_url, s3_location):
            with pytest.raises(Invalid) as refused:
                parse(url)
            assert_hidden(refused.value.message)


def run(words: Sequence[str], store_in_environment: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stratalog", *words],
        capture_output=True, text=True, timeout=60, check=False,
        env={"STRATALOG_NODE_STORE": store_in_environment} if store_in_environment else {},
    )  # fmt: skip
    assert done.returncode == 2
    return done.stdout + done.stderr


@pytest.mark.parametrize("url", [PLANTED[0], PLANTED[3], PLANTED[6]])
def test_no_command_prints_or_keeps_it(url: str, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    assert_hidden(run(["cluster", "start", "--data", data, "--store", url]))
    assert_hidden(run(["up", "--data", data, "--kafka", "127.0.0.1:0", "--store", url]))
    assert_hidden(run(["broker"], url))
    assert_hidden(run(["tier", "show", "--store", url]))
    assert_hidden(run(["store", "init", "--store", url]))
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in kept:
        assert_hidden(path.read_bytes().decode("latin-1"))


@given(st.text(min_size=1, max_size=80))
def test_whatever_stands_before_an_at_sign_is_hidden(secret: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_store_url(f"s3://{SECRET}{secret}@bucket/prefix")
    assert_hidden(refused.value.message)


@pytest.mark.parametrize(
    "url", ["/dir", "file:///dir", "s3://bucket", "s3://bucket/a/b?endpoint=https://host:9000/s3&region=eu&read_engine=obstore"]
)
def test_what_is_accepted_is_shown_as_it_is(url: str) -> None:
    check_store_url(url)
    assert shown_url(url) == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("/data/store?keys=/etc/keys", "file:///data/store"),
        ("file:///data/store", "file:///data/store"),
        ("s3://b/p/q?region=eu-west-1&sse=AES256&keys=/k&read_engine=aioboto3", "s3://b/p/q/?region=eu-west-1"),
        ("s3://b?endpoint=http://127.0.0.1:9000&region=r", "s3://b/?endpoint=http://127.0.0.1:9000&region=r"),
    ],
)
def test_clients_are_told_the_place_and_nothing_about_keys(url: str, told: str) -> None:
    assert location_url(url) == told
    check_store_url(told)
    assert location_url(told) == told
