"""Losses, gradient norms and bounds of 30 updates of each setting are those that `make golden` wrote."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from compat.corners import pins
from tests.golden.curves import SETTINGS, moved, record, stored


PINNED = {name: pins("pinned")[name] for name in ("torch", "trl", "transformers")}
OTHERS = {name: found for name in PINNED if (found := Version(version(name)).public) != PINNED[name]}
pytestmark = pytest.mark.skipif(bool(OTHERS), reason=f"golden curves hold with {PINNED}, and installed are {OTHERS}")

REASONS = {"two ranks": pytest.mark.processes, "BAPO": ()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=REASONS.get(name, pytest.mark.trainings)) for name in SETTINGS]
)
def test_a_setting_trains_as_it_did(tmp_path, name):
    differences = moved(name, stored().get(name, {}), record(name, tmp_path))
    assert not differences, f"{differences[0]}. If this is right: make golden"


def test_the_file_has_the_settings_of_the_table():
    assert list(stored()) == list(SETTINGS)
