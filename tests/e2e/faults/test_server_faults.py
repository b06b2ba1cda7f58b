"""A live vLLM server, or its worker alone, is killed or stopped, and comes back or not: two ranks, DDP and ZeRO-3."""

import contextlib
import json
import os
import re
import signal
from itertools import product
from pathlib import Path
from random import Random

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.launching import ENGINES, START_S, run_ranks, vllm_server
from tests.e2e.test_partial_rollouts import WIDE, save
from tests.helpers.commands import free_port, succeeded
from tests.helpers.fault_counts import cases
from tests.helpers.ranks import read_ranks
from tests.helpers.toy import toy_model


NUM_CASES = 20
REQUEST_S, BACK_S, GONE_S = 10, START_S, 3  # limits of a request, and of waiting for a server
PLACES, TARGETS, SIGNALS = ("generation", "transfer"), ("api", "worker"), ("KILL", "STOP")
# Partial rollouts take no seed
PARTIAL = {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 4, "generation_kwargs": {}}
SETTINGS = ({}, {"replay_fraction": 0.5}, PARTIAL)
UPDATES = range(2, 15, 2)  # 2 updates a generation
FAULTS_A_RUN = 3


def draw_cases() -> tuple[list, list]:
    """Return the faults of servers that come back, and of those that stay away: all kinds of them, in random order."""
    random = Random(20)
    kinds = list(product(PLACES, TARGETS, SIGNALS))
    back = random.sample(kinds, len(kinds)) + random.sample(kinds, 4)
    gone = sorted(random.sample(kinds, len(kinds)), key=lambda kind: kind[2] == "KILL")  # these end the server
    share = cases(NUM_CASES) / NUM_CASES
    return back[: max(1, round(12 * share))], gone[: max(1, round(8 * share))]


BACK, GONE = draw_cases()


class Servers:
    """A server at a time, of one model, started where there is none."""

    def __init__(self, folder: Path):
        self.folder, self.model, self.port = folder, save(toy_model(**WIDE), folder / "model"), free_port()
        self.process, self.stack = None, None

    def running(self) -> int:
        """Return the process of a server that is well; start one if need be."""
        if self.process is None:
            self.stack = contextlib.ExitStack()
            log = self.folder / f"server-{len(list(self.folder.glob('*.log')))}.log"
            self.process = self.stack.enter_context(vllm_server(self.model, log, port=self.port)).process
        return self.process

    def wake(self) -> None:
        server = psutil.Process(self.process)
        for each in [server, *server.children(recursive=True)]:
            each.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)
            self.stack.close()
        self.process = None


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.end()


def run(servers, folder, engine, faults=(), wait_s=BACK_S, **settings):
    """Train on two ranks; return what each says."""
    server = servers.running()
    settings = {
        "model": str(servers.model), "server": server, "faults": list(faults), "vllm_server_port": servers.port,
        "vllm_group_port": free_port(), "vllm_request_timeout": REQUEST_S, "vllm_server_timeout": wait_s,
        "max_steps": 16, **settings,
    }  # fmt: skip
    worker = ["-m", "tests.e2e.faults.server_worker", folder, json.dumps(settings)]
    succeeded(run_ranks(engine, worker, timeout_s=100 + BACK_S * len(list(faults))))
    return read_ranks(folder, **ENGINES[engine])


@pytest.fixture(scope="module")
def undisturbed(servers, tmp_path_factory):
    runs = {}

    def train(engine, **settings):
        key = json.dumps([engine, settings])
        if key not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            ranks = run(servers, folder, engine, save_strategy="steps", save_steps=2, **settings)
            assert ranks[0]["error"] is None
            runs[key] = folder, ranks
        return runs[key]

    return train


def assert_sampled_by_its_weights(ranks):
    logs = [log for log in ranks[0]["logs"] if "reward" in log]
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] < 1e-4  # rare tokens
    assert logs[-1]["step"] == 15  # of 16: the first update of the last generation


def assert_same_run(folder, ranks, undisturbed):
    expected_folder, expected = undisturbed
    left, right = (load_file(each / "final" / "model.safetensors") for each in (folder, expected_folder))
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=1e-6)
    mine, others = ([log["reward"] for log in each[0]["logs"] if "reward" in log] for each in (ranks, expected))
    assert mine == pytest.approx(others[-len(mine) :], abs=1e-6)


def engine_of(number: int) -> str:
    return ("cpu_zero3", "cpu_ddp")[number % 2]


@pytest.mark.parametrize("number", range(len(GONE)))
def test_all_ranks_stop_when_it_does_not_and_the_run_resumes(tmp_path, servers, undisturbed, number):
    fault, engine, settings = GONE[number], engine_of(number), SETTINGS[number % 3]
    update = UPDATES[number % len(UPDATES)]
    try:
        ranks = run(servers, tmp_path, engine, [(update, *fault, "gone")], GONE_S, **settings)
    finally:  # the next test has a server whatever comes
        if fault[2] == "STOP":
            servers.wake()
        else:
            servers.end()
    assert ranks[0]["left"] == []
    assert ranks[0]["error"] == ranks[1]["error"]
    during = "generation" if fault[0] == "generation" else "a weight transfer"
    message = ranks[0]["error"]
    assert message.startswith(f"The vLLM server at http://127.0.0.1:{servers.port} failed during {during}"), message
    assert f"This was after update {update}." in message
    checkpoint = re.search(r"The last checkpoint is (.*)\.$", message).group(1)
    assert Path(checkpoint).name == f"checkpoint-{update}"
    ranks = run(servers, tmp_path, engine, resume=checkpoint, **settings)
    assert_sampled_by_its_weights(ranks)
    if settings is not PARTIAL:
        assert_same_run(tmp_path, ranks, undisturbed(engine, **settings))


@pytest.mark.parametrize("number", range(0, len(BACK), FAULTS_A_RUN))
def test_a_run_goes_on_when_the_server_comes_back(tmp_path, servers, undisturbed, number):
    engine = engine_of(number)
    mine = zip(UPDATES, BACK[number : number + FAULTS_A_RUN], strict=False)
    faults = [(update, *fault, "back") for update, fault in mine]
    try:
        ranks = run(servers, tmp_path, engine, faults)
    finally:
        servers.end()  # the run may have started another, which ended with it
    assert ranks[0]["error"] is ranks[1]["error"] is None
    assert ranks[0]["left"] == []
    told = [each for each in ranks[0]["warnings"] if " failed during " in each]
    assert len(told) >= len(faults)
    for _, place, *_ in faults:
        assert any(("generation" if place == "generation" else "a weight transfer") in each for each in told)
    assert_sampled_by_its_weights(ranks)
    assert_same_run(tmp_path, ranks, undisturbed(engine))
