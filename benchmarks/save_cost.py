"""
Measure the time of an atomic checkpoint save relative to plain transformers.

    python -m benchmarks.save_cost

Both trainers save the same model of SmolLM2-135M's shape and its optimizer, `save_total_limit` 2, in alternation.
Before each save, the disk has finished its writes. Plain transformers leaves its files in the page cache; an atomic
checkpoint is on the disk.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from benchmarks.common import in_turns, save_result, spread, time_s


TARGET = 1.1


def made_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def trainer_of(trainer_class: type, config_class: type, folder: Path):
    """Return a trainer after one update, so that the optimizer has a state."""
    settings = {
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "save_total_limit": 2,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 2,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    }
    trainer = trainer_class(
        made_model(),
        reward_funcs=lambda completions, **kwargs: [float(index) for index, _ in enumerate(completions)],
        args=config_class(str(folder), **settings),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
        processing_class=character_tokenizer(),
    )
    trainer.train()
    return trainer


def time_save(trainer) -> float:
    """Return the seconds of a save."""
    trainer.state.global_step += 1
    os.sync()
    return time_s(lambda: trainer._save_checkpoint(trainer.model, None))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"plain": [], "whole": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        trainers = {
            "plain": trainer_of(GRPOTrainer, GRPOConfig, Path(folder, "plain")),
            "whole": trainer_of(BAPOTrainer, BAPOConfig, Path(folder, "whole")),
        }
        for _, name in in_turns(trainers, 1 + arguments.rounds):
            seconds[name].append(time_save(trainers[name]))
    plain, whole = (values[1:] for values in seconds.values())  # the first use of a disk is slower
    row = {
        "size": "135 million weights",
        "plain_s": spread(plain),
        "whole_s": spread(whole),
        "over_plain": spread([wholly / plainly for plainly, wholly in zip(plain, whole, strict=True)]),
    }
    print(row)
    save_result("save_cost", {"rounds": arguments.rounds, "target": TARGET}, [row])


if __name__ == "__main__":
    main()
