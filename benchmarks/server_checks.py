"""
Measure the time of the checks that detect a failed vLLM server, relative to the updates over a live server.

    python -m benchmarks.server_checks        # needs vLLM; starts a server

Both times are from the same run: the checks of a generation (ask the server for its name, agree among the ranks), and
its updates, including generation and weight transfer.
"""

import argparse
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer, load_task
from benchmarks.common import save_result, spread
from benchmarks.watched_training import UpdateClock


LIMIT = 0.01


class Timed(BAPOTrainer):
    """Trainer that adds up the seconds of its checks."""

    checks_s = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in ("_reconnect_if_needed", "has_same_server"):
            setattr(self._server, name, partial(self._timed, getattr(self._server, name)))

    def _timed(self, call):
        begun = time.perf_counter()
        try:
            return call()
        finally:
            self.checks_s += time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--generations", type=int, default=16)
    args = parser.parse_args()
    from tests.e2e.launching import SMALL, vllm_server  # starts `bapo-trl serve` and waits for it
    from tests.helpers.commands import free_port
    from tests.helpers.toy import CPU

    tokenizer = character_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 8}  # fmt: skip
    sampled = {"per_device_train_batch_size": 16, "steps_per_generation": 4, "num_generations": 8,
               "max_completion_length": 32}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = Qwen2Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                             eos_token_id=tokenizer.eos_token_id, **sizes)  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        with vllm_server(folder / "model", folder / "server.log", flags=SMALL) as server:
            task, clock = load_task(), UpdateClock(lambda: (time.perf_counter(), trainer.checks_s))
            trainer = Timed(
                str(folder / "model"),
                task.reward_func,
                BAPOConfig(
                    str(folder / "run"),
                    **{**CPU, **sampled, "logging_steps": 1, "gradient_accumulation_steps": 1},
                    max_steps=sampled["steps_per_generation"] * (args.generations + 2),
                    use_vllm=True,
                    vllm_mode="server",
                    vllm_server_host="127.0.0.1",
                    vllm_server_port=server.port,
                    vllm_group_port=free_port(),
                    vllm_importance_sampling_mode="token_truncate",
                ),
                train_dataset=task.train_dataset,
                callbacks=[clock],
            )
            trainer.train()
    begun = clock.readings[:: sampled["steps_per_generation"]][1:-1]  # the first warms up, the last ends the training
    generations = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(begun)]
    row = {
        "share": spread([checks / whole for whole, checks in generations]),
        "update_ms": spread([1000 * whole / sampled["steps_per_generation"] for whole, _ in generations]),
    }
    print(row)
    save_result("server_checks", {**sizes, **sampled, "generations": len(generations), "limit": LIMIT}, [row])


if __name__ == "__main__":
    main()
