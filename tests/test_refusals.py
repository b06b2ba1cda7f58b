"""
What is rejected, by setting and value: a message names both. No test checks its wording.

One table for each way in: `BAPOConfig`, and `bapo-trl train`, which ends with one line.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from bapo_trl import BAPOConfig, cli
from tests.helpers.script_runs import fill_folder, flags
from tests.helpers.toy import CPU, OFF_POLICY, OVER_SERVER
from tests.rollouts.test_rollout_rounds import PARTIAL


# 24 samples a generation, in groups of 3; two updates on them
SIZES = {**CPU, **OFF_POLICY, "num_iterations": 1}
REPLAY = {**SIZES, "replay_fraction": 0.5, "replay_capacity": 200}
PARTIALS = {**SIZES, **PARTIAL}  # 12 groups a generation, three updates
OVERLAP = {**SIZES, **OVER_SERVER, "overlap_generation": True}
SAMPLER = {**SIZES, **OVER_SERVER, "use_sampler_logps": True}
FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
TIES = {"replay_fraction": 0.0, "replay_zero_advantage": True}

# The setting, its value, what else is set, and what the message has besides
OF_CONFIG = [
    # Types and numbers
    ("positive_contribution_target", "0.5", CPU), ("positive_contribution_target", np.bool_(True), CPU),
    ("replay_capacity", 64.0, CPU), ("replay_max_reuse", True, CPU), ("replay_zero_advantage", "maybe", CPU),
    ("num_iterations", 0, CPU), ("max_grad_norm", math.nan, CPU), ("learning_rate", np.float32("nan"), CPU),
    ("reward_weights", [1.0, -math.inf], CPU), ("delta", math.nan, CPU), ("delta", 0.9, CPU),
    # The search
    ("ratio_lower_start", 0.95, CPU, "ratio_lower_max"), ("ratio_lower_step", 0, CPU),
    ("ratio_upper_max", math.inf, CPU), ("ratio_upper_step", 1e-300, CPU),
    ("ratio_upper_max", 1e308, CPU, "ratio_upper_step"), ("search_order", {"a": 1}, CPU, "upper_first"),
    ("loss_type", "ppo", CPU, "vespo"), ("micro_batch_layout", "packed", CPU, "balanced", "trimmed", "padded"),
    # Bounds of TRL's, as the settings that fix ours; losses without bounds
    ("epsilon_high", 0.28, {**CPU, "epsilon": 0.2}, "epsilon", "0.8", "1.28"), ("epsilon_high", 0.28, CPU),
    ("epsilon", np.float32(0.25), {**CPU, "epsilon_high": np.float64(0.5)}, "0.75", "1.5"),
    ("epsilon", 1.5, CPU), ("epsilon", "0.2", CPU), ("epsilon", math.nan, CPU),
    ("epsilon", 0.3, {**CPU, "loss_type": "sapo"}), ("epsilon_high", -1.0, {**CPU, "loss_type": "cispo"}),
    ("epsilon_high", 5.0, {**CPU, "loss_type": "sapo"}), ("delta", 3.0, {**CPU, "loss_type": "vespo"}),
    ("ratio_upper_max", 2.0, {**CPU, "loss_type": "cispo"}),
    ("positive_contribution_target", 0.7, {**CPU, "loss_type": "vespo"}),
    ("positive_contribution_target", 0.7, {**CPU, **FIXED}),
    ("vllm_importance_sampling_mode", "sequence_mask", {**CPU, "loss_type": "vespo", "use_vllm": True}, "token_trunc"),
    # Replay, with the least value. A displaced row is drawn 2 versions later, and 3 old at the last update
    ("replay_capacity", 20, REPLAY, "24"), ("replay_fraction", 0.5 / 24, REPLAY, "0.0417"),
    ("replay_max_staleness", 2, REPLAY, "at least 3"),
    ("replay_max_staleness", 4, {**REPLAY, **TIES, "num_iterations": 3}, "at least 7"),
    # A whole batch may be without advantage
    ("replay_capacity", 47, {**REPLAY, "replay_zero_advantage": True, "replay_min_staleness": 3}, "at least 48"),
    # Before the draw at version 2 g, rows of generations g - 1 and g - 2 are younger than 6
    ("replay_capacity", 71, {**REPLAY, "replay_fraction": 1.0, "replay_min_staleness": 6}, "at least 72"),
    # A generation is 4 versions: at its second pass, at 4 g + 2, it is in the queue itself
    ("replay_capacity", 47, {**REPLAY, "replay_fraction": 1.0, "replay_min_staleness": 6, "num_iterations": 2},
     "at least 48"),
    ("enable_jit_checkpoint", True, REPLAY), ("sync_ref_model", True, {**REPLAY, "beta": 0.1}, "replay_fraction"),
    ("replay_max_reuse", 1, {**REPLAY, "num_iterations": 2}, "num_iterations"),
    # The first pass trains all, each later pass a whole generation's worth
    ("replay_max_reuse", 3, {**REPLAY, "num_iterations": 3}, "at least 4"),
    ("replay_max_reuse", 1, {**REPLAY, **TIES}, "at least 2"),
    ("steps_per_generation", 4, {**REPLAY, "gradient_accumulation_steps": 8, "num_iterations": 2}, "gradient_accu"),
    # Partial rollouts
    ("partial_rollout_oversampling", 2.0, PARTIALS), ("partial_rollout_oversampling", 1.04, PARTIALS, "1.083"),
    ("max_completion_length", None, PARTIALS), ("partial_rollout_max_staleness", 4, PARTIALS, "at least 5"),
    ("partial_rollout_max_staleness", 10, {**PARTIALS, "num_iterations": 2}, "at least 11"),
    ("replay_max_staleness", 7, {**PARTIALS, "replay_fraction": 0.5}, "at least 8"),
    *(
        ("generation_kwargs", {name: value}, PARTIALS, name)
        for name, value in (
            ("min_new_tokens", 2), ("stop_strings", ["."]), ("seed", 0), ("eos_token_id", [1, 5]),
            ("guidance_scale", 1.5), ("truncate_prompt_tokens", 9),
        )
    ),
    ("vllm_structured_outputs_regex", "[0-9]+", PARTIALS, "structured_outputs"),
    # Overlapped generation, log-probabilities of the sampler
    ("use_vllm", False, OVERLAP), ("vllm_mode", "colocate", OVERLAP), ("partial_rollout_oversampling", 1.5, OVERLAP),
    ("off_policy_mask_threshold", 0.5, OVERLAP), ("top_p", 0.9, OVERLAP, "0.9"),
    ("generation_kwargs", {"temperature": 0.7}, OVERLAP, "temperature", "0.7"),
    ("use_vllm", False, SAMPLER), ("top_p", 0.9, SAMPLER, "0.9"), ("off_policy_mask_threshold", 0.5, SAMPLER),
]  # fmt: skip


@pytest.mark.parametrize("case", OF_CONFIG, ids=lambda case: f"{case[0]}={case[1]}")
def test_a_setting_that_is_refused_is_named_with_its_value(case):
    name, value, others, *more = case
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        BAPOConfig("unused", **{**others, name: value})
    said = str(refused.value)
    if name not in ("generation_kwargs", "vllm_structured_outputs_regex"):  # of these, what is in them
        assert name in said
        assert repr(value) in said or str(value) in said
    assert all(each in said for each in more), said


FILES = {
    "seed.yaml": "seed: one\n",
    "key.yaml": "learning_rat: 1.0e-6\n",
    "no_data.yaml": "max_steps: 1\n",
    "files/a.jsonl": '{"prompt": "1+1="}\n',
    "files/b.jsonl": '{"prompt": \n',
    "mixed/a.jsonl": '{"prompt": "1+1="}\n',
    "mixed/b.jsonl": '{"prompt": ["1"], "x": 1}\n',
    "lists.jsonl": '{"prompt": ["1+1=", "2"]}\n',
    "three.jsonl": '{"prompt": "1+1="}\n{"prompt": "1+2="}\n{"prompt": "1+3="}\n',
    "chats.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}]}\n' * 4,
    "empty.jsonl": "",
    "text.jsonl": "no json",
    "other.parquet": "no parquet file",
    "empty.yaml": "",
    "list.yaml": "- max_steps: 3\n- seed: 1\n",
    "env.yaml": "env: [A]\n",
    "broken.yaml": "max_steps: 3\nseed: [1\n",
    "twice.yaml": "max_steps: 3\nseed: 1\nmax_steps: 4\n",
    "methods.yaml": "method: [grpo, bapo]\n",
    "sapo.yaml": "method: vespo\nloss_type: sapo\n",
    "parts.yaml": "datasets: [{path: json, data_files: none.jsonl}]\n",
    **{
        f"line-{number}.yaml": f"use_cpu: true\nbf16: false\n{line}\n"
        for number, line in enumerate(
            [
                "learning_rate: [1.0e-6]", "learning_rate: fast", "max_steps: 6.5", "save_steps: true", "seed: .inf",
                "ratio_upper_max: [3.0]", "output_dir: 2024-01-31", "loss_type: 1", "use_peft: maybe",
                "reward_weights: {a: 1}", "lora_target_modules: [[q_proj]]", "report_to: [wandb, 1]",
                "lr_scheduler_kwargs: 5", "generation_kwargs: top_k=3", "datasets: [{path: json, fraction: half}]",
            ]
        )
    },
}  # fmt: skip
# Flags of a run on train.jsonl, and what the line has
OF_COMMAND = [
    # Flags: abbreviated; misspelt, beside a setting (bf16 on a CPU) that would be refused too
    ({"positive_contribution": 1}, "--positive_contribution", "--positive_contribution_target"),
    ({"max-stepz": 3, "bf16": "true"}, "--max-stepz", "--max_steps"),
    ({"confg": "x", "sed": 1}, "--confg", "--config", "--sed", "--seed"),
    ({"output_dir": "out|recipes/math_7b.yaml"}, "recipes/math_7b.yaml"),
    # Methods
    ({"method": "dapo"}, "method", "'dapo'", "grpo"),
    ({"config": "methods.yaml"}, "method", "['grpo', 'bapo']"),
    ({"method": "grpo", "ratio_upper_max": 1.3}, "ratio_upper_max", "1.2", "1.3"),
    ({"method": "bapo", "loss_type": "vespo"}, "loss_type", "'dapo'", "'vespo'"),
    ({"config": "stale_samples", "method": "recommended", "loss_type": "dapo"}, "loss_type", "'vespo'"),
    ({"config": "sapo.yaml"}, "method", "'vespo'", "'sapo'"),
    # Recipes
    *(({"config": name}, "config", name, "aime24") for name in ("missing.yaml", "model", "out/math_7b.yaml", "")),
    *(({"config": f"{name}.yaml"}, f"{name}.yaml") for name in ("empty", "list", "env", "broken", "twice")),
    ({"config": "seed.yaml"}, "seed", "'one'"),
    ({"config": "parts.yaml", "dataset_name": None}, "datasets", "none.jsonl"),
    ({"config": "key.yaml"}, "key.yaml", "learning_rat", "learning_rate"),
    *(
        ({"config": name}, text.splitlines()[-1].partition(":")[0])
        for name, text in FILES.items()
        if name.startswith("line-")
    ),
    # Of TRL and transformers
    ({"logging_steps": 0}, "logging_steps"), ({"optim": "sgdd"}, "optim", "'sgdd'"),
    ({"steps_per_generation": 1, "num_generations": 4}, "num_generations", "4"),
    # Nothing of the demo's stands in
    ({"reward_funcs": "accuracy"}, "reward_funcs", "'accuracy'"), ({"reward_funcs": None}, "reward_funcs"),
    ({"dataset_name": None}, "dataset_name"), ({"config": "no_data.yaml", "dataset_name": None}, "dataset_name"),
    ({"dataset_name": "embedded", "model_name_or_path": None}, "model_name_or_path"),
    ({"bf16_full_eval": "true", "do_eval": "true"}, "bf16_full_eval"),
    # Data
    *(({"dataset_name": name}, name) for name in ("./missing.jsonl", "seed.yaml", "other.parquet", "empty.jsonl")),
    ({"dataset_name": "files"}, "files/b.jsonl", "line"), ({"dataset_name": "text.jsonl"}, "text.jsonl", "line 1"),
    ({"dataset_name": "mixed"}, "row 1", "['1']"), ({"dataset_name": "lists.jsonl"}, "row 0", "['1+1=', '2']"),
    ({"dataset_name": "three.jsonl"}, "3 prompts", "4", "steps_per_generation"),
    ({"dataset_name": "chats.jsonl"}, "chat template"),
    ({"dataset_train_split": "trein"}, "dataset_train_split", "'trein'"),
    ({"do_eval": "true"}, "dataset_test_split", "'test'"),
    ({"eval_dataset": "tset.jsonl"}, "eval_dataset", "'tset.jsonl'"),
    ({"eval_dataset": "two"}, "dataset_test_split", "'test'"),
    ({"eval_dataset": "two", "dataset_test_split": "b"}, "two", "prompt"),
    ({"eval_dataset": "test.jsonl", "eval_fraction": 0.5}, "eval_dataset", "eval_fraction"),
    ({"eval_dataset": "test.jsonl", "max_eval_samples": 0}, "max_eval_samples", "0"),
    ({"eval_fraction": 1.5}, "eval_fraction", "1.5"),
    ({"eval_fraction": 0.5, "dataset_streaming": "true"}, "eval_fraction", "0.5"),
    ({"extract_answer": "box"}, "extract_answer", "'box'"), ({"answer_column": "answer"}, "answer_column", "answer"),
    ({"system_prompt": "Add."}, "system_prompt"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = fill_folder(tmp_path_factory.mktemp("refused"), patch)
        for name, text in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        part = Dataset.from_list([{"text": "1+1="}])
        DatasetDict(a=part, b=part).save_to_disk("two")
        yield folder


@pytest.mark.parametrize("case", OF_COMMAND, ids=str)
def test_a_command_that_is_refused_ends_with_one_line(folder, case, capsys):
    settings, *named = case
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *flags(**{"dataset_name": "train.jsonl", **settings})])
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    line = said.splitlines()[-1]
    assert line.startswith("bapo-trl train: error: ")
    assert all(each in line for each in named), line
    assert "Traceback" not in said
    assert "usage: " not in said
