"""Whatever the layout of its micro-batches, an update has the same gradient; and what the log says of it."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bapo_trl import BAPOTrainer
from bapo_trl.batch.layout import LAYOUTS
from tests.golden.curves import train_over_a_server
from tests.helpers.asynchronous import save_toy
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.rollouts import multi_turn
from tests.helpers.scripted import Scripted
from tests.helpers.toy import ending_model, toy_dataset, toy_model, toy_run, training_logs


NARROWER = ("trimmed", "balanced")
# 2 groups of 3 completions in a micro-batch, 2 micro-batches in an update, 2 updates on the samples of a generation
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "num_iterations": 1, "max_steps": 8}


def half_equal(completions, **kwargs) -> list[float]:
    """Rewards that are the same for all in about half of the groups, and neither 0 nor 1."""
    return [0.3 + 0.4 * (len(text) > 3) for text in completions]


class Lengths(Scripted):
    """Completions of unequal length that follow from the prompt, some of which end by the limit of tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shapes = []

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        end = self.processing_class.eos_token_id
        return [[*tokens[:-1], end] if len(tokens) % 2 else tokens for tokens in completions], logps

    def _compute_loss(self, model, inputs):
        if self.model.training:
            self.shapes.append((*inputs["completion_ids"].shape, inputs["prompt_ids"].shape[1]))
        return super()._compute_loss(model, inputs)


