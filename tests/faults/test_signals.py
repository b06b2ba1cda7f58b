"""Signals while a run trains: the update is finished and saved on all ranks, and the run goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import safe_open

from bapo_trl import BAPOTrainer
from bapo_trl.checkpoints.files import find_defect
from bapo_trl.checkpoints.stop_signals import EXIT_CODE, StopSignals
from tests.helpers.alike import assert_same_weights
from tests.helpers.commands import ROOT, accelerate_launcher, run_command, succeeded
from tests.helpers.faults import in_processes
from tests.helpers.forked import run_function
from tests.helpers.script_runs import fill_folder
from tests.helpers.script_runs import run as run_script
from tests.helpers.toy import InUpdate, terminate, toy_run


pytestmark = pytest.mark.processes


SAVES = {"save_strategy": "steps", "save_steps": "2"}
BEST = {
    "eval_strategy": "steps", "eval_steps": "1", "save_strategy": "steps", "save_steps": "1", "save_total_limit": "1",
    "load_best_model_at_end": "true", "metric_for_best_model": "reward",
    "dataset_name": "train.jsonl", "eval_dataset": "test.jsonl",
    "per_device_eval_batch_size": "4",
}  # fmt: skip
# Two updates of two micro-batches on the samples of a generation
SETTINGS = {
    "config": "quickstart", "gradient_accumulation_steps": "2", "steps_per_generation": "4", "num_iterations": "1",
    "max_steps": "4", "logging_steps": "1", "do_eval": "false",
}  # fmt: skip


def counted(method: str, act=lambda number: None) -> list[str]:
    """Count the calls of a method of the trainer; before each, `act` on its number, from 1."""
    original, calls = getattr(BAPOTrainer, method), []

    def counting(*args, **kwargs):
        calls.append(method)
        act(len(calls))
        return original(*args, **kwargs)

    setattr(BAPOTrainer, method, counting)
    return calls


def trained(case: dict, rank: int, settings: dict) -> dict:
    """Run the script on one rank; return how it ended."""

    def send_signals(number: int) -> None:
        for _ in range(case.get("times", 1) if number == case["call"] else 0):
            os.kill(os.getpid(), getattr(signal, case["signal"]))

    saves, generations = counted("_save_checkpoint"), counted("_generate_and_score_completions")
    if case and rank == case.get("rank", 0):
        counted(case["method"], send_signals)
    ended: str | int = 0
    try:
        run_script(**{**SETTINGS, **settings})
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error.code if isinstance(error, SystemExit) else type(error).__name__
    sys.stdout.flush()
    kept = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    return {
        "ended": ended,
        "saves": len(saves),
        "generations": len(generations),
        "handlers_are_back": kept == [signal.default_int_handler, signal.SIG_DFL],
    }


def weights(folder: Path) -> list[list]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return [[name, file.get_tensor(name).flatten().tolist()] for name in sorted(file.keys())]


def wrong_end(result: dict | int) -> dict:
    return result if isinstance(result, dict) else {"ended": os.waitstatus_to_exitcode(result)}


def outcome(case: dict, folder: Path) -> dict:
    """Send the signal, start the run again; return what both left."""
    ranks, settings, out = case.get("ranks", 1), case.get("settings", {}), folder / "out"

    def start(case, settings):
        results = in_processes(ranks, folder, lambda rank: trained(case, rank, settings))
        return [wrong_end(result) for result in results]

    stopped = start(case, settings)
    told = (folder / "rank-0.log").read_text()
    left = sorted(path.name for path in out.iterdir()) if out.exists() else []
    result = {"stopped": stopped, "told": told, "left": left}
    if any(name.startswith("checkpoint-") for name in left):
        result["resumed"] = start({}, {**settings, "resume_from_checkpoint": "true"})
        with suppress(FileNotFoundError):
            result["updates"] = json.loads((out / "trainer_state.json").read_text())["global_step"]
            uninterrupted = f"straight-{ranks}"
            result["is_as_uninterrupted"] = weights(out) == weights(Path("..", uninterrupted, "out"))
    return result


def signal_and_resume(folder: str, cases: str) -> None:
    """
    Run the script on one rank or two, send each the signals of a case, and start it again.

    The cases are a list in JSON; for each, a JSON line on the standard output tells what came of it. The processes are
    forked from this one, which has imported the libraries.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background would ignore it
    sys.modules["matplotlib"] = None  # drawing reports would take most of the time
    for ranks in (1, 2):
        path = Path(folder, f"straight-{ranks}")
        with pytest.MonkeyPatch.context() as patch:
            path.mkdir()
            fill_folder(path, patch)
            results = in_processes(ranks, path, lambda rank: trained({}, rank, {}))
            assert [result["ended"] for result in results] == [0] * ranks, (path / "rank-0.log").read_text()[-3000:]
    for number, case in enumerate(json.loads(cases)):
        path = Path(folder, f"case-{number:02d}")
        with pytest.MonkeyPatch.context() as patch:
            path.mkdir()
            fill_folder(path, patch)
            print(json.dumps(outcome(case, path)), flush=True)


