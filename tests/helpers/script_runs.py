"""Runs of `train_bapo.py` in this process, on a model and data of a few lines in a working directory of their own."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

import bapo_trl.script.run.train  # noqa: F401 -- which the script itself loads late, after a fork
from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import ROOT
from tests.helpers.toy import ON_GPU, toy_model


sys.path.insert(0, str(ROOT))
import train_bapo


CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}<a>"
CPU = {
    "model_name_or_path": "model", "output_dir": "out", "use_cpu": str(not ON_GPU).lower(), "bf16": "false",
    "dataloader_pin_memory": "false", "gradient_checkpointing": "false", "report_to": "none", "save_strategy": "no",
    "disable_tqdm": "true", "max_completion_length": "6", "max_steps": "2",
}  # fmt: skip
SHORT = {
    **CPU, "per_device_train_batch_size": "6", "gradient_accumulation_steps": "1", "steps_per_generation": "2",
    "num_generations": "3", "num_generations_eval": "4", "per_device_eval_batch_size": "5", "learning_rate": "2e-2",
    "reward_funcs": "my_rewards.has_digit",
}  # fmt: skip
REWARD = """
import os, signal
calls = 0
def has_digit(completions, prompts, log_extra, log_metric, **kwargs):
    global calls
    calls += 1
    if os.environ.get("KILLED_AT") == str(calls):
        os.kill(os.getpid(), signal.SIGKILL)
    found = [float(any(map(str.isdigit, text))) for text in completions]
    log_extra("found", found)
    log_metric("found_share", sum(found) / len(found))
    return [None if prompt == "skip" else reward for prompt, reward in zip(prompts, found)]
"""


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def fill_folder(folder: Path, monkeypatch, chat_template: str | None = None) -> Path:
    """Make `folder` the working directory, with a model, a reward and problems to train and evaluate on."""
    monkeypatch.chdir(folder)
    toy_model().save_pretrained("model")
    chat_tokenizer(chat_template).save_pretrained("model")
    Path("my_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    sums = [{"prompt": f"{a}+{a + 1}=", "data_source": f"tens {a // 10}"} for a in range(23)]
    Dataset.from_list(sums[:16]).to_json("train.jsonl")
    Dataset.from_list(sums[17:]).to_json("test.jsonl")
    return folder


def flags(**settings) -> list[str]:
    """Return the flags of a short run; `a|b` is several values, and `None` leaves a flag out."""
    given = {name: str(value) for name, value in {**SHORT, **settings}.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", *value.split("|"))]


def run(**settings) -> None:
    train_bapo.main(flags(**settings))


def results() -> dict:
    return json.loads(Path("out/eval_results.json").read_text())


def completions(path: str = "out/eval_completions.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