class PerToken(Lengths):
    """Advantages per token, as other methods give them."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        places = torch.arange(batch["completion_ids"].shape[1])
        batch["advantages"] = batch["advantages"][:, None] * (1 + places % 3)
        return batch


def train(folder, layout, model=None, trainer_class=Lengths, **settings):
    """Train a toy model with a layout; prompts have 4 to 6 tokens."""
    torch.manual_seed(0)
    settings = {**SGD, "reward_funcs": half_equal, "micro_batch_layout": layout, **settings}
    return toy_run(folder / layout, ending_model() if model is None else model, trainer_class, **settings)


def weights(trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def assert_same_training(trainers) -> None:
    """See that the weights moved, and are the same to 1e-5."""
    padded, *others = trainers
    assert max(log["grad_norm"] for log in training_logs(padded)) > 1e-2
    for trainer in others:
        torch.testing.assert_close(weights(trainer), weights(padded), rtol=0, atol=1e-5)


@pytest.mark.trainings
@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo")),
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "search_scope": "batch"},
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"loss_type": "grpo", "scale_rewards": "batch", "num_iterations": 2, "search_scope": "micro_batch"},
        {"loss_type": "grpo", "steps_per_generation": 8, "gradient_accumulation_steps": 3},
        {"loss_type": "grpo", "gradient_accumulation_steps": 3, "num_iterations": 2},
        {"loss_type": "grpo", "mask_truncated_completions": True, "max_completion_length": 5},
        {"loss_type": "grpo", "replay_fraction": 0.5},
        {"loss_type": "grpo", "replay_zero_advantage": True, "num_iterations": 2},
        {"loss_type": "grpo", "entropy_coef": 0.05},
        {"loss_type": "grpo", "top_entropy_quantile": 0.5},
        {"loss_type": "grpo", "pad_to_multiple_of": 2},
        {"loss_type": "grpo", "negative_weight_min": 0.2, "positive_contribution_target": 0.8},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.01},
        {"loss_type": "dapo", "trainer_class": PerToken},
        {"loss_type": "grpo", "trainer_args": {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}},
        {"loss_type": "grpo", "gradient_checkpointing": False},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values())[:60],
)
def test_weights_after_eight_updates_are_those_of_padded_micro_batches(tmp_path, settings):
    trainers = [train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)]
    assert_same_training(trainers)
    computed = [sum(log.get("padding/computed", 0) for log in training_logs(trainer)) for trainer in trainers]
    assert computed[0] > computed[2]


@pytest.mark.trainings
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_partial_rollouts(tmp_path, loss_type):
    settings = {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "loss_type": loss_type}
    settings |= {"trainer_class": BAPOTrainer}
    assert_same_training([train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)])


@pytest.mark.trainings
def test_the_kl_term(tmp_path):
    ending_model().save_pretrained(tmp_path / "model")  # where TRL finds the reference
    settings = {"model": str(tmp_path / "model"), "beta": 0.1, "loss_type": "grpo"}
    trainers = [train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)]
    assert_same_training(trainers)
    assert {log["padding/skipped"] for trainer in trainers for log in training_logs(trainer)} == {0}
    assert training_logs(trainers[0])[-1]["kl"] > 1e-3


@pytest.mark.trainings
def test_overlapped_generation(tmp_path):
    layouts = ("padded", "balanced")
    assert_same_training(
        [train_over_a_server(tmp_path / name, micro_batch_layout=name, max_steps=8) for name in layouts]
    )


@pytest.mark.trainings
def test_the_loss_of_a_router(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": True}
    of_toy = toy_model().config.to_dict()
    config = Qwen3MoeConfig(**{name: of_toy[name] for name in of_toy if name != "model_type"}, **sizes)

    def model():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config)

    assert_same_training([train(tmp_path, layout, model()) for layout in ("padded", *NARROWER)])


@pytest.mark.trainings
@pytest.mark.parametrize("settings", [{}, {"replay_fraction": 0.5}, {"beta": 0.1}], ids=str)
def test_prompts_and_sampled_tokens_are_those_of_padded_micro_batches(tmp_path, settings):
    sampled = {}
    for layout in ("padded", "balanced"):

        class Sampled(BAPOTrainer):
            def _generate_single_turn(self, prompt_ids, *args, **kwargs):
                output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                sampled.setdefault(self.args.micro_batch_layout, []).append((prompt_ids, output[0]))
                return output

        # At a rate of 0, the policies stay the same, whatever the random numbers
        model = AutoModelForCausalLM.from_pretrained(save_toy(tmp_path), dtype=torch.float32)
        train(tmp_path, layout, model, trainer_class=Sampled, learning_rate=0.0, **settings)
    assert len(sampled["padded"]) > 2
    assert sampled["balanced"] == sampled["padded"]


@pytest.mark.trainings
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_and_sliding_windows(tmp_path, attention):
    def model():
        window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        return toy_model(attn_implementation=attention, **window)

    assert_same_training([train(tmp_path, layout, model()) for layout in ("padded", *NARROWER)])


@pytest.mark.trainings
def test_positions_that_count_padding_keep_it(tmp_path):
    """GPT-2: the padding before a prompt moves its tokens, so it stays, and the ratios of fresh samples are 1."""

    def model():
        torch.manual_seed(0)
        like = toy_model().config
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
        config = GPT2Config(vocab_size=like.vocab_size, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        config.pad_token_id, config.eos_token_id, config.bos_token_id = like.pad_token_id, like.eos_token_id, None
        return GPT2LMHeadModel(config)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # neither replay nor partial rollouts: nothing to warn of
        trainers = [train(tmp_path, layout, model()) for layout in ("padded", *NARROWER)]
    assert_same_training(trainers)
    for trainer in trainers:
        first = training_logs(trainer)[0]
        assert max(first["ratio/max"] - 1, 1 - first["ratio/min"]) < 1e-5
        assert len({shape[2] for shape in trainer.shapes[:4]}) == 1


@pytest.mark.trainings
def test_turns_of_an_environment(tmp_path):
    """Its tokens stand between those of the policy, and have no part in the loss."""
    settings = {"trainer_args": {"rollout_func": multi_turn}, "max_completion_length": 4, "loss_type": "grpo"}
    assert_same_training([train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)])


@pytest.mark.trainings
@pytest.mark.parametrize("scope", ["batch", "carried_over"])
def test_the_search_finds_the_bounds_of_padded_micro_batches(tmp_path, scope):
    logs = [training_logs(train(tmp_path, layout, search_scope=scope, loss_type="dapo")) for layout in LAYOUTS]
    bounds = [[(log["bapo/clip_low"], log["bapo/clip_high"]) for log in each] for each in logs]
    assert bounds[0] == bounds[1] == bounds[2]
    assert len(set(bounds[0])) > 1


# What is computed


@pytest.mark.trainings
def test_a_short_sample_shares_a_micro_batch_with_more_and_a_long_one_with_fewer(tmp_path):
    shapes = {layout: train(tmp_path, layout, loss_type="dapo", beta=0.0).shapes for layout in LAYOUTS}
    assert {rows for rows, *_ in shapes["padded"]} == {6}
    assert len({width for _, width, _ in shapes["padded"][:4]}) == 1  # of the generation
    largest = {layout: max(rows * (left + right) for rows, right, left in each) for layout, each in shapes.items()}
    assert largest["balanced"] < largest["trimmed"] <= largest["padded"]
    assert {len(each) for each in shapes.values()} == {16}  # as many micro-batches as with TRL


@pytest.mark.parametrize("skips", [True, False])
def test_samples_without_an_advantage_are_not_computed(tmp_path, skips):
    logs = training_logs(train(tmp_path, "balanced", skip_zero_advantage=skips))
    skipped = [log["padding/skipped"] for log in logs]
    assert (max(skipped) > 0.3) == skips
    generations = [log for log in logs if "frac_reward_zero_std" in log]
    for log, first, second in zip(generations, skipped[::2], skipped[1::2], strict=True):
        if skips:  # of the two updates of a generation
            assert (first + second) / 2 == pytest.approx(log["frac_reward_zero_std"])


@pytest.mark.trainings
def test_groups_of_equal_rewards_with_an_advantage_by_rounding_are_trained_as_with_trl(tmp_path):
    """The float32 mean of seven equal rewards is another number, and TRL divides the difference by almost 0."""
    sizes = {"num_generations": 7, "per_device_train_batch_size": 7}
    settings = {"reward_funcs": lambda completions, **kwargs: [1000.1] * len(completions), **sizes}
    trainers = [train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)]
    assert_same_training(trainers)
    assert {log["padding/skipped"] for log in training_logs(trainers[-1])} == {0}


@pytest.mark.trainings
def test_an_update_without_a_gradient_moves_the_weights_as_with_trl(tmp_path):
    """Momentum and weight decay go on."""

    def first_differ(completions, trainer_state, **kwargs):
        return half_equal(completions) if trainer_state.global_step == 0 else [0.5] * len(completions)

    settings = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "reward_funcs": first_differ}
    trainers = [train(tmp_path, layout, **settings) for layout in ("padded", *NARROWER)]
    assert_same_training(trainers)
    assert [log["grad_norm"] for log in training_logs(trainers[-1])[2:]] == [0] * 6


# Several ranks


def train_on_a_rank(folder: str, settings: str) -> None:
    found = {}
    for layout in ("padded", *NARROWER):
        data = {"trainer_args": {"train_dataset": toy_dataset(80)}}
        trainer = train(Path(folder), layout, **data, **json.loads(settings))
        found[layout] = weights(trainer).tolist()
        found[f"rows of {layout}"] = [rows for rows, *_ in trainer.shapes]
    finish(trainer, folder, **found)


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{"loss_type": "grpo"}, {"loss_type": "bnpo"}, {"replay_fraction": 0.5}], ids=str)
def test_two_ranks_of_unequal_lengths(tmp_path, settings):
    succeeded(run_function(train_on_a_rank, tmp_path, json.dumps(settings), ranks=2))
    first, second = read_ranks(tmp_path)
    for layout in ("padded", *NARROWER):
        assert first[f"rows of {layout}"] == second[f"rows of {layout}"]
        torch.testing.assert_close(torch.tensor(first[layout]), torch.tensor(second["padded"]), rtol=0, atol=1e-5)
    assert len(set(first["rows of balanced"])) > 1 or settings["loss_type"] == "bnpo"


@pytest.mark.trainings
def test_the_reason_why_micro_batches_are_not_balanced_is_said_once(tmp_path, capsys):
    train(tmp_path, "balanced", loss_type="bnpo")
    printed = capsys.readouterr().out
    assert printed.count("not balanced") == printed.count("`loss_type` 'bnpo'") == 1
    train(tmp_path, "balanced")
    assert "not balanced" not in capsys.readouterr().out


@pytest.mark.trainings
def test_a_key_that_the_layout_does_not_know_keeps_samples_where_they_are(tmp_path, capsys):
    class OwnKey(Lengths):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "of_each_token": batch["completion_ids"] * 2, "of_each": torch.arange(24)}

        def _compute_loss(self, model, inputs):
            if self.model.training:
                assert inputs["of_each_token"].equal(inputs["completion_ids"] * 2)
                assert len(inputs["of_each"]) == 6
            return super()._compute_loss(model, inputs)

    trainer = train(tmp_path, "balanced", trainer_class=OwnKey)
    assert capsys.readouterr().out.count("`of_each_token`") == 1
    assert {rows for rows, *_ in trainer.shapes} == {6}
    assert_same_training([train(tmp_path, "padded"), trainer])
