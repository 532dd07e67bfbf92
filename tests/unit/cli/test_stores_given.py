"""Commands that are given a store with ``--store``: one that is mistyped passes no check, and is not created."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import boto3
import pytest
from click.testing import CliRunner, Result
from support.two_partitions import write_two_partitions

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode
from stratalog.health import cluster
from stratalog.health.finding import Verdict
from stratalog_core.errors import Invalid, NotFound
from stratalog_tiering.format.descriptor import OwnerDescriptor, encode_descriptor
from stratalog_tiering.format.object_keys import owner_key

_READERS = (("tier", "verify"), ("tier", "scrub"), ("tier", "show"), ("cost",))


def _run(*words: str) -> Result:
    return CliRunner().invoke(stratalog, [*words])


@pytest.mark.parametrize("words", [*_READERS, ("store", "info"), ("restore", "--dry-run"), ("job", "audit")])
def test_a_directory_that_does_not_exist_is_refused_and_not_created(words: tuple[str, ...], tmp_path: Path) -> None:
    mistyped = tmp_path / "stroe"
    with pytest.raises(NotFound, match="stroe is not a directory: give the directory or URL that holds the history"):
        raise _run(*words, "--store", str(mistyped)).exception or AssertionError
    assert not mistyped.exists()


@pytest.mark.parametrize("words", _READERS)
def test_a_store_without_topics_is_no_sound_history(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="contains no topics: check bucket and prefix"):
        raise _run(*words, "--store", str(tmp_path)).exception or AssertionError


@pytest.mark.parametrize("words", _READERS)
def test_a_store_may_be_a_relative_directory(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    write_two_partitions(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    result = _run(*words, "--store", "store")
    assert result.exit_code == ExitCode.OK, result.exception
    assert "flights" in result.stdout


def test_the_doctor_fails_a_store_that_does_not_exist(tmp_path: Path) -> None:
    result = _run("doctor", "--store", str(tmp_path / "stroe"))
    assert result.exit_code == ExitCode.FAILED
    assert "stroe is not a directory" in result.stdout
    assert not (tmp_path / "stroe").exists()


def test_the_doctor_says_that_it_checked_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "./data holds none: only this machine is checked" in _run("doctor").stdout


def test_the_doctor_refuses_a_cluster_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="daat is not a directory"):
        raise _run("doctor", "--data", str(tmp_path / "daat")).exception or AssertionError


def test_a_bucket_is_not_waited_for_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # It keeps the credentials that an earlier test of this process had.
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(Invalid, match="s3://bucket: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        raise (
            _run("store", "init", "--store", "s3://bucket?endpoint=http://127.0.0.1:9", "--timeout", "1").exception
            or AssertionError
        )


def test_a_restore_that_is_not_confirmed_leaves_no_directory(tmp_path: Path) -> None:
    write_two_partitions(tmp_path / "store")
    owner = OwnerDescriptor(cluster_id="another", number=0, taken_at_ms=1)
    (tmp_path / "store" / owner_key(0)).parent.mkdir(exist_ok=True)
    (tmp_path / "store" / owner_key(0)).write_bytes(encode_descriptor(owner))
    with pytest.raises(Invalid, match=r"from cluster another\?.*give --yes to confirm"):
        raise _run("restore", "--store", str(tmp_path / "store"), "--data", str(tmp_path / "new")).exception or AssertionError
    assert not (tmp_path / "new").exists()


def test_a_bucket_with_an_impossible_name_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(Invalid, match='Invalid bucket name "no!bucket"'):
        raise _run("store", "init", "--store", "s3://no!bucket?endpoint=http://127.0.0.1:9", "--timeout", "1").exception or (
            AssertionError
        )


def test_the_doctor_does_not_wait_for_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(cluster, "_STORE_S_MAX", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"s3://b?endpoint=http://127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        found = asyncio.run(cluster.check_store(url))
        assert time.monotonic() - started < 25
    assert (found.verdict, found.detail) == (Verdict.FAIL, "s3://b: no answer within 1 s")


def test_a_profile_that_does_not_exist_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(Invalid, match=r"s3://b.*no-such-profile.*correct AWS_PROFILE"):
        raise _run("tier", "show", "--store", "s3://b?endpoint=http://127.0.0.1:9").exception or AssertionError
