"""A stand-in for TRL's `VLLMGeneration` in server mode: a second model, with the trainer's weights once they are sent.

It samples as vLLM does, from the distribution that the settings leave, and reports the log-probabilities of that
distribution (`--logprobs-mode processed_logprobs`). No network, no other process.
"""

from contextlib import nullcontext

import torch
from transformers import TopPLogitsWarper
from trl.trainer import grpo_trainer

from bapo_trl.vllm_server import mismatch
from tests.helpers.toy import toy_trainer


class FakeVLLM:
    """Server and TRL's interface to it in one."""

    def __init__(self, model, accelerator, processing_class, *, structured_outputs_regex=None, **settings):
        self.trained, self.tokenizer = model, processing_class
        self.served = type(model)(model.config).eval()
        self.first_weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.num_api_processes = 1
        self.settings = {**settings, **(settings["generation_kwargs"] or {})}
        self.only_digits = structured_outputs_regex is not None
        self.random = torch.Generator().manual_seed(0)
        self.num_syncs = 0
        self.requests = []  # bodies of what the client was asked to post
        self.vllm_client = self
        self.base_url, self.model = "http://fake", "fake"
        self.max_completion_length = settings["max_completion_length"]
        self.num_starts, self.joined = 1, 1  # how often the server was started; which of these the trainer has joined
        self.num_prompts = []  # of each call

    def restart(self):
        """Begin anew, with the weights that the model had at first; nobody hears of it."""
        self.num_starts += 1
        self.served.load_state_dict(self.first_weights)

    def defer_failures(self):
        """Nothing fails here: tests/helpers/failing_server.py is for that."""

    def take_failure(self):
        return None

    def check_health(self):
        pass

    def reconnect(self, device, is_same):
        self.joined = self.num_starts

    def get_server_info(self):
        model_config = {"logprobs_mode": "processed_logprobs", "max_model_len": 40}
        # Several processes take turns, each with a name of its own
        process = len(self.num_prompts) % self.num_api_processes
        return {
            "model_config": model_config,
            "instance_id": f"{self.num_starts}-{process}",
            "parallel_config": {"_api_process_count": self.num_api_processes},
        }

    def sync_weights(self):
        assert self.joined == self.num_starts, "nobody takes the weights"
        self.num_syncs += 1
        self.served.load_state_dict(self.trained.state_dict())

    def generate(self, prompts, images, num_generations, profiler=None):
        self.num_prompts.append(len(prompts))
        completions = [self._complete(prompt) for prompt in prompts]
        ids, logps = zip(*completions, strict=True)
        return prompts, list(ids), [[[logp] for logp in row] for row in logps], None

    @torch.no_grad()
    def _complete(self, prompt):
        completion, logps = [], []
        while len(completion) < self.max_completion_length:
            logits = self.served(torch.tensor([[*prompt, *completion]])).logits[0, -1]
            processed = self._process(logits)
            token = torch.multinomial(processed.softmax(-1), 1, generator=self.random).item()
            completion.append(token)
            logps.append(self._report(logits, processed)[token].item())
            if token == self.tokenizer.eos_token_id:
                break
        return completion, logps

    def _report(self, logits, processed):
        return processed.log_softmax(-1)

    def _process(self, logits):
        logits = logits.clone()
        for token, bias in self.settings.get("logit_bias", {}).items():
            logits[int(token)] += bias
        if self.only_digits:
            others = [i for i in range(len(self.tokenizer)) if not self.tokenizer.decode([i]).isdigit()]
            logits[others] = -torch.inf
        logits = logits / self.settings["temperature"]
        return TopPLogitsWarper(self.settings["top_p"])(None, logits.unsqueeze(0))[0]

    @torch.no_grad()
    def _post(self, url, json):
        assert url == "http://fake/v1/completions"
        self.requests.append(json)
        sequence = json["prompt"]
        logps = self.served(torch.tensor([sequence])).logits[0, :-1].float().log_softmax(-1)
        places = [{str(i): {"logprob": logp[i].item()}} for logp, i in zip(logps, sequence[1:], strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *places]}]}


def vllm_trainer(monkeypatch, output_dir, server=FakeVLLM, **settings):
    """Return a toy trainer over a fake server."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", server)
    monkeypatch.setattr(mismatch, "client_for", lambda *args: nullcontext())
    return toy_trainer(output_dir, use_vllm=True, vllm_mode="server", **settings)
