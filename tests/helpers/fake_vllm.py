"""
vLLM without vLLM, in process and on a CPU: a toy model that samples and reports log-probabilities as vLLM does.

It stands behind each of the three ways on which TRL talks to vLLM:

- `FakeVLLM`, in place of TRL's `VLLMGeneration` in server mode: no network, for tests of what the trainer makes of it.
- `ModelServer`, which speaks HTTP and fails where it is told to, under TRL's own interface. It samples by prompt and
  weights alone: a generation that is repeated gives the same completions, so that a run which survives a failure must
  end with the weights of one that had none. Weights are handed over within the process.
- `ScriptedLLM`, in place of `vllm.LLM` in colocate mode. Asleep at level 2 it has no weights.
  `tests/e2e/test_colocate_signatures.py` holds its signatures against those of the real one.
"""

import copy
import json
import math
import os
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import patch

import requests
import torch
from transformers import AutoModelForCausalLM, TopPLogitsWarper
from trl.generation import vllm_client, vllm_generation
from trl.trainer import grpo_trainer

from bapo_trl.tasks import character_tokenizer
from bapo_trl.vllm_server import mismatch
from bapo_trl.vllm_server.client import ServerClient
from tests.helpers.toy import OVER_SERVER, toy_model, toy_trainer


def server_info(instance: str, processes: int = 1) -> dict:
    return {
        "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 40},
        "instance_id": instance,
        "parallel_config": {"_api_process_count": processes},
    }


@torch.no_grad()
def sampled(model, prompt: list[int], length: int, random, process=lambda logits: logits, report=None):
    """Sample a completion; return its tokens, and for each the log-probabilities of all that it was drawn from."""
    completion, logps = [], []
    while len(completion) < length and completion[-1:] != [model.config.eos_token_id]:
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, -1]
        processed = process(logits)
        completion.append(torch.multinomial(processed.softmax(-1), 1, generator=random).item())
        logps.append(report(processed) if report else processed.log_softmax(-1))
    return completion, logps


@torch.no_grad()
def prompt_logprobs(model, body: dict) -> dict:
    """Answer a request for the log-probabilities of a prompt's tokens, if asked for them, and of the next token."""
    sequence = body["prompt"]
    logps = model(torch.tensor([sequence])).logits[0].float().log_softmax(-1)
    values, tokens = logps[-1].topk(body["logprobs"])
    top = {f"token_id:{token}": value for token, value in zip(tokens.tolist(), values.tolist(), strict=True)}
    choice = {"logprobs": {"top_logprobs": [top]}}
    if "prompt_logprobs" in body:
        places = [{str(i): {"logprob": logp[i].item()}} for logp, i in zip(logps, sequence[1:], strict=False)]
        choice["prompt_logprobs"] = [None, *places]
    return {"choices": [choice]}


def round_otherwise(answer: dict) -> dict:
    """Change a prompt's log-probabilities in an answer as the rounding of another implementation does."""
    for number, place in enumerate(answer["choices"][0].get("prompt_logprobs", [None])[1:]):
        for entry in place.values():
            entry["logprob"] += 1e-6 * math.sin(number + 1000 * entry["logprob"])
    return answer


# TRL's `VLLMGeneration` in server mode


class FakeVLLM:
    """Server and TRL's interface to it in one."""

    mode = "server"

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
        """Nothing fails here: `ModelServer` is for that."""

    def take_failure(self):
        return None

    def check_health(self):
        pass

    def reconnect(self, device, is_same):
        self.joined = self.num_starts

    def get_server_info(self):
        # Several processes take turns, each with a name of its own
        process = len(self.num_prompts) % self.num_api_processes
        return server_info(f"{self.num_starts}-{process}", self.num_api_processes)

    def sync_weights(self):
        assert self.joined == self.num_starts, "nobody takes the weights"
        self.num_syncs += 1
        self.served.load_state_dict(self.trained.state_dict())

    def generate(self, prompts, images, num_generations, profiler=None):
        self.num_prompts.append(len(prompts))
        all_ids, all_logps = [], []
        for prompt in prompts:
            ids, logps = sampled(
                self.served, prompt, self.max_completion_length, self.random, self._process, self._report
            )
            all_ids.append(ids)
            all_logps.append([[logp[token].item()] for token, logp in zip(ids, logps, strict=True)])
        return prompts, all_ids, all_logps, None

    def _report(self, processed):
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

    def _post(self, url, json):
        assert url == "http://fake/v1/completions"
        self.requests.append(json)
        return prompt_logprobs(self.served, json)


