"""Evaluation of a run: of the model it starts from and of the one it ends with, on the same prompts."""

from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..checkpoints.rank_errors import raising_on_all_ranks
from ..evaluation.accuracy import accuracy_table
from ..evaluation.measure import Evaluation, evaluate
from ..evaluation.sampling import EvaluatedTrainer
from .console import log_line
from .preparation import Inputs


class NoEvaluationAtTheEnd(TrainerCallback):
    """Leaves out the evaluation at the last update, where nothing waits for it: another comes after the training."""

    def on_step_end(self, args, state, control, **kwargs):
        is_awaited = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if state.global_step >= state.max_steps and not is_awaited:
            control.should_evaluate = False
        return control

    on_epoch_end = on_step_end


def evaluate_before(trainer: EvaluatedTrainer, inputs: Inputs) -> Evaluation | None:
    """
    Evaluate what a training starts from; of a run that goes on, that is done. Engines that shard the model cannot
    before they train: they say so.
    """
    trainer.add_callback(NoEvaluationAtTheEnd())
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        trainer.accelerator.print(
            "Before training: not evaluated under DeepSpeed or FSDP. `--do_train false` evaluates the model alone."
        )
        return None
    path = Path(trainer.args.output_dir, "eval_completions_before.jsonl")
    origin = [*inputs.parts, *(_weight_files(name) for name, _ in inputs.parts)]
    return evaluate(trainer, inputs.data.test, path, inputs.extract_answer, origin)


def evaluate_after(trainer: EvaluatedTrainer, inputs: Inputs, before: Evaluation | None) -> str:
    """Evaluate the model as it is now, log its rewards, save what was found, and return it for the terminal."""
    data, output_dir = inputs.data, Path(trainer.args.output_dir)
    path = output_dir / "eval_completions.jsonl"
    after = evaluate(trainer, data.test, path, inputs.extract_answer)
    rewards = {f"eval_{name}": value for name, value in after.metrics.items()}
    trainer.log(rewards)
    results, accuracies = after.as_results("eval"), {"": after.accuracies}
    if before is not None:
        results = {**before.as_results("before"), **results}
        accuracies = {"before": before.accuracies, "after": after.accuracies}
    with raising_on_all_ranks():
        trainer.save_metrics("eval", results)
    model = output_dir if trainer.args.do_train else inputs.parts[0][0]
    count = after.metrics.get("prompts_without_reward", 0)
    lines = [
        f"Evaluation of {model} on {data.test_title or data.title}, {after.num_prompts} prompts: "
        f"{log_line(trainer.state.global_step, rewards)}",
        accuracy_table(accuracies),
        f"Left out, without a reward: {count} of {count + after.num_prompts} prompts" if count else "",
        f"Completions: {path}",
        f"Metrics: {output_dir / 'eval_results.json'}",
    ]
    return "\n".join(line for line in lines if line)


def _weight_files(folder: str) -> list[tuple[str, int, int]]:
    """Return the weights in the folder of a model, with their sizes and times; none of one on the Hub."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
