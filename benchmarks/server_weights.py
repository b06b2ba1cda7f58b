"""
Find out which wrong weights of a vLLM server `check_server_weights` finds, and whether it is wrong about right ones.

    python -m benchmarks.server_weights           # needs vLLM, and the chat model in the cache; starts servers
    python -m benchmarks.server_weights --only healthy

Each fault is planted in one place of TRL's weight transfer, under TRL's own `GRPOTrainer`. "Found after" counts the
transfers since the fault began. The reward is for even digits, so that the policy moves steadily.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from bapo_trl import StaleServerError, check_server_weights
from bapo_trl.tasks import character_tokenizer, load_task, smollm2_path
from bapo_trl.vllm_server import weight_check
from bapo_trl.vllm_server.weight_readings import Reading, WeightHistory
from benchmarks.common import RESULTS, save_result, spread
from benchmarks.tiny_model import MODEL_SETTINGS, tiny_model
from benchmarks.warm_start import warm_start_path


PATIENCE = 200  # transfers with a fault before it counts as not found
HEALTHY_FIRST = 5  # transfers before a fault that begins during a run
SIZES = {"hidden_size": 128, "max_position_embeddings": 640}  # vLLM's attention on CPUs needs heads of 32 or more
# Blocks of the prefix cache about as on GPUs: vLLM has blocks of 128 tokens on CPUs
SERVER = ("--max-model-len", "640", "--kv-cache-memory-bytes", str(256 * 2**20), "--block-size", "32")
SAMPLES = {"per_device_train_batch_size": 8, "num_generations": 4, "gradient_accumulation_steps": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "full, 1e-6": {"learning_rate": 1e-6},
    "LoRA, 1e-5": {"learning_rate": 1e-5, "uses_lora": True},
    "LoRA, 1e-4": {"learning_rate": 1e-4, "uses_lora": True},
}

Weights = dict[str, torch.Tensor]


def even_digits_reward(completions, **kwargs) -> list[float]:
    """Reward even digits, which are soon learned, with a bit of noise so that no group ties."""
    texts = [str(each) for each in completions]
    noise = [zlib.crc32(text.encode()) / 2**32 / 100 for text in texts]
    shares = [sum(text.count(digit) for digit in "02468") / max(len(text), 1) for text in texts]
    return [sum(each) for each in zip(shares, noise, strict=True)]


# Faults: what is sent instead, of the latest, the first and the previous weights; `None` for nothing


def nothing(latest: Weights, first: Weights, previous: Weights) -> Weights | None:
    return None


def one_late(latest: Weights, first: Weights, previous: Weights) -> Weights:
    return previous


def without_a_layer(latest: Weights, first: Weights, previous: Weights) -> Weights:
    return {name: first[name] if ".layers.1.mlp" in name else latest[name] for name in latest}


def start_weights(latest: Weights, first: Weights, previous: Weights) -> Weights:
    return first


def change_twice(latest: Weights, first: Weights, previous: Weights) -> Weights:
    return {name: 2 * latest[name] - first[name] for name in latest}


def norms_in_bfloat16(latest: Weights, first: Weights, previous: Weights) -> Weights:
    return {name: value.bfloat16().to(value) if "norm" in name else value for name, value in latest.items()}


def other_model(latest: Weights, first: Weights, previous: Weights) -> Weights:
    other = tiny_model(character_tokenizer(), seed=1, **SIZES).state_dict()
    return {name: other[name].to(value) for name, value in latest.items()}


def plant(trainer: GRPOTrainer, fault: Callable[..., Weights | None], begins: int) -> None:
    """Have the transfers of a trainer from number `begins` on, counted from 1, send something else."""
    client: Any = trainer.vllm_generation.vllm_client
    send, kept = client.update_named_params, []

    def send_planted(metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        latest = {name: value.detach().clone() for name, value in named_params}
        kept.append(latest)
        weights: Weights | None = latest
        if len(kept) >= begins:
            weights = fault(latest, kept[0], kept[max(len(kept) - 2, 0)])
        if weights is not None:
            send(metadata, iter(weights.items()))

    client.update_named_params = send_planted


def keep_prefix_cache(trainer: GRPOTrainer) -> None:
    client: Any = trainer.vllm_generation.vllm_client
    client.reset_prefix_cache = lambda: None


# Runs


@contextmanager
def recorded() -> Iterator[list[dict[str, float]]]:
    """Record what each check sees."""
    seen: list[dict[str, float]] = []
    compare = WeightHistory.compare

    def recording(self, trainer, answer):
        found = compare(self, trainer, answer)
        now = Reading(trainer, answer.logps)
        seen.append({"difference": now.mean(now.rounding), "share": found.share, "by_cache": answer.by_cache})
        return found

    with patch.object(WeightHistory, "compare", recording):
        yield seen


def make_trainer(
    model: Path, port: int, transfers: int, uses_lora: bool = False, dtype: str = "float32", **settings
) -> GRPOTrainer:
    """Return TRL's trainer; in float32 with autocast to bfloat16, as TRL has it."""
    from bapo_trl_gloo.client import GlooClient
    from tests.helpers.commands import free_port

    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear") if uses_lora else None
    with tempfile.TemporaryDirectory() as folder, patch.object(vllm_generation, "VLLMClient", GlooClient):
        args = GRPOConfig(
            folder, **{
                **SAMPLES, "bf16": True, "max_completion_length": 32, "lr_scheduler_type": "constant",
                "use_cpu": True, "dataloader_pin_memory": False, "report_to": "none", "save_strategy": "no",
                "disable_tqdm": True, "logging_steps": 1, "max_steps": transfers, "use_vllm": True,
                "vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_port": port,
                "vllm_group_port": free_port(), **settings,
            },
        )  # fmt: skip
        task = load_task()
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        trainer = GRPOTrainer(loaded, even_digits_reward, args, train_dataset=task.train_dataset, peft_config=lora)
    trainer.remove_callback(PrinterCallback)
    return trainer


