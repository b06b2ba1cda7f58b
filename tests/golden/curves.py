"""Golden curves: what 30 updates of each setting log, from tokens that no model draws.

Every token follows from the tokens before it and its place in the batch, so that rounding cannot change one. Noise of
1e-7 on the first weights moves the curves by less than 2e-5, a fifth of `TOLERANCE`.
"""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from io import StringIO
from itertools import count, zip_longest
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import succeeded
from tests.helpers.fake_vllm import ModelServer, client_of
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import OVER_SERVER, toy_dataset, toy_model, toy_trainer, training_logs


FILE = Path(__file__).parent / "curves.json"
TOLERANCE = 1e-4
UPDATES = 30
METRICS = {"loss": "loss", "grad_norm": "grad_norm", "low": "bapo/clip_low", "high": "bapo/clip_high"}
"""Names of the curves, with the names in the logs. A loss without clip bounds logs no bounds."""

END = character_tokenizer().eos_token_id
TOKENS = [token for token in range(2, 62) if token != END]

Curves = dict[str, list[float]]


# Tokens and rewards


def tokens_after(ids: list[int], place: int, most: int) -> list[int]:
    """Continue token ids by at most `most` tokens, to EOS after six on average."""
    random, tokens = Random(f"{ids} {place}"), []
    while len(tokens) < most and tokens[-1:] != [END]:
        tokens.append(END if random.random() < 1 / 6 else random.choice(TOKENS))
    return tokens


