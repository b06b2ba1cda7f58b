"""Flags of training and evaluation besides those of the config and the model."""

from dataclasses import dataclass, field
from typing import Any

from trl import ScriptArguments

from ..errors import InputError


EMBEDDED = "embedded"
"""What `dataset_name` and `model_name_or_path` say for the embedded task and its model."""


@dataclass
class BAPOScriptArguments(ScriptArguments):
    """
    Arguments of this script. `--dataset_name` is a file (json, jsonl, parquet), a folder, a Hub id, `embedded`,
    `chat_sums` (sums asked of a chat model) or `reasoning_gym:TASK`. `--model_name_or_path` is a folder, a Hub id,
    `embedded` or `smollm2` (SmolLM2-135M-Instruct from a package).
    """

    method: str | None = field(
        default=None,
        metadata={
            "help": "Settings of a method by one name: grpo, clip_higher, bapo, bapo_released, cispo, gspo, sapo, "
            "vespo, or recommended (docs/which_loss.md)."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
            "get_soft_overlong_punishment (0 to -1 over the last fifth of `max_completion_length`), or import paths "
            "such as my_package.rewards.my_reward."
        },
    )
    task_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Arguments of a task of reasoning-gym as JSON: \'{"min_terms": 2, "max_terms": 2}\'.'},
    )
    prompt_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column with the prompts; of several, the first that a dataset has. By default `prompt` as it is. "
            "With this, `prompt_template` or `system_prompt`, text becomes a user's message for a chat model."
        },
    )
    answer_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column with the answers; of several, the first that a dataset has. A dot leads to a field, as in "
            "`reward_model.ground_truth`. Rewards get it as `solution` too, unless there is such a column."
        },
    )
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "Text around each prompt: {prompt} stands for the prompt, {NAME} for the column NAME."},
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Text of the system message of each prompt."})
    eval_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Prompts to evaluate on, before and after the training: a file, a folder or a Hub id. Its only "
            "split, or `dataset_test_split`; `dataset_config` is for it where it is the only data."
        },
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={"help": "Share of the training prompts to hold out and evaluate on, the same for any seed."},
    )
    extract_answer: str | None = field(
        default=None,
        metadata={
            "help": "What finds the answer in a completion, for maj@k: boxed, last_number, text (all of it), or an "
            "import path of a function of the text."
        },
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Prompts to evaluate on: the first so many, for a quick look. By default all."}
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Whether a run may delete checkpoints, model and report of an earlier one in `output_dir`, and "
            "`merge_adapter` the folder `merged`. Else it is refused."
        },
    )
    merge_adapter: bool = field(
        default=False,
        metadata={
            "help": "Whether to save the model with the adapter merged in, in the folder `merged` of `output_dir`. "
            "With `do_train` false and no data, nothing else is done."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Whether to print what the run would do, and do nothing of it: samples, updates, their age, the "
            "first prompt, and what each reward function gives. No weights are loaded, nothing is written."
        },
    )

    def __post_init__(self):
        for name in ("reward_funcs", "prompt_column", "answer_column"):
            if isinstance(getattr(self, name), str):  # in a recipe, one name needs no brackets
                setattr(self, name, [getattr(self, name)])
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise InputError(f"`max_eval_samples` is {self.max_eval_samples}: set it to at least 1, or leave it out.")
