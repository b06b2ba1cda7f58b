"""Partial rollouts under ZeRO-3, with transformers' samplers and over a live vLLM server."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import peft
import psutil
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.tasks import character_tokenizer
from tests.e2e.launching import ENGINES, fork, vllm_server
from tests.helpers.commands import calling, free_port
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scores import assert_scored_by_its_policy, score
from tests.helpers.toy import CONTINUOUS_BATCHING, CPU, OFF_POLICY, OVER_SERVER, ending_model, part_of, toy_model
from tests.rollouts.test_rollout_rounds import PARTIAL, prompts_of_many_lengths, share_of_digits


class Recording(BAPOTrainer):
    """Keeps the rows of each generation; may have the server killed and started anew before one of them."""

    restart: tuple[int, int, str] | None = None  # generation, the server's process, the model it serves
    server = ExitStack()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.prompts = [], []

    def _generate_and_score_completions(self, inputs):
        if self.restart is not None and self.restart[0] == len(self.batches):
            if self.accelerator.is_main_process:
                _, process, model = self.restart
                workers = psutil.Process(process).children(recursive=True)
                for each in [psutil.Process(process), *workers]:
                    each.kill()
                psutil.wait_procs(workers)  # the server itself is for its parent to wait for
                log = Path(self.args.output_dir) / "second-server.log"
                self.server.enter_context(vllm_server(Path(model), log, port=self.args.vllm_server_port))
            self.accelerator.wait_for_everyone()
        self.prompts += [row["prompt"] for row in inputs[:: self.num_generations]]
        output = super()._generate_and_score_completions(inputs)
        rows = []
        for row, mask in enumerate(output["completion_mask"].bool()):
            if mask.any():
                columns = {"prompt_ids": output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()}
                for key in ("completion_ids", "token_versions", "old_per_token_logps", "sampling_per_token_logps"):
                    if key in output:
                        columns[key] = output[key][row][mask].tolist()
                rows.append(columns)
        self.batches.append(rows)
        return output


def train_on_a_rank(folder: str, settings: str) -> None:
    """Train with partial rollouts on any engine and sampler, and write what each rank trained on."""
    folder, settings = Path(folder), json.loads(settings)
    model = settings.pop("model")
    resume = settings.pop("resume", None)
    Recording.restart = settings.pop("restart", None)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear") if settings.pop("uses_lora", False) else None
    settings = {**CPU, **OFF_POLICY, **PARTIAL, "learning_rate": 3e-3, **settings}
    updates = settings["steps_per_generation"] * settings["num_iterations"] // settings["gradient_accumulation_steps"]
    # A checkpoint of each policy that samples
    args = BAPOConfig(
        str(folder / "run"), **{**settings, "save_strategy": "steps", "save_steps": updates, "save_only_model": False}
    )
    trainer = Recording(
        AutoModelForCausalLM.from_pretrained(model) if lora is None else model, share_of_digits, args,
        train_dataset=prompts_of_many_lengths(), processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=lora,
    )  # fmt: skip
    with Recording.server:
        trainer.train(resume_from_checkpoint=resume)
    parked = [group.inputs["prompt"] for group in part_of(trainer, PartialRollouts).pool]
    finish(trainer, folder, prompts=trainer.prompts, batches=trainer.batches, parked=parked)


# vLLM's attention on CPUs needs heads of 32 or more, and takes them to be as wide as the width over their number.
# 10 tokens of a prompt and 54 of a completion are all that the server's window of 64 takes.
WIDE = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
LONGEST = {"max_completion_length": 54, "partial_rollout_chunk_length": 2}


def wide_ending_model(is_tied: bool):
    """A model whose completions end with one token in twenty, whatever the context."""
    model = toy_model(initializer_range=0.05, tie_word_embeddings=is_tied, **WIDE).eval()
    end = model.config.eos_token_id
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        embeddings[:, 0] = 1.0  # carried along by the residual stream
        carried = model.model(torch.arange(2, 40).unsqueeze(0)).last_hidden_state[..., 0].mean()
        if not is_tied:
            head[:, 0] = 0.0
        head[end] = 0.0
        head[end, 0] = head[end + 1, 0] + math.log(0.05 / 0.95 * len(head)) / carried
    return model


def save(model, folder: Path) -> Path:
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


class Served(NamedTuple):
    model: Path
    port: int
    process: int


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = save(wide_ending_model(request.param), folder / "model")
    with vllm_server(model, folder / "server.log") as running:
        yield Served(model, *running)


def run(folder, model, engine="cpu_zero3", **settings) -> list[dict]:
    """Train on two ranks; return what each says."""
    folder.mkdir(exist_ok=True)
    fork(engine, calling(train_on_a_rank, folder, json.dumps({"model": str(model), **settings})))
    ranks = read_ranks(folder, **ENGINES[engine])
    for rank in ranks:
        assert [len(batch) for batch in rank["batches"]] == [2] + [24] * (len(rank["batches"]) - 1)
        if "replay_fraction" in settings:
            continue  # the queue gives and takes rows
        trained = [character_tokenizer().decode(row["prompt_ids"]) for batch in rank["batches"] for row in batch]
        assert sorted([*trained[::2], *rank["parked"]]) == sorted(rank["prompts"])  # nothing is lost, nothing twice
    return ranks


def over(server, **settings) -> dict:
    return {
        **OVER_SERVER, "vllm_server_host": "127.0.0.1", "vllm_server_port": server.port,
        "vllm_group_port": free_port(), "learning_rate": 2e-4, **LONGEST, **settings,
    }  # fmt: skip


def assert_stitched(ranks, model, folder, keys=("old_per_token_logps", "sampling_per_token_logps"), lora=False):
    """Each token has the log-probabilities of the checkpoint that sampled it; a quarter of the rows have several."""
    policies = {0: AutoModelForCausalLM.from_pretrained(model).eval()}

    def score_by(version, *ids):
        if version not in policies:
            checkpoint = folder / "run" / f"checkpoint-{version}"
            if lora:
                base = AutoModelForCausalLM.from_pretrained(model)
                policies[version] = peft.PeftModel.from_pretrained(base, checkpoint).merge_and_unload().eval()
            else:
                policies[version] = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        return score(policies[version], *ids)

    names = ("prompt_ids", "completion_ids", "token_versions", *keys)
    rows = [row for rank in ranks for batch in rank["batches"] for row in batch]
    rows = [[torch.tensor(row[name]) for name in names] for row in rows]
    assert_scored_by_its_policy(rows, score_by, rtol=1e-5, atol=2e-5)


def assert_weights_changed(ranks):
    assert max(log.get("ratio/max", 0) for log in ranks[0]["logs"]) > 1.05


@pytest.mark.parametrize("extra", [{}, {"replay_fraction": 0.5, "num_iterations": 2}], ids=["fresh", "replay"])
def test_zero3_over_a_live_server_scores_each_token_by_the_checkpoint_that_sampled_it(tmp_path, server, extra):
    settings = over(server, max_steps=30 if extra else 15, **extra)
    ranks = run(tmp_path, server.model, **settings)
    if not extra:  # with replay, the batches also hold what was sampled before
        assert_stitched(ranks, server.model, tmp_path)
    assert_weights_changed(ranks)
    generations = [log for log in ranks[0]["logs"] if "reward" in log]
    assert max(log["sampling/sampling_logp_difference/max"] for log in generations) < 2e-5
    followed = [log["sampling/server_followed"] for log in generations if "sampling/server_followed" in log]
    assert followed == pytest.approx([1] * len(followed), abs=0.02)  # there from where it can be told
    assert len(followed) >= 2


def test_lora_under_zero3_over_a_live_server(tmp_path, server):
    ranks = run(tmp_path, server.model, **over(server, uses_lora=True, learning_rate=1e-3, max_steps=12))
    assert_stitched(ranks, server.model, tmp_path, lora=True)
    assert_weights_changed(ranks)


def test_a_server_started_anew_between_two_generations_goes_on(tmp_path, server):
    """The fixture's server is killed: the last test on it."""
    ranks = run(tmp_path, server.model, **over(server, restart=(2, server.process, str(server.model)), max_steps=12))
    assert_stitched(ranks, server.model, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{}, CONTINUOUS_BATCHING, {"uses_lora": True, "learning_rate": 1e-2}],
    ids=["generate", "continuous batching", "lora"],
)
def test_zero3_with_the_samplers_of_transformers(tmp_path, settings):
    model = save(ending_model(), tmp_path / "model")
    ranks = run(tmp_path, model, max_steps=12, **settings)
    assert_stitched(ranks, model, tmp_path, keys=["old_per_token_logps"], lora="uses_lora" in settings)
    assert_weights_changed(ranks)