class Scripted(BAPOTrainer):
    """Samples by [`tokens_after`]; log-probabilities are the model's own."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._injected is not None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        first, most = self.accelerator.process_index * len(prompt_ids), self.generation_config.max_new_tokens
        places = (place % self.num_generations for place in count(first))
        return [tokens_after(ids, place, most) for ids, place in zip(prompt_ids, places, strict=False)], None


class ScriptedServer(ModelServer):
    """Draws tokens by the prompt and its place alone; log-probabilities are those of the weights that it serves."""

    def draw(self, logps, random):
        number = torch.randint(-10, len(TOKENS), (1,), generator=random)
        return torch.tensor([TOKENS[number] if number >= 0 else END])


def reward(prompts, completions, **kwargs) -> list[float]:
    """Reward digits; the completions of each fourth prompt get all the same."""
    scores = [sum(c.isdigit() for c in text) + 0.25 * (len(text) % 3) for text in completions]
    return [
        0.5 if int(prompt.split("+")[0]) % 4 == 0 else score for prompt, score in zip(prompts, scores, strict=True)
    ]


# Settings


COMMON = {
    "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1, "max_steps": UPDATES,
    "gradient_accumulation_steps": 2, "micro_batch_layout": "padded",
}  # fmt: skip

# Eight groups a generation, two updates on each of them, twice over
TWICE = {
    "per_device_train_batch_size": 6, "steps_per_generation": 4, "num_iterations": 2, "num_generations": 3,
    "max_completion_length": 10, "positive_contribution_target": 0.65,
}  # fmt: skip


def known(config_class: type, settings: dict) -> dict:
    """Return the settings that this version of the config has."""
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in settings.items() if name in names or name != "micro_batch_layout"}


def train(folder: Path, peft_config: LoraConfig | None = None, trainer_class: type = Scripted, **settings):
    trainer = toy_trainer(
        folder, toy_model(initializer_range=0.15), trainer_class, reward_funcs=reward,
        trainer_args={"train_dataset": toy_dataset(), "peft_config": peft_config},
        **known(BAPOConfig, {**COMMON, **TWICE, **settings}),
    )  # fmt: skip
    trainer.train()
    return trainer


def in_process(**settings) -> Callable[[Path], list[dict]]:
    return lambda folder: training_logs(train(folder, **settings))


def train_over_a_server(folder: Path, **settings):
    server = ScriptedServer()
    with client_of(server):
        try:
            return train(
                folder, trainer_class=BAPOTrainer, overlap_generation=True, vllm_server_base_url=server.url,
                vllm_logp_tolerance=None, num_iterations=1, **OVER_SERVER, **settings,
            )  # fmt: skip
        finally:
            server.stop()


def train_rank(folder: str) -> None:
    finish(train(Path(folder), per_device_train_batch_size=3), folder)


def on_two_ranks(folder: Path) -> list[dict]:
    succeeded(run_function(train_rank, folder, ranks=2))
    return read_ranks(folder)[0]["logs"]


def asynchronous(folder: Path) -> list[dict]:
    from tests.helpers.asynchronous import SIZES, AsyncBAPOConfig, async_trainer, on_cpu, scripted_samples

    size = SIZES["per_device_train_batch_size"] * SIZES["gradient_accumulation_steps"]
    samples = [
        replace(sample, advantage=0.0) if sample.group_id % 4 == 0 else sample
        for sample in scripted_samples(toy_model(), (UPDATES + 2) * size)  # some are fetched ahead
    ]
    with on_cpu():
        trainer = async_trainer(folder, samples, **known(AsyncBAPOConfig, {**COMMON, "learning_rate": 0.01}))
        trainer.train()
    return training_logs(trainer)


ADAPTER = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
SETTINGS: dict[str, Callable[[Path], list[dict]]] = {
    "BAPO": in_process(),
    "BAPO, default layout": in_process(micro_batch_layout="balanced"),
    "VESPO": in_process(loss_type="vespo", positive_contribution_target=0.5),
    "replay": in_process(replay_fraction=0.5, replay_zero_advantage=True, num_iterations=1),
    "partial rollouts": in_process(partial_rollout_oversampling=1.5, partial_rollout_chunk_length=2, num_iterations=1),
    "overlap": lambda folder: training_logs(train_over_a_server(folder)),
    "LoRA": in_process(peft_config=ADAPTER),
    "two ranks": on_two_ranks,
    "asynchronous": asynchronous,
}


# Curves


def record(name: str, folder: Path) -> Curves:
    """Train a setting; return its curves."""
    logs = SETTINGS[name](folder)
    return {curve: [round(log[metric], 7) for log in logs] for curve, metric in METRICS.items() if metric in logs[0]}


def stored() -> dict[str, Curves]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def moved(name: str, old: Curves, new: Curves) -> list[str]:
    """Name the first update that differs, with each value that does, before and after."""
    rows = {
        curve: list(zip_longest(old.get(curve, ()), new.get(curve, ()))) for curve in METRICS if curve in {*old, *new}
    }
    for update in range(max(map(len, rows.values()), default=0)):
        pairs = {curve: pairs[update] for curve, pairs in rows.items() if update < len(pairs)}
        found = [f"{curve} {was} -> {now}" for curve, (was, now) in pairs.items() if not is_close(was, now)]
        if found:
            return [f"{name}, update {update + 1}: {', '.join(found)}"]
    return []


def is_close(was: float | None, now: float | None) -> bool:
    return None not in (was, now) and abs(was - now) <= TOLERANCE  # also for NaN


def write(curves: dict[str, Curves]) -> None:
    """Write the file, a curve in each line."""
    settings = [
        f'"{name}": {{\n' + ",\n".join(f'  "{curve}": {json.dumps(values)}' for curve, values in each.items()) + "\n}"
        for name, each in curves.items()
    ]
    FILE.write_text("{\n" + ",\n".join(settings) + "\n}\n")


def main() -> None:
    """Record all settings, print what moved, and write the file."""
    old, new = stored(), {}
    for name in SETTINGS:
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # the logs
            new[name] = record(name, Path(folder))
        for line in moved(name, old.get(name, {}), new[name]):
            print(line)
    for name in old.keys() - new.keys():
        print(f"{name}: no such setting any more")
    write(new)
    print(f"{FILE.name}: {len(new)} settings, {UPDATES} updates each")