def vllm_trainer(monkeypatch, output_dir, server=FakeVLLM, **settings):
    """Return a toy trainer over a fake server."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", server)
    monkeypatch.setattr(mismatch, "client_for", lambda *args: nullcontext())
    return toy_trainer(output_dir, use_vllm=True, vllm_mode="server", **settings)


# A server, over HTTP


# Two updates on the samples of a generation, and short waits
RUN = {
    **OVER_SERVER, "num_iterations": 1, "max_steps": 8, "vllm_request_timeout": 2.0, "vllm_server_timeout": 0.2,
}  # fmt: skip
PARTIAL = {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2}


CHECK = "the check of the weights"  # its requests, which are not counted as those of a generation


class Broken(Exception):
    """The connection ends here, without an answer."""


class ModelServer:
    """
    A server of the toy model in a thread.

    `faults` maps a path and the number of the request to it to what happens then: "die" (nobody listens any more),
    "hang" (no answer), or the code of an error. "tensor" counts the weights of all transfers.
    """

    def __init__(self, faults: dict[tuple[str, int], str | int] | None = None):
        self.faults, self.counts = dict(faults or {}), Counter()
        self.num_starts, self.port = 0, 0
        self.first = toy_model().eval()  # which sets the random state: once, before that of the trainer
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start anew, with the first weights, on the same port."""
        self.num_starts += 1
        self.served, self.received, self.is_joined = copy.deepcopy(self.first), {}, False
        self.released, self.connections = threading.Event(), []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.split("?")[0]
                try:
                    code, answer = server.answer(path, json.loads(body) if body else None)
                except Broken:
                    self.close_connection = True
                    return
                text = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                if code == 503:
                    self.send_header("Retry-After", "60")
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

        self.http = Server(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        self.serving = threading.Thread(target=self.serve, daemon=True)
        self.serving.start()

    def serve(self) -> None:
        """Take connections, each in a thread, until the port is closed."""
        with suppress(OSError):
            while True:
                connection, address = self.http.socket.accept()
                self.connections.append(connection)
                self.http.process_request(connection, address)

    def stop(self) -> None:
        self.released.set()
        with suppress(OSError):  # of a server that was stopped
            self.http.socket.shutdown(socket.SHUT_RDWR)  # which ends an `accept`; closing alone does not
        self.serving.join()
        self.http.server_close()
        for each in self.connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def fault_at(self, path: str) -> str | int | None:
        self.counts[path] += 1
        return self.faults.pop((path, self.counts[path]), None)

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        fault = self.fault_at(CHECK if body and "cache_salt" in body else path)
        if fault == "die":
            self.stop()
        if fault == "hang":
            self.released.wait()
        if fault in ("die", "hang"):
            raise Broken
        if fault is not None:
            return fault, {"error": "scripted"}
        if path == "/v1/completions":
            return 200, self.complete(body)
        if path == "/finish_weight_update":
            assert self.is_joined, "nobody takes the weights"
            self.served.load_state_dict(self.received, strict=False)  # of a transfer that broke off, some
        self.is_joined |= path == "/init_weight_transfer_engine"
        answers = {
            "/v1/models": {"data": [{"id": "toy"}]},
            "/server_info": {"vllm_config": server_info(str(self.num_starts))},
            "/reset_prefix_cache": {"success": True},
        }
        return 200, answers.get(path, {})

    @torch.no_grad()
    def complete(self, body: dict) -> dict:
        if "return_token_ids" in body and body.get("ignore_eos"):
            ids = [body["prompt"]]
            while len(ids[0]) <= body["max_tokens"]:
                ids[0].append(self.served(torch.tensor(ids)).logits[0, -1].argmax().item())
            return {"choices": [{"token_ids": ids[0][1:]}]}
        if not isinstance(body["prompt"][0], list):
            return prompt_logprobs(self.served, body)
        choices = {}
        for length in {len(prompt) for prompt in body["prompt"]}:
            places = [i for i, prompt in enumerate(body["prompt"]) if len(prompt) == length]
            rows = [(place, number) for place in places for number in range(body["n"])]
            completions = self.sample([body["prompt"][place] for place, _ in rows], body["max_tokens"])
            choices |= dict(zip(rows, completions, strict=True))
        return {"choices": [choices[row] for row in sorted(choices)]}

    def sample(self, prompts: list[list[int]], num_tokens: int) -> list[dict]:
        """Complete prompts of one length, each drawn by its tokens and its place."""
        end, tokens = character_tokenizer().eos_token_id, [[] for _ in prompts]
        logps = [[] for _ in prompts]
        randoms = [torch.Generator().manual_seed(sum(p) * 31 + i) for i, p in enumerate(prompts)]
        ids = torch.tensor(prompts)
        for _ in range(num_tokens):
            rows = self.served(ids).logits[:, -1].log_softmax(-1)
            new = [self.draw(row, each) for row, each in zip(rows, randoms, strict=True)]
            for row, token, mine, logp in zip(rows, new, tokens, logps, strict=True):
                if mine[-1:] != [end]:
                    mine.append(token.item())
                    logp.append(row[token].item())
            ids = torch.cat([ids, torch.stack(new)], dim=1)
        return [
            {
                "prompt_token_ids": prompt,
                "token_ids": mine,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in mine],
                    "token_logprobs": logp,
                    "top_logprobs": [None for _ in mine],
                },
            }
            for prompt, mine, logp in zip(prompts, tokens, logps, strict=True)
        ]

    def draw(self, logps: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        return torch.multinomial(logps.exp(), 1, generator=random)


@contextmanager
def client_of(server: ModelServer | None, on_wait: Callable[[int], None] = lambda number: None):
    """
    Have a trainer that is made inside talk to `server`.

    `on_wait` is called before each look at whether it is up, with the number of the look since the latest that found
    it.
    """

    class Transport(vllm_client.VLLMClient):
        def init_communicator(self, device):
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={})

        def close_communicator(self):
            self.communicator = None

        def update_named_params(self, metadata, named_params):
            self._start_weight_update()
            server.received = {}
            for name, tensor in named_params:
                fault = server.fault_at("tensor")
                if fault == "die":
                    server.stop()
                if fault is not None:
                    raise requests.ConnectionError("a weight tensor was not transferred")
                server.received[name] = tensor.clone()
            self._post(f"{self.base_url}/update_weights", json={})
            self._finish_weight_update()

    class Client(ServerClient, Transport):
        looks = 0

        def check_health(self):
            self.looks += 1
            on_wait(self.looks)
            super().check_health()
            self.looks = 0

    @contextmanager
    def client_for(device, request_timeout_s):
        Client.request_timeout_s = request_timeout_s
        with patch.object(vllm_generation, "VLLMClient", Client):
            yield

    with (
        patch.object(mismatch, "client_for", client_for),
        patch.object(vllm_generation, "is_vllm_available", lambda: True),
        patch.object(vllm_client, "is_vllm_available", lambda: True),
        patch.object(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True),
    ):
        yield Client


