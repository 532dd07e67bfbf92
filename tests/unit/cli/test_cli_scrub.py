"""``tier scrub``: its output, its exit codes, and the part of the bucket that it checks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.two_partitions import write_two_partitions

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode
from stratalog.tier.history import damage_text
from stratalog_core.errors import Invalid, NotFound


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket with one segment of three records in each of two partitions."""
    directory = tmp_path / "store"
    write_two_partitions(directory)
    return directory


def scrub(bucket: Path, *options: str) -> Result:
    return CliRunner().invoke(stratalog, ["tier", "scrub", "--store", str(bucket), *options])


def test_a_sound_bucket_is_clean(bucket: Path) -> None:
    result = scrub(bucket, "--json", "--rate", "100000000")
    assert result.exit_code == ExitCode.OK
    document = json.loads(result.stdout)
    assert document["findings"] == []
    assert [(row["topic"], row["partition"], row["records"]) for row in document["partitions"]] == [
        ("flights", 0, 3),
        ("flights", 1, 3),
    ]


def test_findings_are_printed_with_a_remedy_and_have_an_exit_code_of_their_own(bucket: Path) -> None:
    (segment,) = bucket.glob("segments/*/1/*.segment")
    segment.unlink()
    key = str(segment.relative_to(bucket))
    result = scrub(bucket)
    assert result.exit_code == ExitCode.FINDINGS
    assert f"segment-missing of flights-1, offsets 0 to 2: {key}" in result.stdout
    assert "remedy: run the scrub with --repair and --copy" in result.stdout
    (finding,) = json.loads(scrub(bucket, "--json").stdout)["findings"]
    assert (finding["kind"], finding["topic"], finding["partition"], finding["key"]) == ("segment-missing", "flights", 1, key)
    assert (finding["base_offset"], finding["last_offset"]) == (0, 2)


def test_a_part_of_the_bucket_can_be_checked(bucket: Path) -> None:
    (segment,) = bucket.glob("segments/*/1/*.segment")
    segment.unlink()
    assert scrub(bucket, "--topic", "flights", "--partition", "0").exit_code == ExitCode.OK
    assert scrub(bucket, "--topic", "flights", "--partition", "1").exit_code == ExitCode.FINDINGS


def test_an_unknown_part_is_refused(bucket: Path) -> None:
    with pytest.raises(NotFound, match="contains no topic 'other'; it contains flights"):
        raise scrub(bucket, "--topic", "other").exception or AssertionError
    with pytest.raises(NotFound, match="has 2 partitions, none with number 5"):
        raise scrub(bucket, "--topic", "flights", "--partition", "5").exception or AssertionError
    with pytest.raises(Invalid, match="--partition needs exactly one --topic"):
        raise scrub(bucket, "--partition", "0").exception or AssertionError


def test_damage_is_repaired_from_a_second_copy(bucket: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bucket, copy)
    (segment,) = bucket.glob("segments/*/1/*.segment")
    content = segment.read_bytes()
    segment.unlink()
    (tmp_path / "empty").mkdir()
    damaged = scrub(bucket, "--repair", "--copy", str(tmp_path / "empty"), "--json")
    (finding,) = json.loads(damaged.stdout)["findings"]
    assert damaged.exit_code == ExitCode.FINDINGS
    assert (finding["repaired_from"], finding["not_repaired"]) == (None, f"the second copy does not have {finding['key']}")
    result = scrub(bucket, "--repair", "--copy", str(copy), "--json")
    assert result.exit_code == ExitCode.OK
    (finding,) = json.loads(result.stdout)["findings"]
    assert (finding["kind"], finding["repaired_from"], finding["not_repaired"]) == ("segment-missing", "second-copy", "")
    assert segment.read_bytes() == content
    segment.unlink()
    printed = scrub(bucket, "--repair", "--copy", str(copy))
    assert "  repaired from the second-copy" in printed.stdout
    assert "remedy" not in printed.stdout
    assert scrub(bucket, "--json").exit_code == ExitCode.OK


def test_a_repair_without_a_source_is_refused(bucket: Path) -> None:
    with pytest.raises(Invalid, match="--repair needs a source"):
        raise scrub(bucket, "--repair").exception or AssertionError
    with pytest.raises(Invalid, match="--copy needs --repair"):
        raise scrub(bucket, "--copy", str(bucket)).exception or AssertionError


def test_verify_names_only_the_place_that_it_knows_and_the_next_command(tmp_path: Path) -> None:
    write_two_partitions(tmp_path)
    segment = next(tmp_path.glob("segments/**/*.segment"))
    segment.unlink()
    done = CliRunner().invoke(stratalog, ["tier", "verify", "--store", str(tmp_path)])
    assert done.exit_code == ExitCode.DAMAGED
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DAMAGED")]
    assert "None" not in line
    assert re.match(r"DAMAGED segments/\S+\.segment: offsets \d+ to \d+: ", line)
    assert "`stratalog tier scrub`" in done.stderr


def test_damage_without_a_place_is_shown_without_one() -> None:
    row = {"segment": "k", "block": None, "base_offset": 0, "last_offset": -1, "problem": "is gone"}
    assert damage_text(row) == "DAMAGED k: is gone"
    assert damage_text({**row, "block": 2, "last_offset": 9}) == "DAMAGED k: block 2, offsets 0 to 9: is gone"
