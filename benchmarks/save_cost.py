"""
Time of a save that leaves a checkpoint whole or not there, over that of plain transformers.

    python -m benchmarks.save_cost

Both trainers save the same model and optimizer, `save_total_limit` 2, in turns. Before each save the disk has nothing
left to do. Plain transformers leaves its files in the memory of the system: it is measured once as it is, and once up
to the moment when they are on the disk, as those of the whole checkpoint are.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from benchmarks.common import save_result, spread


# Width, layers, heads, key and value heads, vocabulary; the largest is SmolLM2-135M's shape
SHAPES = {
    "18 thousand weights": (16, 1, 2, 1, 64),
    "30 million weights": (384, 12, 6, 2, 24_576),
    "135 million weights": (576, 30, 9, 3, 49_152),
}
TARGET = 1.1


def model_of(width: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def trainer_of(trainer_class: type, config_class: type, folder: Path, shape: tuple):
    """Return a trainer after one update, so that the optimizer has its state."""
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
        model_of(*shape),
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
    start = time.perf_counter()
    trainer._save_checkpoint(trainer.model, None)
    return time.perf_counter() - start


def time_flush(folder: Path) -> float:
    """Return the seconds until all files of a folder are on the disk."""
    start = time.perf_counter()
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def measure(name: str, folder: Path, rounds: int) -> dict:
    """Return times and ratios of a size."""
    plain = trainer_of(GRPOTrainer, GRPOConfig, folder / "plain", SHAPES[name])
    whole = trainer_of(BAPOTrainer, BAPOConfig, folder / "whole", SHAPES[name])
    times: list[tuple[float, float, float]] = []
    for number in range(-1, rounds):
        wholly = time_save(whole) if number % 2 else 0.0
        plainly = time_save(plain)
        flushing = time_flush(folder / "plain" / f"checkpoint-{plain.state.global_step}")
        wholly = wholly or time_save(whole)
        times += [(plainly, flushing, wholly)] if number >= 0 else []  # the first use of a disk is slower
    row = {
        "size": name,
        "plain_s": spread([plainly for plainly, _, _ in times]),
        "whole_s": spread([wholly for _, _, wholly in times]),
        "over_plain": spread([wholly / plainly for plainly, _, wholly in times]),
        "over_plain_on_disk": spread([wholly / (plainly + flushing) for plainly, flushing, wholly in times]),
    }
    print({key: value if key == "size" else value["median"] for key, value in row.items()}, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows.append(measure(name, Path(folder), arguments.rounds))
    save_result("save_cost", "cpu", {"rounds": arguments.rounds, "target": TARGET}, rows)


if __name__ == "__main__":
    main()
