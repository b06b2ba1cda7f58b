"""
Settings in combination: every pair of values comes together in some run of two updates.

Each run is held against autograd, and the model is compared before and after.
"""

import itertools
import json
import math
import random
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoHaConfig
from transformers import TrainerCallback
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.batch.policy_loss import policy_mask
from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream.forward_passes import in_eval_mode
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.model_state import model_state
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import digits_reward, opt_model, toy_dataset, toy_model, toy_trainer, training_logs


MODELS = {
    "nothing": toy_model,
    "attention dropout": lambda: toy_model(attention_dropout=0.3),
    "functional dropout": lambda: opt_model(dropout=0.3),
    "embedding noise": toy_model,
    "LoHa dropout": toy_model,
}

MICRO_BATCHES = {
    "one": {"gradient_accumulation_steps": 1},
    "looked ahead at": {"gradient_accumulation_steps": 2, "search_scope": "batch"},
    "searched each": {"gradient_accumulation_steps": 2, "search_scope": "micro_batch"},
    "carried over": {"gradient_accumulation_steps": 2, "search_scope": "carried_over"},
}


def made_rollouts(has_mask: bool, prompts: list, trainer: GRPOTrainer) -> dict:
    """A `rollout_func`: random completions with the log-probabilities of another sampler, masked now and then."""
    random = torch.Generator().manual_seed(1000 * trainer.state.global_step + trainer.accelerator.process_index)
    completions = [torch.randint(2, 12, (3 + i % 6,), generator=random).tolist() for i in range(len(prompts))]
    for ids in completions[::4] + completions[1::4] + completions[2::4]:  # the others are cut off
        ids[-1] = trainer.processing_class.eos_token_id
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    logps = []
    for prompt, ids in zip(prompt_ids, completions, strict=True):
        with in_eval_mode(trainer.model), torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        of_model = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        logps.append((of_model + 0.2 * torch.randn(len(ids), generator=random)).tolist())
    output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}
    if has_mask and trainer.state.global_step < 2:  # not in every generation
        output["env_mask"] = [[i % 3 != 1 for i in range(len(ids))] for ids in completions]
    return output


def lower(text: str) -> str:
    """
    Make text small.

    Args:
        text: The text.

    Returns:
        The small text.
    """
    return text.lower()


def tool_parts() -> dict:
    """Parts of a trainer whose model calls a tool with each capital letter that it samples."""
    tokenizer = character_tokenizer()
    # A call's text and its arguments; a tool's answer takes two tokens
    call = "{% for call in message.tool_calls or [] %}{{ call.function }}{% endfor %}"
    said = "{% if message.role == 'tool' %}={% endif %}{{ message.content }}"
    tokenizer.chat_template = f"{{% for message in messages %}}{call}{said}{{% endfor %}}"
    function = {"name": "lower", "arguments": {"text": "{text}"}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {
            "tool_calls": {
                "open_pattern": "(?P<text>[A-Z])", "close_pattern": "(?=.|$)", "repeats": True, "content": "text",
                "transform": {"type": "function", "function": function},
            },
            "content": {"close_pattern": "$", "content": "text"},
        },
    }  # fmt: skip
    prompts = [[{"role": "user", "content": prompt}] for prompt in toy_dataset()["prompt"]]
    return {"tools": [lower], "processing_class": tokenizer, "train_dataset": Dataset.from_dict({"prompt": prompts})}


def digits_and_answers(completions, **kwargs) -> list[float]:
    """Reward digits in all that was said, whether or not a tool said it."""
    texts = ["".join(message["content"] for message in messages) for messages in completions]
    return digits_reward(texts)


SAMPLES = {
    "TRL's": dict,
    "rollout_func": lambda: {"rollout_func": partial(made_rollouts, False)},
    "env_mask": lambda: {"rollout_func": partial(made_rollouts, True)},
    "tools": tool_parts,
}

SETTINGS = {
    "samples": list(SAMPLES), "trains_twice": [False, True],
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    "negative_weight_min": [1.0, 0.05], "random": list(MODELS),
    "micro_batches": list(MICRO_BATCHES), "processes": [1, 2], "importance_sampling_level": ["token", "sequence"],
    "gradient_checkpointing": [True, False], "mask_truncated_completions": [False, True],
    "top_entropy_quantile": [1.0, 0.5], "off_policy_mask_threshold": [None, 0.1], "replay_fraction": [0.0, 0.5],
    "beta": [0.0, 0.1],
}  # fmt: skip


