"""A stand-in for a vLLM server that speaks HTTP and fails when it is told to, and TRL's own interface to it.

It samples by prompt and weights alone: a generation that is repeated gives the same completions, so that a run which
survives a failure must end with the weights of one that had none. Weights are handed over within the process.
"""

import copy
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import requests
import torch
from trl.generation import vllm_client, vllm_generation

from bapo_trl.tasks import character_tokenizer
from bapo_trl.vllm_server import mismatch
from bapo_trl.vllm_server.client import ServerClient
from tests.helpers.toy import OVER_SERVER, toy_model


# Two updates on the samples of a generation, and short waits
RUN = {
    **OVER_SERVER, "num_iterations": 1, "max_steps": 8, "vllm_request_timeout": 2.0, "vllm_server_timeout": 0.2,
}  # fmt: skip
PARTIAL = {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2}


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
        fault = self.fault_at(path)
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
        info = {
            "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 40},
            "instance_id": str(self.num_starts),
            "parallel_config": {"_api_process_count": 1},
        }
        answers = {
            "/v1/models": {"data": [{"id": "toy"}]},
            "/server_info": {"vllm_config": info},
            "/reset_prefix_cache": {"success": True},
        }
        return 200, answers.get(path, {})

    @torch.no_grad()
    def complete(self, body: dict) -> dict:
        if "prompt_logprobs" in body:
            sequence = body["prompt"]
            logps = self.served(torch.tensor([sequence])).logits[0, :-1].float().log_softmax(-1)
            places = [{str(i): {"logprob": logp[i].item()}} for logp, i in zip(logps, sequence[1:], strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *places]}]}
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

    class Client(ServerClient):
        looks = 0

        def check_health(self):
            self.looks += 1
            on_wait(self.looks)
            super().check_health()
            self.looks = 0

        def _join_group(self, device):
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={})

        def close_communicator(self):
            self.communicator = None

        def _send_weights(self, metadata, named_params):
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
