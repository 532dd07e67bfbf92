"""What a job tells Spark about itself, without a JVM."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from stratalog_pipeline.jobs.session import job_session


class Session:
    def stop(self) -> None:
        """Nothing was started."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each session that was asked for."""
    options: list[dict[str, Any]] = []

    def started(builder: Any) -> Session:
        options.append(dict(builder._options))
        return Session()

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", started)
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    return options


def test_the_application_has_the_name_of_the_job(made: list[dict[str, Any]]) -> None:
    """By which the user finds it among those of a cluster."""
    with job_session("replay", "local[1]"):
        pass
    assert [options["spark.app.name"] for options in made] == ["stratalog-replay"]


def test_rows_pass_through_unix_sockets_on_this_machine_only(made: list[dict[str, Any]]) -> None:
    """On a cluster the name of the directory for sockets may be longer than the system takes."""
    for master in ("local[*]", "spark://host:7077", "yarn"):
        with job_session("replay", master):
            pass
    assert [options.get("spark.python.unix.domain.socket.enabled") for options in made] == ["true", None, None]
