"""
Compare three ways to handle zero-advantage groups, at equal generated tokens: keep, replay or resample them.

    python -m benchmarks.tied_groups --jobs 2

The task is the sums, where four in ten groups have zero advantage. Both learning rates are reported: the higher one
reaches a higher accuracy, but drops on some seeds. A run ends with the generation in which it reaches `TOKENS`
completion tokens. Interrupted studies resume; rows and tables are those of `bapo-trl compare`. To keep them:
`python -m benchmarks.pages --keep outputs/tied_groups --commit COMMIT`.
"""

import argparse
import itertools
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers import PrinterCallback, TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.batch.samples import batch_to_rows, concat_rows, rows_to_batch
from bapo_trl.compare.results import FOLDER, Row, read_rows, write_row
from bapo_trl.compare.tables import as_markdown, compare
from benchmarks.common import ROOT
from benchmarks.warm_start import load_sums, warm_start_path


TOKENS, MEASUREMENTS = 84_000, 6
SEEDS, RATES = range(5), (2.5e-4, 5e-4)
UPDATES_PER_GENERATION, ROWS = 8, 128
ARMS = ("left", "replaced", "refilled")  # what happens to zero-advantage groups


class CountingTrainer(BAPOTrainer):
    """Trainer that counts the completion tokens generated for training."""

    generated_tokens = 0

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self.model.training:
            self.generated_tokens += sum(map(len, completion_ids_list))
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)


class RefillingTrainer(CountingTrainer):
    """
    Trainer with dynamic sampling, as in DAPO (arXiv 2503.14476): it drops zero-advantage groups, and samples other
    groups until the batch is full.
    """

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        parts, missing = [], len(inputs)
        while missing > 0:
            batch = super()._generate_and_score_completions(inputs)
            rows = batch_to_rows(batch, self._tokenizer.pad_token_id)
            (untied,) = rows.has_advantage().nonzero()
            parts.append((rows, untied))
            missing -= len(untied)
            chosen = torch.randint(len(self.train_dataset), (missing // self.num_generations,)).tolist()
            inputs = [row for row in map(self.train_dataset.__getitem__, chosen) for _ in range(self.num_generations)]
        batch = rows_to_batch(concat_rows(parts), self._tokenizer.pad_token_id, self.accelerator.device)
        return {**batch, "num_items_in_batch": batch["completion_mask"].sum()}


class AtEqualTokens(TrainerCallback):
    """Callback that evaluates at given numbers of tokens, and ends the run after the last generation."""

    def __init__(self):
        self.curve: list[tuple[int, float]] = []

    def on_step_end(self, args, state, control, **kwargs):
        tokens = self.trainer.generated_tokens
        if state.global_step % UPDATES_PER_GENERATION == 0:
            control.should_evaluate = tokens >= TOKENS * len(self.curve) / MEASUREMENTS
            control.should_training_stop = tokens >= TOKENS

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.curve.append((self.trainer.generated_tokens, round(metrics["eval_reward"], 4)))


def train(arm: str, seed: int, learning_rate: float) -> Row:
    """Train once; return the result row, with accuracy over generated tokens."""
    torch.set_num_threads(1)
    task, started = load_sums(), time.monotonic()
    settings = {"replay_zero_advantage": arm == "replaced"}
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, num_generations=8,
            steps_per_generation=UPDATES_PER_GENERATION, max_completion_length=task.max_new_tokens,
            max_steps=100_000, seed=seed, learning_rate=learning_rate, lr_scheduler_type="constant", use_cpu=True,
            bf16=False, gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
            eval_strategy="steps", eval_steps=1_000_000, eval_on_start=True, num_generations_eval=4,
            per_device_eval_batch_size=512, search_scope="batch", **settings,
        )  # fmt: skip
        callback = AtEqualTokens()
        trainer = (RefillingTrainer if arm == "refilled" else CountingTrainer)(
            str(warm_start_path(task=task)), task.reward_func, args, callbacks=[callback],
            train_dataset=task.train_dataset,
            eval_dataset=task.test_dataset.select(range(512)),  # whole batches: TRL's `eval_reward` is their mean
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        callback.trainer = trainer
        trainer.train()
    tokens, final = callback.curve[-1]
    seconds = round(time.monotonic() - started, 1)
    sweep = {"learning_rate": learning_rate}
    return Row(arm, sweep, seed, settings, final, curve=callback.curve, generated_tokens=tokens, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    folder = ROOT / "outputs" / "tied_groups"
    runs = {f"{arm}-{seed}-{rate}": (arm, seed, rate) for rate, seed, arm in itertools.product(RATES, SEEDS, ARMS)}
    finished = read_rows(folder)
    missing = {key: run for key, run in runs.items() if key not in finished}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for key, row in zip(missing, pool.map(train, *zip(*missing.values(), strict=True)), strict=True):
            write_row(row, folder / FOLDER / f"{key}.json")
            print(f"{key}: {row.final:.3f}, {row.generated_tokens:,} tokens, {row.seconds:.0f} s", flush=True)
    print(as_markdown(compare(read_rows(folder).values(), ARMS, baseline="refilled")))


if __name__ == "__main__":
    main()
