"""Settings of the command line that belong to no trainer or model."""

from dataclasses import dataclass, field
from typing import Any

from trl import ScriptArguments

from ...errors import InputError


EMBEDDED = "embedded"
"""Name of the built-in task for `dataset_name`, and of its model for `model_name_or_path`."""


@dataclass
class BAPOScriptArguments(ScriptArguments):
    """Settings of `bapo-trl train` and `bapo-trl evaluate` for data, rewards and evaluation."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset to train on: a file (.jsonl, .csv, .parquet), a folder, a Hub id, or a built-in task: "
            "`embedded` (sums of two numbers, for the tiny model `embedded`), `chat_sums` (the same sums, asked of a "
            "chat model) or `reasoning_gym:TASK`. Ignored if a recipe lists `datasets`."
        },
    )
    method: str | None = field(
        default=None,
        metadata={
            "help": "Set the loss and the clip bounds of a method by its name: grpo, clip_higher, bapo, "
            "bapo_released, cispo, gspo, sapo, vespo, or recommended (docs/which_loss.md). trl: train with TRL's own "
            "GRPOTrainer and its defaults, to compare."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "One or more reward functions: accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
            "get_soft_overlong_punishment (falls from 0 to -1 over the last fifth of `max_completion_length`), or an "
            "import path such as my_package.rewards.my_reward."
        },
    )
    task_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Arguments of a reasoning-gym task, as JSON: \'{"min_terms": 2, "max_terms": 2}\'.'},
    )
    prompt_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column that holds the prompts. If you name several, the first that the dataset has is used. By "
            "default, the column `prompt` is used unchanged. If you set this, `prompt_template` or `system_prompt`, "
            "the text is wrapped in a user message if the model has a chat template."
        },
    )
    answer_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column that holds the right answers. If you name several, the first that the dataset has is "
            "used. A dot selects a nested field, as in `reward_model.ground_truth`. Reward functions also get the "
            "answers as `solution`, unless the dataset has a column of that name."
        },
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Text to put around each prompt: {prompt} is replaced by the prompt, {NAME} by the column NAME."
        },
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message to put before each prompt."})
    eval_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Dataset to evaluate on before and after training: a file, a folder or a Hub id. If it has "
            "several splits, `dataset_test_split` is used. `dataset_config` applies to it only if it is the only "
            "dataset."
        },
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Fraction of the training prompts to hold out and evaluate on. The same prompts are held out for "
            "every seed."
        },
    )
    extract_answer: str | None = field(
        default=None,
        metadata={
            "help": "How to find the answer in a completion, for maj@k: boxed, last_number, text (the whole "
            "completion), or the import path of a function that takes the text."
        },
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate only on the first N prompts. By default, on all of them."}
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Whether to delete the checkpoints, the model and the report of an earlier run in `output_dir` "
            "(with `merge_adapter`, the folder `merged`). By default, an earlier run raises an error."
        },
    )
    merge_adapter: bool = field(
        default=False,
        metadata={
            "help": "Whether to also save the model with the LoRA adapter merged in, to the folder `merged` in "
            "`output_dir`. With `--do_train false` and no dataset, the command only merges."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Whether to only print what the run would do: samples, updates, staleness, memory, the first "
            "prompt, and the value of each reward function. Loads no weights, and "
            "writes only to the libraries' caches."
        },
    )
    dry_run_mean_length: int | None = field(
        default=None,
        metadata={
            "help": "Mean number of tokens of a completion, for which `dry_run` also estimates the memory. By "
            "default, it only assumes that all completions have `max_completion_length` tokens."
        },
    )

    def __post_init__(self):
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise InputError(f"`max_eval_samples` is {self.max_eval_samples}: set it to at least 1, or leave it out.")
