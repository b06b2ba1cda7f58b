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
