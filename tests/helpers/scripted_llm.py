"""
A stand-in for `vllm.LLM`, so that TRL's own colocate path runs in process: the calls that TRL makes, on a CPU.

It loads a model from a folder, samples as vLLM does, one request after another, and reports log-probabilities of the
sampled tokens. Asleep at level 2 it has no weights. `tests/e2e/test_colocate_signatures.py` holds its signatures
against those of the real one.
"""

import math
import os
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from tests.helpers.toy import toy_model, toy_trainer


@dataclass
class SamplingParams:
    """Those that TRL gives; a request with others is rejected."""

    n: int
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    logprobs: int | None

    def __post_init__(self):
        neutral = (self.n, self.repetition_penalty, self.top_p, self.top_k, self.min_p) == (1, 1.0, 1.0, 0, 0.0)
        assert neutral, f"this stand-in samples from the whole distribution only: {self}"


@dataclass
class Logprob:
    logprob: float
    rank: int


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class ScriptedLLM:
    made: "list[ScriptedLLM]" = []  # all that were made, for the test to find

    def __init__(
        self, model, *, tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=None, max_num_seqs=None,
        enable_sleep_mode=False, model_impl="auto", distributed_executor_backend=None, seed=0,
        max_num_batched_tokens=None, logprobs_mode="raw_logprobs", quantization=None, trust_remote_code=False,
    ):  # fmt: skip
        assert logprobs_mode == "processed_logprobs", "the log-probabilities would not be those of the sampling"
        assert quantization is None, "merged weights cannot be loaded into packed ones"
        self.enable_sleep_mode = enable_sleep_mode
        self.seed = seed
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len, dtype=self.model.dtype),
            engine_core=SimpleNamespace(shutdown=lambda: None),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
        )
        # What each call of `generate` returned, and the weights by which it did
        self.requests: list[tuple[list[RequestOutput], dict[str, torch.Tensor]]] = []
        self.events: list[str] = []  # the calls in their order; those that load weights, one for each tensor, as one
        self.asleep: set[str] = set()
        self.made.append(self)

    @torch.no_grad()
    def _load_weights(self, weights):
        assert "weights" not in self.asleep, "weights were loaded into memory that is not there"
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self._note("load")

    def _note(self, event: str):
        if self.events[-1:] != [event]:
            self.events.append(event)

    def sleep(self, level: int = 1):
        assert self.enable_sleep_mode
        self._note(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            for weight in self.model.parameters():
                weight.data.fill_(math.nan)

    def wake_up(self, tags: list[str] | None = None):
        self._note(f"wake {tags}")
        self.asleep -= set(tags or self.asleep)

    def reset_prefix_cache(self) -> bool:
        self._note("reset")
        return True

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True) -> list[RequestOutput]:
        assert not self.asleep, f"{self.asleep} asleep"
        self._note("generate")
        outputs = [
            self._complete(prompt["prompt_token_ids"], sampling_params, row) for row, prompt in enumerate(prompts)
        ]
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.requests.append((outputs, weights))
        return outputs

    @torch.no_grad()
    def _complete(self, prompt: list[int], params: SamplingParams, row: int) -> RequestOutput:
        # By what is asked alone, so that a resumed run samples what an uninterrupted one does
        random = torch.Generator().manual_seed(zlib.crc32(str((self.seed, row, prompt)).encode()))
        completion: list[int] = []
        logprobs: list[dict[int, Logprob]] = []
        while len(completion) < params.max_tokens:
            logits = self.model(torch.tensor([[*prompt, *completion]])).logits[0, -1] / params.temperature
            logps = logits.log_softmax(-1)
            token = int(torch.multinomial(logps.exp(), 1, generator=random))
            completion.append(token)
            logprobs.append({token: Logprob(float(logps[token]), 1 + int((logps > logps[token]).sum()))})
            if token == self.model.config.eos_token_id:
                break
        return RequestOutput(prompt, [CompletionOutput(completion, logprobs)])


class StaleLLM(ScriptedLLM):
    """Takes weights and keeps its own."""

    def _load_weights(self, weights):
        self._note("load")


def colocate_trainer(monkeypatch, output_dir, llm=ScriptedLLM, model=None, loading=None, **settings):
    """
    Return a toy trainer that samples by TRL's colocate mode, and the stand-in that it samples from.

    `loading` are arguments with which the trainer's model is loaded.
    """
    folder = output_dir.parent / f"{output_dir.name}-model"
    (model or toy_model()).save_pretrained(folder)
    monkeypatch.setattr(llm, "made", [])
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    environment = dict(os.environ)
    try:
        trainer = toy_trainer(
            output_dir, model=AutoModelForCausalLM.from_pretrained(folder, **(loading or {})), use_vllm=True,
            vllm_mode="colocate", **settings,
        )  # fmt: skip
    finally:  # TRL leaves RANK and its like in it, and a second trainer would look for other processes
        os.environ.clear()
        os.environ.update(environment)
    (made,) = llm.made
    return trainer, made
