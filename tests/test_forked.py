"""Programs that the tests fork end as those that a shell starts."""

import json
import os
import signal

import pytest

from tests.helpers.forked import run_python


SCRIPT = """
import atexit, json, os, random, signal, sys, threading
import numpy, torch
atexit.register(print, "at the end")
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.environ["GIVEN"]]))
rank, how = os.environ.get("RANK", "0"), sys.argv[1]
if how == "draws":
    draws = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    sys.exit(open(f"draws-{rank}", "w").write(json.dumps(draws)) and None)
if how == "leaves a thread":
    threading.Thread(target=lambda: (threading.Event().wait(0.2), print("of the thread"))).start()
    how = "nothing"
if rank != "0":
    signal.pause()
if how == "raises":
    raise ValueError("a reason")
if how == "kills itself":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "hangs":
    signal.pause()
sys.exit({"says": "what is wrong", "two": 2, "nothing": None}[how])
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda how, **settings: run_python(["script.py", how], cwd=tmp_path, GIVEN="x", **settings)


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("nothing", 0, ""),
        ("two", 2, ""),
        ("says", 1, "what is wrong\n"),
        ("raises", 1, "ValueError: a reason\n"),
        ("kills itself", -signal.SIGKILL, ""),
    ],
)
def test_a_program_has_its_own_arguments_folder_and_environment_and_its_status_is_known(
    tmp_path, run, how, status, said
):
    result = run(how)
    assert result.returncode == status
    assert result.stderr.endswith(said)
    if how != "kills itself":  # nothing is flushed then
        seen, *rest = result.stdout.splitlines()
        assert json.loads(seen) == [["script.py", how], str(tmp_path), None, None, "x"]
        assert rest == ["at the end"]
    assert os.environ.get("GIVEN") is None


def test_threads_end_first(run):
    assert run("leaves a thread").stdout.splitlines()[1:] == ["of the thread", "at the end"]


def test_ranks_draw_what_they_draw(tmp_path, run):
    assert run("draws", ranks=2).returncode == 0
    left, right = (json.loads((tmp_path / f"draws-{rank}").read_text()) for rank in range(2))
    assert all(mine != others for mine, others in zip(left, right, strict=True))


def test_a_rank_that_fails_ends_the_others(run):
    result = run("raises", ranks=3)
    assert result.returncode == 1
    assert "a reason" in result.stderr


def test_a_program_that_hangs_is_ended_and_fails(run):
    with pytest.raises(AssertionError, match=r"did not end in 0\.5 s"):
        run("hangs", ranks=2, timeout_s=0.5)
    assert run("nothing").returncode == 0
