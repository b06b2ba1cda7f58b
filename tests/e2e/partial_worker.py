"""Trains with partial rollouts on any engine and sampler, and writes what each rank trained on."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.tasks import character_tokenizer
from tests.e2e.launching import vllm_server
from tests.helpers.ranks import finish
from tests.helpers.toy import CPU, OFF_POLICY, part_of
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


def counted_down() -> Dataset:
    """Prompts whose last tokens have the numbers from 2 to 41."""
    tokenizer = character_tokenizer()
    return Dataset.from_dict({"prompt": ["1+" + tokenizer.decode([2 + i * 7 % 40]) for i in range(40)]})


def main(folder: str, settings: str) -> None:
    folder, settings = Path(folder), json.loads(settings)
    model = settings.pop("model")
    resume = settings.pop("resume", None)
    Recording.restart = settings.pop("restart", None)
    dataset = counted_down() if settings.pop("counts_down", False) else prompts_of_many_lengths()
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear") if settings.pop("uses_lora", False) else None
    settings = {**CPU, **OFF_POLICY, **PARTIAL, "learning_rate": 3e-3, **settings}
    updates = settings["steps_per_generation"] * settings["num_iterations"] // settings["gradient_accumulation_steps"]
    # A checkpoint of each policy that samples
    args = BAPOConfig(
        str(folder / "run"), **{**settings, "save_strategy": "steps", "save_steps": updates, "save_only_model": False}
    )
    trainer = Recording(
        AutoModelForCausalLM.from_pretrained(model) if lora is None else model, share_of_digits, args,
        train_dataset=dataset, processing_class=AutoTokenizer.from_pretrained(model), peft_config=lora,
    )  # fmt: skip
    with Recording.server:
        trainer.train(resume_from_checkpoint=resume)
    parked = [group.inputs["prompt"] for group in part_of(trainer, PartialRollouts).rounds.pool]
    finish(trainer, folder, prompts=trainer.prompts, batches=trainer.batches, parked=parked)


if __name__ == "__main__":
    main(*sys.argv[1:])