def find(name: str, model: Path, port: int, setting: str, fault, begins: int = 1, **more) -> dict[str, Any]:
    """Train with a fault until it is found; return after how many transfers."""
    trainer = make_trainer(model, port, begins - 1 + PATIENCE, **{**SETTINGS[setting], **more})
    keep_prefix_cache(trainer) if fault == "prefix cache" else plant(trainer, fault, begins)
    check_server_weights(trainer)
    message, found = None, None
    with recorded() as seen:
        try:
            trainer.train()
        except StaleServerError as error:
            found, message = trainer.state.global_step - begins + 2, str(error).split(":")[0]
    row = {"fault": name, "setting": setting, **more, "patience": PATIENCE, "found_after": found, "as": message}
    row |= extremes(seen)
    print(row, flush=True)
    return row


def extremes(seen: list[dict[str, float]]) -> dict[str, float]:
    shares = [each["share"] for each in seen if not math.isnan(each["share"])]
    found = {
        "checks": len(seen),
        "first_difference": seen[0]["difference"],
        "largest_difference": max(each["difference"] for each in seen),
        "largest_by_cache": max(each["by_cache"] for each in seen),
    }
    if shares:
        found |= {"shares": len(shares), "smallest_share": min(shares), "largest_share": max(shares)}
    return {name: round(value, 5) for name, value in found.items()}


def healthy(name: str, model: Path, port: int, setting: str, transfers: int, **more) -> dict[str, Any]:
    """Train without a fault, each transfer checked; return what was seen and the number of false alarms."""
    trainer = make_trainer(model, port, transfers, **{**SETTINGS[setting], **more})
    alarms: list[str] = []
    check_server_weights(trainer, on_failure="warn")
    noting = patch.object(weight_check.WeightCheck, "_report", lambda self, fault: alarms.append(fault))
    with recorded() as seen, patch.object(weight_check, "INTERVAL", 1), noting:
        trainer.train()
    row = {"model": name, "setting": setting, **more, "transfers": transfers, "alarms": len(alarms)}
    row |= {"first_alarms": alarms[:2]} if alarms else {}
    print(row | extremes(seen), flush=True)
    return row | extremes(seen)


def cost(model: Path, port: int, later: int = 3) -> dict[str, Any]:
    """Return the seconds of steps and of their checks, and the ratio, for the first checks and `later` ones."""
    updates = weight_check.NUM_PASSED + later * weight_check.INTERVAL + 1
    trainer = make_trainer(model, port, updates, **SETTINGS["LoRA, 1e-4"], per_device_train_batch_size=32)
    check_server_weights(trainer)
    spent: list[float] = []
    begins: list[float] = []
    generate = trainer._generate_and_score_completions

    def counted(inputs: Any) -> Any:
        begins.append(time.perf_counter())
        spent.append(0.0)
        return generate(inputs)

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[-1] += time.perf_counter() - begun

        return call

    trainer._generate_and_score_completions = counted
    with ExitStack() as stack:
        for name in ("ask", "__call__"):
            method = timed(getattr(weight_check.WeightCheck, name))
            stack.enter_context(patch.object(weight_check.WeightCheck, name, method))
        trainer.train()
    # Without the first step, which starts up, and the last one, whose end is not recorded
    steps = [end - begin - check for (begin, end), check in zip(itertools.pairwise(begins), spent, strict=False)]
    first, then = slice(1, weight_check.NUM_PASSED), slice(weight_check.NUM_PASSED, len(steps))
    row = {
        "step_s": spread(steps[1:]),
        "first_check_s": spread(spent[first]),
        "later_check_s": spread(spent[then][weight_check.INTERVAL - 1 :: weight_check.INTERVAL]),
        "of_a_step_at_first": round(sum(spent[first]) / sum(steps[first]), 4),
        "of_a_step_later": round(sum(spent[then]) / sum(steps[then]), 4),
    }
    print(row, flush=True)
    return row


