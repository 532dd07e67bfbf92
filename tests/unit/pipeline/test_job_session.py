"""What a job tells Spark about itself, without a JVM."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from stratalog_pipeline.jobs.session import job_session


class Session:
    def stop(self) -> None:
        """Nothing was started."""


def test_the_application_has_the_name_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which the user finds it among those of a cluster."""
    made: list[dict[str, Any]] = []

    def started(builder: Any) -> Session:
        made.append(dict(builder._options))
        return Session()

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", started)
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    with job_session("replay", "local[1]"):
        pass
    assert [options["spark.app.name"] for options in made] == ["stratalog-replay"]
