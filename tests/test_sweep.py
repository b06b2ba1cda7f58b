"""Settings in combination: every pair of values comes together in some run of two updates."""

import itertools
import json
import traceback
from pathlib import Path

import pytest

from tests.helpers import sweep
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.pairwise import pairwise
from tests.helpers.ranks import finish, read_ranks


CASES = pairwise(sweep.SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    sweep.save_models(folder)
    return folder


def test_every_pair_of_values_comes_together():
    for left, right in itertools.combinations(sweep.SETTINGS, 2):
        together = {(case[left], case[right]) for case in CASES}
        assert together == set(itertools.product(sweep.SETTINGS[left], sweep.SETTINGS[right]))
    assert len(CASES) < 45


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["processes"] == 1],
    ids=lambda case: "-".join(str(value) for name, value in case.items() if name != "processes"),
)
def test_the_logged_share_is_that_of_the_loss_and_nothing_stays_on_the_model(folder, case):
    sweep.check(*sweep.trained(folder, case), case)


def run_on_a_rank(folder: str) -> None:
    """Run the combinations in FOLDER/cases.json; write what went wrong in each."""
    errors = []
    for case in json.loads((Path(folder) / "cases.json").read_text()):
        trainer, callback = sweep.trained(Path(folder), case)
        try:
            sweep.check(trainer, callback, case)
            errors.append("")
        except AssertionError:
            errors.append(traceback.format_exc())
    finish(trainer, folder, errors=errors)


@pytest.mark.fuzz
def test_the_same_on_two_ranks(folder):
    cases = [case for case in CASES if case["processes"] == 2]
    (folder / "cases.json").write_text(json.dumps(cases))
    succeeded(run_function(run_on_a_rank, folder, ranks=2))
    for rank in read_ranks(folder):
        failed = {str(case): error for case, error in zip(cases, rank["errors"], strict=True) if error}
        assert not failed, "\n\n".join(f"{case}\n{error}" for case, error in failed.items())