def with_own_head(model: Path, folder: Path) -> Path:
    """Write a copy of a model with tied weights that a server reads with a head of its own."""
    copy = AutoModelForCausalLM.from_pretrained(model)
    copy.config.tie_word_embeddings = False
    state = copy.state_dict() | {"lm_head.weight": copy.get_input_embeddings().weight.detach().clone()}
    untied = type(copy)(copy.config)
    untied.load_state_dict(state)
    untied.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--transfers", type=int, default=200, help="of each healthy run")
    parser.add_argument("--only", choices=("faults", "healthy", "cost"), help="a part; the others' rows stay")
    args = parser.parse_args()
    parts = [args.only] if args.only else ["faults", "healthy", "cost"]
    from tests.e2e.launching import vllm_server  # starts `bapo-trl serve` and waits for it

    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with patch.dict(MODEL_SETTINGS, SIZES):
            untied = warm_start_path()
            with patch.dict(MODEL_SETTINGS, {"tie_word_embeddings": True}):
                tied = warm_start_path()

        @contextmanager
        def serving(model: Path, *flags: str) -> Iterator[int]:
            with vllm_server(model, folder / "server.log", flags=(*SERVER, *flags)) as server:
                yield server.port

        def add(part: str, row: Mapping[str, Any]) -> None:
            rows.setdefault(part, []).append(dict(row))
            save(rows, args.transfers)

        in_16_bits = ("--dtype", "bfloat16")
        with serving(untied, *in_16_bits) as port:
            if "faults" in parts:
                for setting in SETTINGS:
                    add("faults", find("no transfer", untied, port, setting, nothing, HEALTHY_FIRST))
                    add("faults", find("each transfer one late", untied, port, setting, one_late))
                    add("faults", find("one layer left out", untied, port, setting, without_a_layer))
                    add("faults", find("prefix cache kept", untied, port, setting, "prefix cache"))
                    add("faults", find("start weights, restarted", untied, port, setting, start_weights, 5))
                    add("faults", find("another model", untied, port, setting, other_model))
                for setting in ("LoRA, 1e-5", "LoRA, 1e-4"):
                    add("faults", find("adapter not merged", untied, port, setting, start_weights))
                    add("faults", find("adapter merged twice", untied, port, setting, change_twice))
            if "healthy" in parts:
                for setting in SETTINGS:
                    add("healthy", healthy("untied", untied, port, setting, args.transfers))
                add("healthy", healthy("untied", untied, port, "LoRA, 1e-4", args.transfers, dtype="bfloat16"))
        if "faults" in parts:
            with serving(untied, "--dtype", "float32") as port:
                kinds = {"each transfer one late": one_late, "norms in another type": norms_in_bfloat16}
                for fault, kind in kinds.items():
                    row = find(fault, untied, port, "full, 1e-6", kind, bf16=False)
                    add("faults", row | {"server": "float32"})
            with serving(with_own_head(tied, folder / "untied"), *in_16_bits) as port:
                name = "tied weights sent once, read from elsewhere"  # an adapter leaves them
                add("faults", find(name, tied, port, "full, 1e-6", lambda *each: each[0]))
        if "healthy" in parts:
            with serving(tied, *in_16_bits) as port:
                add("healthy", healthy("tied", tied, port, "full, 1e-6", args.transfers))
        with serving(smollm2_path(), *in_16_bits) as port:
            if "cost" in parts:
                add("cost", cost(smollm2_path(), port))
            if "healthy" in parts:
                add("healthy", healthy("SmolLM2-135M", smollm2_path(), port, "LoRA, 1e-4", args.transfers))


def save(rows: Mapping[str, list[dict[str, Any]]], transfers: int) -> None:
    """Write the rows as they come, with those of the parts that are not measured now."""
    path = RESULTS / "server_weights.json"
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    merged = {row["part"]: [each for each in kept if each["part"] == row["part"]] for row in kept} | {
        part: [{"part": part, **row} for row in found] for part, found in rows.items()
    }
    settings = {**SAMPLES, **SIZES, "transfers": transfers}
    save_result("server_weights", settings, [row for found in merged.values() for row in found])


if __name__ == "__main__":
    main()