class StateOfEachUpdate(TrainerCallback):
    """Keeps what is on the model before the training and after each update, the modes aside: training sets them."""

    def __init__(self):
        self.seen = []

    def _add(self, model):
        self.seen.append({name: value for name, value in model_state(model).items() if name != "modes"})

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._add(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._add(model)


class AgainstAutograd(BAPOTrainer):
    """Keeps the size of the gradient of TRL's policy loss alone, by micro-batch and by the sign of the advantage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = [[]]
        self.answered = 0  # tokens that a tool said
        self._output_of_forward = self._output_given = None

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._output_given is not None:
            return self._output_given
        self._output_of_forward = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self._inputs_of_loss = self._loss_inputs  # with the advantages as the loss weighs them
        return self._output_of_forward

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if "tool_mask" in inputs:
            self.answered += int((inputs["completion_mask"] > inputs["tool_mask"]).sum())
        self._output_given, beta, self.beta = self._output_of_forward, self.beta, 0.0
        policy_loss = GRPOTrainer._compute_loss(self, model, self._inputs_of_loss)
        self._output_given, self.beta = None, beta
        (gradient,) = torch.autograd.grad(policy_loss, self._output_of_forward[0], retain_graph=True)
        size = gradient.double().abs().sum(1)
        if self.loss_type == "bnpo":  # the search takes the update as one batch
            size = size * policy_mask(inputs).sum()
        by_sign = torch.stack([size[inputs["advantages"] > 0].sum(), size[inputs["advantages"] < 0].sum()])
        self.sizes[-1].append(self.accelerator.reduce(by_sign, reduction="sum"))
        if self.accelerator.sync_gradients:
            self.sizes.append([])
        return loss


def save_models(folder: Path) -> None:
    """Save each model of `MODELS`; a tenth of all tokens ends a completion, so that some end and some are cut off."""
    tokenizer = character_tokenizer()
    for name, make in MODELS.items():
        model = make()
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(8, len(tokenizer), 10)]
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def trained(folder: Path, case: dict) -> tuple[AgainstAutograd, StateOfEachUpdate]:
    own = ("random", "micro_batches", "processes", "samples", "trains_twice")
    args = {name: value for name, value in case.items() if name not in own}
    args |= MICRO_BATCHES[case["micro_batches"]]
    if args["loss_type"] == "cispo":
        args["epsilon_high"] = 1.1
    callback = StateOfEachUpdate()
    parts = {"callbacks": [callback], **SAMPLES[case["samples"]]()}
    if case["random"] == "LoHa dropout":
        parts["peft_config"] = LoHaConfig(r=4, target_modules="all-linear", init_weights=False, rank_dropout=0.3)
    trainer = toy_trainer(
        folder / "out", model=str(folder / case["random"]), trainer_class=AgainstAutograd,
        neftune_noise_alpha=5.0 if case["random"] == "embedding noise" else None,
        steps_per_generation=args["gradient_accumulation_steps"], num_iterations=2, max_steps=2,
        max_completion_length=20 if case["samples"] == "tools" else 12, per_device_train_batch_size=12,
        reward_funcs=digits_and_answers if case["samples"] == "tools" else digits_reward, trainer_args=parts, **args,
    )  # fmt: skip
    if case["trains_twice"]:
        trainer.train()
        trainer.sizes, callback.seen = [[]], []
    trainer.train()
    return trainer, callback


def check(trainer: AgainstAutograd, callback: StateOfEachUpdate, case: dict) -> None:
    assert trainer.accelerator.num_processes == case["processes"]
    logs = training_logs(trainer)
    assert len(logs) == 2
    if case["samples"] == "tools":
        assert logs[0]["tools/call_frequency"] > 0.2
        assert sum(gather_object([trainer.answered])) > 0
    assert any(0 < log.get("bapo/positive_share", 0) < 1 for log in logs)  # tokens of both signs
    for log, sizes in zip(logs, trainer.sizes, strict=False):
        assert math.isfinite(log["loss"])
        assert math.isfinite(log["grad_norm"])
        searched = [[size] for size in sizes] if case["micro_batches"] == "searched each" else [sizes]
        totals = torch.stack([torch.stack(each).sum(0) for each in searched])  # (searches, 2)
        expected = (totals[:, 0] / totals.sum(1)).nanmean().item()
        assert log.get("bapo/positive_share", math.nan) == pytest.approx(expected, rel=1e-5, abs=1e-12, nan_ok=True)
    before, *after = callback.seen
    assert len(after) == 2
    assert all(state == before for state in after)


def pairwise(settings: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """
    Combine settings such that any two values of different settings come together at least once.

    Greedy: each combination starts from a pair that is still missing; every other setting takes the value that
    covers most of the missing pairs.
    """
    generator = random.Random(seed)
    names = list(settings)
    missing = {
        frozenset({(left, i), (right, j)})
        for left, right in itertools.combinations(names, 2)
        for i in range(len(settings[left]))
        for j in range(len(settings[right]))
    }
    combinations = []
    while missing:
        chosen = dict(min(missing, key=sorted))
        for name in generator.sample(names, len(names)):
            if name not in chosen:
                places = generator.sample(range(len(settings[name])), len(settings[name]))
                chosen[name] = max(
                    places,
                    key=lambda place: sum(frozenset({(name, place), other}) in missing for other in chosen.items()),
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        combinations.append({name: settings[name][chosen[name]] for name in names})
    return combinations


CASES = pairwise(SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    save_models(folder)
    return folder


def test_every_pair_of_values_comes_together():
    for left, right in itertools.combinations(SETTINGS, 2):
        together = {(case[left], case[right]) for case in CASES}
        assert together == set(itertools.product(SETTINGS[left], SETTINGS[right]))
    assert len(CASES) < 45


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case["processes"] == 1],
    ids=lambda case: "-".join(str(value) for name, value in case.items() if name != "processes"),
)
def test_the_logged_share_is_that_of_the_loss_and_nothing_stays_on_the_model(folder, case):
    check(*trained(folder, case), case)


def run_on_a_rank(folder: str) -> None:
    """Run the combinations in FOLDER/cases.json; write what went wrong in each."""
    errors = []
    for case in json.loads((Path(folder) / "cases.json").read_text()):
        trainer, callback = trained(Path(folder), case)
        try:
            check(trainer, callback, case)
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
