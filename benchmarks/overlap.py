"""
Measure the time of a generation step with and without overlapped generation, over a live vLLM server.

    python -m benchmarks.overlap        # needs vLLM and two cores; starts a server

The server runs on one core and the trainer on another, at three ratios of generation time to training time. Each round
trains with and without overlap, in alternating order; ratios are within a round. The generation time is the time of
the request. Without overlap, the training time is the rest of the step: scoring, rewards, updates and the weight
transfer. The goal: with overlap, a step takes at most 1.1 times the longer of the two times. The rest of that step is
the time of its request, which grows while the trainer uses the machine too, and the time between two requests.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl.generation.vllm_client import VLLMClient

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer, load_task
from benchmarks.common import save_result, spread


GOAL = 1.1
STEPS = 4  # updates in a pass over a rollout batch
WARMUP = 12  # generation steps that do not count, after which the server is checked at every tenth transfer
SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
SAMPLES = {
    "steps_per_generation": STEPS, "num_generations": 4, "gradient_accumulation_steps": 1,
    "generation_kwargs": {"ignore_eos": True},  # every completion has its full length
}  # fmt: skip
# A generation takes about twice, once and half as long as the training
CASES = (
    {"max_completion_length": 192, "per_device_train_batch_size": 1, "num_iterations": 1},
    {"max_completion_length": 96, "per_device_train_batch_size": 3, "num_iterations": 1},
    {"max_completion_length": 32, "per_device_train_batch_size": 8, "num_iterations": 2},
)
SERVER = ("--max-model-len", "224", "--kv-cache-memory-bytes", str(256 * 2**20))


class GenerationSteps(TrainerCallback):
    """Callback that records when each generation step begins, and when the training ends."""

    def __init__(self, updates: int):
        self.updates, self.marks = updates, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.updates == 0:
            self.marks.append(time.perf_counter())

    def on_train_end(self, args, state, control, **kwargs):
        self.marks.append(time.perf_counter())


def measure(model: Path, port: int, case: dict[str, int], steps: int, overlaps: bool) -> dict[str, float]:
    """Train once; return the seconds of a generation step and of its request."""
    from tests.helpers.commands import free_port
    from tests.helpers.toy import CPU

    clock, requests = GenerationSteps(STEPS * case["num_iterations"]), []
    with tempfile.TemporaryDirectory() as folder:
        task = load_task()
        args = BAPOConfig(
            folder, **{**CPU, **SAMPLES, **case}, use_vllm=True, vllm_mode="server", vllm_server_port=port,
            vllm_group_port=free_port(), vllm_server_host="127.0.0.1", overlap_generation=overlaps,
            vllm_importance_sampling_mode="token_truncate", logging_steps=1000,
            max_steps=clock.updates * (WARMUP + steps),
        )  # fmt: skip
        trainer = BAPOTrainer(str(model), task.reward_func, args, train_dataset=task.train_dataset, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        generate = VLLMClient.generate

        def timed(*args, **kwargs):
            begun = time.perf_counter()
            output = generate(*args, **kwargs)
            requests.append(time.perf_counter() - begun)
            return output

        with patch.object(VLLMClient, "generate", timed):
            trainer.train()
    seconds = (clock.marks[-1] - clock.marks[WARMUP]) / steps
    return {"step": seconds, "generation": sum(requests[WARMUP:]) / steps}


def measure_rounds(model: Path, port: int, case: dict[str, int], rounds: int, steps: int) -> dict:
    """Measure pairs of runs with and without overlap; return seconds and ratios with their spread."""
    found = []
    for number in range(rounds):
        pair = {}
        for overlaps in (False, True) if number % 2 == 0 else (True, False):
            pair[overlaps] = measure(model, port, case, steps, overlaps)
        alone = pair[False]
        training = alone["step"] - alone["generation"]
        found.append(
            {
                "generation": alone["generation"],
                "training": training,
                "generation_overlapped": pair[True]["generation"],
                "between_requests": pair[True]["step"] - pair[True]["generation"],
                "speedup": alone["step"] / pair[True]["step"],
                "over_longer": pair[True]["step"] / max(alone["generation"], training),
            }
        )
        print(case, found[-1], flush=True)
    return case | {name: spread([each[name] for each in found]) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    from tests.e2e.launching import vllm_server  # starts `bapo-trl serve` and waits for it

    first, second, *_ = sorted(os.sched_getaffinity(0))
    tokenizer = character_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = Qwen2Config(
            vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, **SIZES,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        os.sched_setaffinity(0, {first})  # which the server's threads take over
        with vllm_server(folder / "model", folder / "server.log", flags=SERVER) as server:
            os.sched_setaffinity(0, {second})
            rows = [measure_rounds(folder / "model", server.port, case, args.rounds, args.steps) for case in CASES]
    save_result("overlap", {**SIZES, **SAMPLES, "steps": args.steps, "goal": GOAL}, rows)


if __name__ == "__main__":
    main()