# A generation is trained for two updates of two micro-batches
CASES = {
    "at the end of a generation": {"method": "training_step", "call": 4, "signal": "SIGTERM"},
    "within a generation": {"method": "training_step", "call": 1, "signal": "SIGINT"},
    "of two ranks to the second": {
        "method": "_calculate_rewards", "call": 2, "signal": "SIGUSR1", "ranks": 2, "rank": 1,
    },
    "at an epoch's end": {
        "method": "training_step", "call": 8, "signal": "SIGTERM",
        "settings": {"save_strategy": "epoch", "max_steps": "8", "dataset_name": "train.jsonl"},  # of 4 updates
    },
    "with a best checkpoint": {"method": "training_step", "call": 6, "signal": "SIGTERM", "settings": BEST},
    "in the last update": {"method": "training_step", "call": 8, "signal": "SIGTERM"},
    "in the last save": {"method": "_save_checkpoint", "call": 2, "signal": "SIGTERM", "settings": SAVES},
    "twice": {"method": "training_step", "call": 1, "signal": "SIGINT", "times": 2},
    "after the last epoch": {"method": "_finalize_training", "call": 1, "signal": "SIGTERM"},
    "after the training": {"method": "save_state", "call": 1, "signal": "SIGTERM"},
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("signals")
    printed = succeeded(run_function(signal_and_resume, folder, json.dumps(list(CASES.values())), timeout_s=600))
    return dict(zip(CASES, map(json.loads, printed.splitlines()), strict=True))


STOPPED = {  # update, whether a generation ends with it
    "at the end of a generation": (2, True),
    "within a generation": (1, False),
    "of two ranks to the second": (3, False),
    "at an epoch's end": (4, True),
    "with a best checkpoint": (3, False),
    "in the last update": (4, True),
    "in the last save": (4, True),
}


@pytest.mark.parametrize("name", STOPPED)
def test_the_update_is_finished_and_saved_once_and_every_rank_leaves_with_the_code(outcomes, name):
    outcome, (update, _) = outcomes[name], STOPPED[name]
    for rank in outcome["stopped"]:
        assert rank["ended"] == EXIT_CODE, outcome["told"]
        assert rank["handlers_are_back"]
        every = {"steps": 2, "epoch": 4}.get(CASES[name].get("settings", {}).get("save_strategy"), update)
        again = name == "in the last save"
        assert rank["saves"] == (update if name == "with a best checkpoint" else update // every + again)
    assert f"checkpoint-{update}" in outcome["left"]
    assert outcome["told"].count(CASES[name]["signal"]) == (1 if CASES[name].get("rank") == 1 else 2)
    assert (
        f"Stopped by {CASES[name]['signal']} after update {update}, saved in out/checkpoint-{update}. To resume: the "
        "same command with --resume_from_checkpoint true. Exit code 75." in outcome["told"]
    )

    # Nothing is evaluated or published besides
    others = {file for file in outcome["left"] if not file.startswith(("checkpoint-", "eval_completions"))}
    assert others <= {"README.md", "report.png", "run_settings.json"}


@pytest.mark.parametrize("name", STOPPED)
def test_the_run_goes_on_to_its_end(outcomes, name):
    outcome, (update, is_boundary) = outcomes[name], STOPPED[name]
    assert [rank["ended"] for rank in outcome["resumed"]] == [0] * CASES[name].get("ranks", 1)
    max_steps = int(CASES[name].get("settings", {}).get("max_steps", 4))
    assert outcome["updates"] == max_steps
    if max_steps == 4 and name != "with a best checkpoint":
        assert outcome["is_as_uninterrupted"] == is_boundary
        # Within a generation, another is sampled for what is left of it
        assert {rank["generations"] for rank in outcome["resumed"]} == {2 - update // 2}


def test_a_second_interrupt_ends_the_run_at_once(outcomes):
    (rank,) = outcomes["twice"]["stopped"]
    assert (rank["ended"], rank["saves"], rank["handlers_are_back"]) == ("KeyboardInterrupt", 0, True)


@pytest.mark.parametrize("moment", ["after the last epoch", "after the training"])
def test_outside_the_training_a_signal_does_what_it_did(outcomes, moment):
    assert [rank["ended"] for rank in outcomes[moment]["stopped"]] == [-15]


# Launchers

# Of the second rank alone, or of the launcher, which sends it on to both: once the first rank is in its training too
SIGNALLING = """
import os, signal
calls = 0
def digits(completions, **kwargs):
    global calls
    calls += 1
    signalled = os.environ.get("SIGNALLED")
    if os.environ["RANK"] == "1" and calls == {"rank": 1, "launcher": 2}.get(signalled):
        if signalled == "rank":
            signal.raise_signal(signal.SIGTERM)
        else:  # and it waits for its own, which any thread may take
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer)
            os.kill(os.getppid(), signal.SIGTERM)
            os.read(reader, 1)
            signal.set_wakeup_fd(-1)
    return [sum(map(str.isdigit, text)) - 0.1 * len(text) for text in completions]
"""
# On the embedded task; each update is a generation
LAUNCHED = {
    "config": "quickstart", "reward_funcs": "signalling.digits", "max_steps": 4, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 1, "num_generations": 4,
    "save_strategy": "no", "logging_steps": 1, "do_eval": "false",
}  # fmt: skip


def launch(tmp_path, launcher: str, output_dir: str, signalled: str = "", **settings):
    (tmp_path / "signalling.py").write_text(SIGNALLING)
    own = {"script": ["-m", "bapo_trl.script.launcher"], "accelerate": ["-m", "accelerate.commands.launch"]}[launcher]
    flags = [f"--{name}={value}" for name, value in {**LAUNCHED, "output_dir": output_dir, **settings}.items()]
    command = [sys.executable, *own, *accelerate_launcher("cpu_ddp")[2:], str(ROOT / "train_bapo.py"), *flags]
    path = f"{tmp_path}:{ROOT}"
    # On a busy machine, an update and a save take more than the launcher's 30 seconds
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "200"}
    return run_command(
        command, cwd=tmp_path, timeout_s=400, HF_HUB_OFFLINE="1", PYTHONPATH=path, SIGNALLED=signalled, **patience
    )


def test_under_a_launcher_one_rank_is_enough_and_so_is_the_launcher(tmp_path):
    out = tmp_path / "out"
    to_rank = launch(tmp_path, "script", "out", "rank")
    assert to_rank.returncode == EXIT_CODE, to_rank.stdout + to_rank.stderr
    assert "Stopped by SIGTERM after update 1, saved in out/checkpoint-1" in to_rank.stdout
    assert find_defect(out / "checkpoint-1") is None
    to_launcher = launch(tmp_path, "accelerate", "out", "launcher", resume_from_checkpoint="true")
    assert to_launcher.returncode == 1
    assert "Stopped by SIGTERM after update 3, saved in out/checkpoint-3" in to_launcher.stdout
    assert "SIGKILL" not in to_launcher.stderr
    assert find_defect(out / "checkpoint-3") is None


def launcher_of(processes: int) -> list[str]:
    single = ["--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    flags = single if processes == 1 else accelerate_launcher("cpu_ddp", processes)[2:]
    return [sys.executable, "-m", "bapo_trl.script.launcher", *flags]


WAITING = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *args: sys.exit(75))
try:
    os.write(1, b"ready\\n")  # in one piece: the ranks share this pipe. A signal may come right behind it
    while True:
        signal.pause()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [(1, signal.SIGTERM, EXIT_CODE), (1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGTERM, 143)],
)
def test_ranks_get_the_signals_of_their_launcher_which_says_no_more(tmp_path, processes, number, code):
    script = tmp_path / "waits.py"
    script.write_text(WAITING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*launcher_of(processes), str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        for _ in range(processes):
            assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said


# Handlers


def test_the_checkpoint_of_a_stop_is_one_to_go_on_from_although_others_hold_the_model_alone(tmp_path):
    def trained(folder, *callbacks, resume=None, **settings):
        return toy_run(tmp_path / folder, trainer_args={"callbacks": list(callbacks)}, **settings, resume=resume)

    expected = trained("straight", num_iterations=1)  # two updates a generation
    saving = {"num_iterations": 1, "save_only_model": True, "save_strategy": "steps", "save_steps": 1}
    stopped = trained("stopped", InUpdate(2, terminate), StopSignals(), **saving)
    assert stopped.args.save_only_model  # of a run after it
    assert not (tmp_path / "stopped" / "checkpoint-1" / "optimizer.pt").exists()
    assert (tmp_path / "stopped" / "checkpoint-2" / "optimizer.pt").exists()
    resumed = trained("stopped", resume=True, **saving)
    assert_same_weights(expected, resumed)


# SLURM

SLURM = "scripts/train_4_plus_1_nodes.slurm"
STAND_INS = {
    "scontrol": 'if [[ $1 == show ]]; then printf "node%s\\n" $NODES; else echo "$*" >>"$LOG/asked"; fi',
    "sbatch": """
(echo "$*"; printenv TRAINER_NODES GPUS_PER_NODE TENSOR_PARALLEL_SIZE TRUST_REMOTE_CODE) >"$LOG/submitted"
""",
    # Runs a task on each of its nodes, one after the other
    "srun": """
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) nodes=${1#*=} ;; esac
    shift
done
rank=0 code=0
for node in ${nodes//,/ }; do
    if [[ $* == *"test -e"* && $node == "${BLIND:-}" ]]; then exit 1; fi
    SLURM_PROCID=$rank "$@" || code=$?
    rank=$((rank + 1))
done
exit $code
""",
    # The server says what it serves to the first rank, which waits for it. Launchers take the signal that SLURM sends
    "python": """
if [[ "$2 $3" == "bapo_trl serve" ]]; then echo "$*" >"$LOG/server"; exit; fi
if [[ "$2 $3" != "bapo_trl train" ]]; then exit 3; fi
if [[ "$*" == *"--dry_run true" ]]; then echo "$*" >"$LOG/dry"; exit "${REFUSES:-0}"; fi
if [[ $SLURM_PROCID == 0 ]]; then cat "$LOG/server" >"$LOG/served"; fi
kill -USR1 $$
echo "$*" >"$LOG/launched-$SLURM_PROCID"
exit "$CODE"
""",
}


@pytest.fixture
def slurm(tmp_path):
    """The environment of a cluster of 5 nodes of 8 GPUs, whose commands leave notes in `tmp_path`."""
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "server")
    return {
        "PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "LOG": str(tmp_path), "CODE": "0", "NODES": "0 1 2 3 4",
        "SLURM_JOB_NODELIST": "node[0-4]", "SLURM_JOB_ID": "17",
        "TRAINER_NODES": "4", "GPUS_PER_NODE": "8", "TENSOR_PARALLEL_SIZE": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "found"),
    [(0, []), (1, ["checkpoint-50"]), (EXIT_CODE, ["checkpoint-50"]), (EXIT_CODE, ["_unfinished-0123abcd-1"])],
)
def test_the_slurm_script_requeues_a_run_that_a_signal_stopped_and_no_other(tmp_path, slurm, code, found):
    output_dir = tmp_path / "out [1] of 2"  # a pattern, to a shell that is not careful
    for name in found:
        (output_dir / name).mkdir(parents=True)
    result = run_command(["bash", SLURM, "recipe.yaml", "model", str(output_dir)], **slurm | {"CODE": str(code)})
    assert result.returncode == code, result.stderr
    asked = tmp_path / "asked"  # by each node
    assert (asked.read_text() if asked.exists() else "") == ("requeue 17\n" * 4 if code == EXIT_CODE else "")
    dry = (tmp_path / "dry").read_text()
    served = "-m bapo_trl serve --model model --host 0.0.0.0 --tensor-parallel-size 4\n"
    assert (tmp_path / "served").read_text() == served
    sizes = "-m bapo_trl train --accelerate_config zero3_multinode --num_machines 4 --num_processes 32 "
    for rank in range(4):
        launched = (tmp_path / f"launched-{rank}").read_text()
        assert sizes in launched
        assert f"{sizes}--config recipe.yaml --model_name_or_path model " in dry
        assert f"--machine_rank {rank} --main_process_ip node0 " in launched
        resume = "true" if found == ["checkpoint-50"] else "false"
        assert f"--model_name_or_path model --output_dir {output_dir} --resume_from_checkpoint {resume} " in launched
    assert sorted(path.name for path in output_dir.iterdir()) == found  # the mark of the shared disk is gone
