"""Check that claimed versions were tested: `setup.cfg`, the corners of `make test-compat` and their two pages."""

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


def test_every_corner_with_a_result_passed_with_the_versions_it_names(rows):
    page = results.CORNERS_PAGE.read_text()
    assert {"newest", "oldest"} <= {row["corner"] for row in rows} <= set(corners.names())
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


def test_ranges_are_those_that_were_tested(rows):
    assert results.complaints(SETUP_CFG, rows, corners.rejected()) == []


def test_the_versions_of_trl_claimed_at_import_are_those_that_were_tested(rows):
    assert {row["versions"]["trl"] for row in rows} == set(trl_compat.TESTED_VERSIONS)


@pytest.mark.parametrize(
    ("right", "wrong", "complaints"),
    [
        (
            "trl>=1.14.2,!=1.15.*",
            "trl>=1.14,<1.16",
            ["oldest version tested is 1.14.2", "1.16.0 is tested", "trl<1.16: no reason", "trl!=1.15.*: in compat/"],
        ),
        ("python_requires = >=3.11", "python_requires = >=3.10", ["Python 3.11"]),
        (" :: 3.11\n", " :: 3.11\n    Programming Language :: Python :: 3.99\n", ["Python 3.11"]),
    ],
)
def test_a_range_that_nobody_tested_is_named(rows, right, wrong, complaints):
    assert SETUP_CFG.count(right) == 1
    found = results.complaints(SETUP_CFG.replace(right, wrong), rows, corners.rejected())
    assert all(any(complaint in line for line in found) for complaint in complaints), found
