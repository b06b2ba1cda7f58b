"""Evaluation of a run: of the model it starts from and of the one it ends with, on the same prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..checkpoints.rank_errors import raising_on_all_ranks
from ..evaluation.accuracy import accuracy_table
from ..evaluation.measure import Evaluation, evaluate
from ..evaluation.sampling import EvaluatedTrainer
from .console import log_line


Parts = Sequence[tuple[str, str | None]]
"""Name and revision of a model, and of its base if it is an adapter."""


class NotAtTheEnd(TrainerCallback):
    """Leaves out the evaluation at the last update, where nothing waits for it: another comes after the training."""

    def on_step_end(self, args, state, control, **kwargs):
        is_awaited = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if state.global_step >= state.max_steps and not is_awaited:
            control.should_evaluate = False
        return control

    on_epoch_end = on_step_end


class BeforeAfter:
    """Evaluates before and after the training, or once if there is none."""

    def __init__(
        self,
        trainer: EvaluatedTrainer,
        dataset: Dataset | IterableDataset,
        output_dir: Path,
        extract_answer: Callable[[str], str | None] | None = None,
    ):
        self.trainer, self.dataset, self.output_dir, self.extract_answer = trainer, dataset, output_dir, extract_answer
        self._before: Evaluation | None = None

    def before(self, parts: Parts) -> None:
        """
        Evaluate what a training starts from; of a run that goes on, that is done. Engines that shard the model cannot
        before they train: they say so.
        """
        self.trainer.add_callback(NotAtTheEnd())
        if self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled:
            self.trainer.accelerator.print(
                "Before training: not evaluated under DeepSpeed or FSDP. `--do_train false` evaluates the model alone."
            )
            return
        self._before = self._evaluate("eval_completions_before.jsonl", [*parts, *map(_weight_files, parts)])

    def after(self, model: str, title: str) -> str:
        """Evaluate the model as it is now, log its rewards, save what was found, and return it for the terminal."""
        after = self._evaluate("eval_completions.jsonl")
        rewards = {f"eval_{name}": value for name, value in after.metrics.items()}
        self.trainer.log(rewards)
        results, accuracies = after.as_results("eval"), {"": after.accuracies}
        if self._before is not None:
            results = {**self._before.as_results("before"), **results}
            accuracies = {"before": self._before.accuracies, "after": after.accuracies}
        with raising_on_all_ranks():
            self.trainer.save_metrics("eval", results)
        count = after.metrics.get("prompts_without_reward", 0)
        lines = [
            f"Evaluation of {model} on {title}, {after.num_prompts} prompts: "
            f"{log_line(self.trainer.state.global_step, rewards)}",
            accuracy_table(accuracies),
            f"Left out, without a reward: {count} of {count + after.num_prompts} prompts" if count else "",
            f"Completions: {self.output_dir / 'eval_completions.jsonl'}",
            f"Metrics: {self.output_dir / 'eval_results.json'}",
        ]
        return "\n".join(line for line in lines if line)

    def _evaluate(self, name: str, origin: Any = None) -> Evaluation:
        return evaluate(self.trainer, self.dataset, self.output_dir / name, self.extract_answer, origin)


def _weight_files(part: tuple[str, str | None]) -> list[tuple[str, int, int]]:
    """Return the weights in the folder of a model, with their sizes and times; none of one on the Hub."""
    files = sorted(Path(part[0]).glob("*.safetensors"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
