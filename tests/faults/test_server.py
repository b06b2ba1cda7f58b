"""The vLLM server dies, hangs, rejects or answers late, and comes back or not."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from bapo_trl.vllm_server import client as server_client
from tests.helpers.alike import assert_same_weights
from tests.helpers.fake_vllm import CHECK, PARTIAL, RUN, ModelServer, client_of
from tests.helpers.faults import state_of
from tests.helpers.toy import toy_dataset, toy_model, toy_trainer, training_logs


pytestmark = pytest.mark.trainings

REPLAY = {"replay_fraction": 0.5}


def trainer_over(server, output_dir, num_prompts=40, **settings):
    lora = settings.pop("lora", None)
    data = {"train_dataset": toy_dataset(num_prompts), "peft_config": lora and LoraConfig(**lora)}
    return toy_trainer(output_dir, vllm_server_base_url=server.url, trainer_args=data, **{**RUN, **settings})


def train(output_dir, faults=None, comes_back=True, resume=None, server=None, **settings):
    """Train over a server with faults; return the trainer. A server that comes back does at the second look for it."""
    server = server or ModelServer(faults)
    if comes_back:
        settings.setdefault("vllm_server_timeout", 30)

    def on_wait(look):
        if look == 2 and comes_back:
            server.stop()
            server.start()

    with client_of(server, on_wait), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_over(server, output_dir, **settings)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            server.stop()
            trainer.caught = [str(warning.message) for warning in caught if "vLLM server" in str(warning.message)]
            trainer.server = server
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    runs = {}

    def run(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            runs[key] = train(folder, save_strategy="steps", save_steps=2, **settings)
        return runs[key]

    return run


def assert_same_run(trainer, expected):
    assert trainer.state.global_step == expected.state.global_step
    assert_same_weights(trainer, expected)
    mine, others = ([log["reward"] for log in training_logs(each) if "reward" in log] for each in (trainer, expected))
    assert mine == others[-len(mine) :]


# 58 weights a transfer would take long to count: the 5th of the second transfer is the 5th beyond those of the first
NUM_WEIGHTS = 15
FAULTS = [
    *(
        ({fault[:2]: fault[2]}, {})
        for fault in (
            ("/v1/completions", 2, "die"),
            ("/v1/completions", 2, "hang"),
            (CHECK, 8, "die"),  # the second request after the second transfer
            ("/start_weight_update", 2, "die"),
            ("tensor", NUM_WEIGHTS + 5, "die"),
            ("/update_weights", 3, "hang"),
            ("/update_weights", 2, 500),
            ("/finish_weight_update", 2, "die"),
            ("/reset_prefix_cache", 2, "hang"),
            ("/server_info", 5, "die"),
        )
    ),
    # Several failures of a generation
    ({("/v1/completions", 2): 500, ("/v1/completions", 3): "die", ("/update_weights", 4): "die"}, {}),
    ({("/v1/completions", 5): "die"}, {**REPLAY, **PARTIAL}),
]


@pytest.mark.parametrize(("faults", "settings"), FAULTS)
def test_a_run_survives_a_server_that_comes_back(tmp_path, undisturbed, faults, settings):
    trainer = train(tmp_path, faults, **settings)
    assert not trainer.server.faults  # they did happen
    assert trainer.caught
    assert_same_run(trainer, undisturbed(**settings))
    if not settings:  # else old samples are compared, too
        differences = [log.get("sampling/sampling_logp_difference/max", 0) for log in training_logs(trainer)]
        assert 0 < max(differences) < 1e-5


def test_a_transfer_of_an_adapter_that_breaks_off_is_repeated_bit_by_bit(tmp_path, undisturbed):
    lora = {"r": 4, "target_modules": "all-linear"}
    trainer = train(tmp_path, {("tensor", NUM_WEIGHTS + 5): "die"}, lora=lora)
    assert not trainer.server.faults
    assert_same_run(trainer, undisturbed(lora=lora))
    for name, weight in toy_model().named_parameters():
        path, _, own = name.rpartition(".")
        module = trainer.model.base_model.model.get_submodule(path)
        assert torch.equal(getattr(getattr(module, "base_layer", module), own), weight), name


DIES = ("/v1/completions", 3, "die")
DIES_IN_A_ROUND = ("/v1/completions", 7, "die")  # several requests a generation
LOSES_WEIGHTS = ("tensor", 2 * NUM_WEIGHTS + 5, "die")
HANGS = ("/update_weights", 3, "hang")


@pytest.mark.parametrize(
    ("fault", "during", "settings"),
    [
        (DIES, "generation", {}),
        (HANGS, "a weight transfer", {}),
        (DIES, "generation", REPLAY),
        (DIES_IN_A_ROUND, "generation", PARTIAL),
        (LOSES_WEIGHTS, "a weight transfer", {**REPLAY, **PARTIAL}),
        (DIES, "generation", {"save_only_model": True, "save_strategy": "steps", "save_steps": 2}),
    ],
)
def test_a_server_that_stays_away_ends_the_run_which_resumes(tmp_path, undisturbed, fault, during, settings):
    path, number, what = fault
    server = ModelServer({(path, number): what})
    if what == "hang":  # and everything after it
        server.faults.update({("/init_weight_transfer_engine", number): "hang" for number in range(2, 9)})
    with pytest.raises(RuntimeError) as raised:
        train(tmp_path, comes_back=False, server=server, **{"save_strategy": "no", **settings})
    message = str(raised.value)
    update = int(re.search(r"after update (\d+)", message).group(1))
    assert message.startswith(f"The vLLM server at {server.url} failed during {during}")
    assert "`vllm_server_timeout` 0.2" in message
    checkpoint = tmp_path / f"checkpoint-{update}"
    assert message.endswith(f"The last checkpoint is {checkpoint}.")
    settings = {key: value for key, value in settings.items() if not key.startswith("save_")}
    expected = undisturbed(**settings)
    assert state_of(checkpoint) == state_of(Path(expected.args.output_dir, f"checkpoint-{update}"))
    resumed = train(tmp_path, resume=True, **settings)
    assert_same_run(resumed, expected)


@pytest.mark.parametrize(
    ("last", "what", "message", "count"),
    [
        (3, 400, r"failed during generation: Exception: Request failed: 400.*after update 2", 2),  # it rejects
        (19, 500, r"failed during generation, after 3 repetitions: HTTPError: status 500", 5),
    ],
)
def test_a_server_that_refuses_or_fails_each_time_ends_the_run(tmp_path, last, what, message, count):
    server = ModelServer({("/v1/completions", number): what for number in range(2, last + 1)})
    with pytest.raises(RuntimeError, match=message):
        train(tmp_path, server=server)
    assert server.counts["/v1/completions"] == count


@pytest.mark.parametrize("what", ["nobody", "deaf"])
def test_a_server_that_is_not_there_at_the_start(tmp_path, monkeypatch, what):
    monkeypatch.setattr(server_client, "CONNECT_TIMEOUT_S", 0.1)
    server = ModelServer({("/health", number): "hang" for number in range(1, 99)})
    if what == "nobody":
        server.stop()
    with pytest.raises(RuntimeError, match=r"failed during startup: ConnectionError: not up within 0.2 seconds"):
        train(tmp_path, server=server, comes_back=False)
