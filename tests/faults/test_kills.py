"""SIGKILL at random moments on either of two ranks, with replay and partial rollouts."""

import json

import pytest

from tests.helpers.commands import succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.forked import run_python
from tests.helpers.random_kills import PHASES


pytestmark = pytest.mark.kills


def test_what_a_killed_run_trains_is_what_the_uninterrupted_one_trains_as_far_as_the_docs_say(tmp_path):
    count = cases(20)
    printed = succeeded(run_python(["-m", "tests.helpers.random_kills", tmp_path, count], timeout_s=1200))
    kills = [json.loads(line) for line in printed.splitlines()]
    assert len(kills) == count
    assert {kill["rank"] for kill in kills} == {0, 1}
    assert {kill["saves"] for kill in kills} == {"boundaries", "anywhere"}
    if count == 20:
        assert {kill["phase"] for kill in kills} == set(PHASES)
        assert any(kill["resumed_from"] % 2 for kill in kills)
    assert [kill for kill in kills if kill["wrong"]] == []
