"""The evaluations of a run: before the training, and of its model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy
from xxhash import xxh3_128

from ...checkpoints.rank_errors import from_main_process
from ...evaluation.accuracy import accuracy_table
from ...evaluation.measure import Evaluation, evaluate, save_results
from ..console import rewards_in_words
from ..preparation import Inputs, Trainer


# What the completions of a model depend on, beside the tokenizer
_MODEL_FILES = (
    "*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "adapter_config.json",
    "generation_config.json",
)  # fmt: skip


class _NoEvaluationAtTheEnd(TrainerCallback):
    """Leaves out the evaluation at the last update unless something needs it: another follows the training."""

    def on_step_end(self, args, state, control, **kwargs):
        is_awaited = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if state.global_step >= state.max_steps and not is_awaited:
            control.should_evaluate = False
        return control

    on_epoch_end = on_step_end


def evaluate_before(trainer: Trainer, inputs: Inputs) -> Evaluation | None:
    """
    Evaluate the model that training starts from; a resumed run scores the completions that its first part saved.
    DeepSpeed and FSDP cannot evaluate before they train: they say so.
    """
    trainer.add_callback(_NoEvaluationAtTheEnd())
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        trainer.accelerator.print(
            "Before training: not evaluated under DeepSpeed or FSDP. `--do_train false` evaluates the model alone."
        )
        return None
    path, origin = Path(trainer.args.output_dir, "eval_completions_before.jsonl"), _origin(inputs.parts)
    trainer.accelerator.print("Evaluating before training ...", flush=True)
    before = evaluate(trainer, inputs.data.test, path, inputs.extract_answer, origin)
    name, accuracy = next(iter(before.accuracies.items()), ("no prompt has a reward", "unknown"))
    trainer.accelerator.print(f"Accuracy before training: {accuracy} ({name})", flush=True)
    return before


@from_main_process
def _origin(parts: Sequence[tuple[str, str | None]]) -> list[Any]:
    """Return what identifies a model: the content of its files, or its name on the Hub."""
    return [
        [[file.name, _hash_of(file)] for pattern in _MODEL_FILES for file in sorted(Path(name).glob(pattern))]
        if Path(name).is_dir()
        else [name, revision]
        for name, revision in parts
    ]


def _hash_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, xxh3_128).hexdigest()


def evaluate_after(trainer: Trainer, inputs: Inputs, before: Evaluation | None, replaces: bool) -> str:
    """Evaluate the model as it is now, log its rewards, save the results, and return lines for the terminal."""
    data, output_dir = inputs.data, Path(trainer.args.output_dir)
    path = output_dir / "eval_completions.jsonl"
    trainer.accelerator.print("Evaluating ...", flush=True)
    parts: Sequence[tuple[str, str | None]] = inputs.parts
    if trainer.args.do_train:
        is_adapter = (output_dir / "adapter_config.json").exists()
        parts = [(str(output_dir), None), *([parts[-1]] if is_adapter else [])]
    origin = _origin(parts)
    after = evaluate(trainer, data.test, path, inputs.extract_answer, origin, replaces)
    rewards = {f"eval_{name}": value for name, value in after.metrics.items()}
    trainer.log(rewards)
    results, accuracies = after.as_results("eval"), {"accuracy": after.accuracies}
    if before is not None:
        results = {**before.as_results("before"), **results}
        accuracies = {"before": before.accuracies, "after": after.accuracies}
    save_results(trainer, results)
    model = output_dir if trainer.args.do_train else inputs.parts[0][0]
    count = after.metrics.get("prompts_without_reward", 0)
    first, means = trainer.reward_func_names[0], [estimate.mean for estimate in after.accuracies.values()]
    lines = [
        f"Evaluation of {model} on {data.test_title or data.title}",
        f"  number of prompts: {after.num_prompts}; ± is one standard error (Wilson)",
        accuracy_table(accuracies),
        f"  {rewards_in_words(rewards)}",
        f"Note: no completion has a first reward (`{first}`) of 1 or more, so none is right."
        if means and not any(means)
        else "",
        f"Left out, without a reward: {count} of {count + after.num_prompts} prompts" if count else "",
        f"Completions: {path}",
        f"Metrics: {output_dir / 'eval_results.json'}",
    ]
    return "\n".join(line for line in lines if line)