# `vllm.LLM`


@dataclass
class SamplingParams:
    """Those that TRL and the check of the weights give; a request with others is rejected."""

    max_tokens: int
    temperature: float
    logprobs: int | None
    n: int = 1
    repetition_penalty: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    prompt_logprobs: int | None = None

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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


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
        if sampling_params.temperature == 0:
            return [self._score(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]
        self._note("generate")
        outputs = [
            self._complete(prompt["prompt_token_ids"], sampling_params, row) for row, prompt in enumerate(prompts)
        ]
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.requests.append((outputs, weights))
        return outputs

    @torch.no_grad()
    def _score(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        logps = self.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        top = {
            token: Logprob(logps[-1, token].item(), 1) for token in logps[-1].topk(params.logprobs).indices.tolist()
        }
        places = [{token: Logprob(logp[token].item(), 1)} for token, logp in zip(prompt[1:], logps, strict=False)]
        return RequestOutput(prompt, [CompletionOutput([], [top])], [None, *places])

    def _complete(self, prompt: list[int], params: SamplingParams, row: int) -> RequestOutput:
        # By what is asked alone, so that a resumed run samples what an uninterrupted one does
        random = torch.Generator().manual_seed(zlib.crc32(str((self.seed, row, prompt)).encode()))
        tokens, logps = sampled(
            self.model, prompt, params.max_tokens, random, lambda logits: logits / params.temperature
        )
        logprobs = [
            {token: Logprob(float(of_all[token]), 1 + int((of_all > of_all[token]).sum()))}
            for token, of_all in zip(tokens, logps, strict=True)
        ]
        return RequestOutput(prompt, [CompletionOutput(tokens, logprobs)])


class StaleLLM(ScriptedLLM):
    """Takes weights and keeps its own."""

    def _load_weights(self, weights):
        self._note("load")


def take_scripted_llm(monkeypatch, llm=ScriptedLLM) -> None:
    """Have TRL make the stand-in in place of `vllm.LLM`."""
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)


def colocate_trainer(monkeypatch, output_dir, llm=ScriptedLLM, model=None, loading=None, **settings):
    """
    Return a toy trainer that samples by TRL's colocate mode, and the stand-in that it samples from.

    `loading` are arguments with which the trainer's model is loaded.
    """
    folder = output_dir.parent / f"{output_dir.name}-model"
    (model or toy_model()).save_pretrained(folder)
    monkeypatch.setattr(llm, "made", [])
    take_scripted_llm(monkeypatch, llm)
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
