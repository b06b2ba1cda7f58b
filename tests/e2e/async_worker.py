"""Trains asynchronously over a vLLM server: TRL rollout worker, an environment with a tool, weights over gloo."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo.vllm_client import VLLMClient

from bapo_trl import check_server_weights
from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from bapo_trl.tasks import load_task
from bapo_trl_gloo.weight_group import broadcast, join_weight_group, open_weight_store
from tests.helpers.asynchronous import on_cpu
from tests.helpers.ranks import finish
from tests.helpers.toy import CPU


HOST = "127.0.0.1"


class GuessingTokenizer(PreTrainedTokenizerFast):
    """Takes whatever the model writes for a call of the tool `check`."""

    def parse_response(self, ids, *args, **kwargs):
        guess = self.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "check", "arguments": {"guess": guess}}}
        return {"role": "assistant", "content": guess, "tool_calls": [call]}


class Sum:
    """A sum to guess. The first guess is checked by the tool, which asks again; the reward is that of the first."""

    def reset(self, **row):
        self.problem, self.answer, self.is_right = row["prompt"][0]["content"], row["answer"], None

    def check(self, guess: str) -> str:
        """
        Check a guess.

        Args:
            guess: The sum.
        """
        if self.is_right is None:
            self.is_right = guess == self.answer
        return self.problem

    def get_reward(self) -> float:
        return float(bool(self.is_right))


class GlooTransfer:
    """Sends the weights to the server over gloo."""

    def __init__(self, url: str, port: int):
        self.server, self.port = VLLMClient(url), port
        self.executor = ThreadPoolExecutor(1)

    def init_weight_transfer(self):
        store = open_weight_store(HOST, self.port, 2)
        info = {"master_address": HOST, "master_port": self.port, "rank_offset": 1, "world_size": 2}
        answer = self.executor.submit(self.server.init_weight_transfer_engine, info)
        self.group = join_weight_group(store, 0, 2)
        answer.result()

    def pause(self):
        self.server.pause()

    def resume(self):
        self.server.resume()

    def send_weights(self, iterator):
        self.server.start_weight_update()
        weights = dict(iterator)
        info = {
            "names": list(weights),
            "dtype_names": [str(each.dtype).split(".")[-1] for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }
        answer = self.executor.submit(self.server.update_weights, info)
        for weight in weights.values():
            broadcast(self.group, weight.detach().contiguous())
        answer.result()
        self.server.finish_weight_update()

    def destroy(self):
        self.group = None


def main(out: str, settings: str) -> None:
    folder, settings = Path(out), json.loads(settings)
    model, url, port = (settings.pop(name) for name in ("model", "vllm_server_base_url", "port"))
    tokenizer = GuessingTokenizer.from_pretrained(model)
    tokenizer.response_template = {}  # so that the worker looks for none
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    data = load_task().train_dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    args = AsyncBAPOConfig(str(folder), vllm_server_base_url=url, **{**CPU, **settings})
    with on_cpu():
        trainer = AsyncBAPOTrainer(
            model, args=args, train_dataset=data, processing_class=tokenizer, environment_factory=Sum,
            weight_transfer=GlooTransfer(url, port),
        )  # fmt: skip
        check_server_weights(trainer)
        trainer.train()
    trainer.save_model(str(folder / "final"))
    finish(trainer, folder)


if __name__ == "__main__":
    from tests.e2e import async_worker  # whose classes the worker's process finds by name

    async_worker.main(*sys.argv[1:])
