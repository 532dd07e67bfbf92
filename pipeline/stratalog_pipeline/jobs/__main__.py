"""``python -m stratalog_pipeline.jobs audit --store URL --topics a,b``: the command line of the jobs.

Prints one JSON line per partition. Exit status: 0 no problems, 1 an audit found problems, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import msgspec
from pyspark.sql import SparkSession

from stratalog_core.errors import Invalid, NotFound
from stratalog_pipeline.jobs.audit import audit
from stratalog_pipeline.options import ReadOptions, parse_options


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="stratalog_pipeline.jobs", description="Jobs over a bucket, on Spark.")
    jobs = parser.add_subparsers(dest="job", required=True)
    audits = jobs.add_parser("audit", help="check that every offset is present and unaltered")
    audits.add_argument("--store", required=True, help="file:///dir or s3://bucket/prefix?endpoint=…&region=…")
    audits.add_argument("--topics", required=True, help="comma-separated topic names")
    audits.add_argument("--topic-ids", default="", help="comma-separated topic ids, to choose between topics of the same name")
    given = parser.parse_args(arguments)
    try:
        options = parse_options({"store": given.store, "subscribe": given.topics, "topicIds": given.topic_ids})
        return _audit(options)
    except (Invalid, NotFound) as wrong:
        sys.stderr.write(f"{wrong.message}\n")
        return 2


def _audit(options: ReadOptions) -> int:
    session = SparkSession.builder.appName("stratalog-audit").getOrCreate()
    try:
        verdicts = audit(session, options)
    finally:
        session.stop()
    for verdict in verdicts:
        sys.stdout.write(msgspec.json.encode(dataclasses.asdict(verdict)).decode() + "\n")
    return 1 if any(verdict.problems for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
