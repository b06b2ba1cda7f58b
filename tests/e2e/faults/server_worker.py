"""Trains over a live vLLM server and does it harm at given updates: kills or stops it, and may bring it back."""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path

import psutil
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.vllm_server import client as server_client
from bapo_trl_gloo import client as gloo_client
from bapo_trl_gloo.client import GlooVLLMClient
from tests.e2e.launching import vllm_server
from tests.helpers.ranks import finish
from tests.helpers.toy import CPU, OFF_POLICY, OVER_SERVER, digits_reward, toy_dataset


class Faults:
    """
    Harms the server in the main process.

    Each fault is `[update, place, target, signal, outcome]`: at the generation after that update, within the
    "generation" or within the "transfer" of the weights, the "api" process or its "worker" gets KILL or STOP. Then the
    server comes "back" (is started anew, or goes on) when it is looked for the second time, or stays "gone".
    """

    def __init__(self, faults: list, server: int, model: Path, port: int, folder: Path):
        self.faults = [tuple(fault) for fault in faults]
        self.server, self.model, self.port, self.folder = server, model, port, folder
        self.update, self.fault, self.looks, self.num_tensors = 0, None, 0, 0
        self.servers, self.starting = ExitStack(), None
        self.is_waiting = self.is_probing = False

    def due(self, place: str) -> tuple | None:
        return next((each for each in self.faults if each[:2] == (self.update, place)), None)

    def processes(self, target: str) -> list[psutil.Process]:
        """The process that listens on the port, or those that it has started."""
        api = psutil.Process(self.server)
        return [api] if target == "api" else api.children(recursive=True)

    def strike(self, fault: tuple) -> None:
        self.faults.remove(fault)
        self.fault, self.looks = fault, 0
        _, _, target, name, _ = fault
        victims = self.processes(target)
        ends = [os.pidfd_open(each.pid) for each in victims]
        for each in victims:
            each.send_signal(getattr(signal, f"SIG{name}"))
        for end in ends:
            if name == "KILL":
                select.select([end], [], [], 30)  # that it is not there any more is for its parent to take note of
            os.close(end)
        print(f"struck {fault}", flush=True)

    def look(self) -> None:
        """The trainer looks whether the server is up, after a failure."""
        if self.fault is None or self.fault[-1] == "gone":
            return
        self.looks += 1
        if self.looks != 2:
            return
        _, _, target, name, _ = self.fault
        if name == "STOP":
            for each in self.processes(target):
                each.send_signal(signal.SIGCONT)
        else:
            self.starting = threading.Thread(target=self.start_anew)
            self.starting.start()
        self.fault = None

    def start_anew(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server, signal.SIGKILL)
        log = self.folder / f"server-after-{self.update}.log"
        self.server = self.servers.enter_context(vllm_server(self.model, log, port=self.port)).process

    def install(self) -> None:
        post, broadcast, health = GlooVLLMClient._post, gloo_client.broadcast, GlooVLLMClient.check_health
        is_up = GlooVLLMClient._is_up
        faults = self

        def watched_post(client, url, **kwargs):
            fault = faults.due("generation") if url.endswith("/v1/completions") else None
            if fault is not None:
                # With the worker stopped there is no answer: the request is under way when the first look comes
                for each in faults.processes("worker"):
                    each.suspend()
                faults.is_waiting = True
            if url.endswith("/update_weights"):
                faults.num_tensors = 0
            return post(client, url, **kwargs)

        def watched_is_up(client):
            fault = faults.due("generation")
            if faults.is_waiting and fault is not None:
                faults.is_waiting = False
                faults.strike(fault)
                if fault[2:4] == ("api", "STOP"):
                    for each in faults.processes("worker"):
                        each.resume()
            faults.is_probing = True
            try:
                return is_up(client)
            finally:
                faults.is_probing = False

        def watched_broadcast(group, tensor):
            faults.num_tensors += 1
            fault = faults.due("transfer")
            if fault is not None and faults.num_tensors == 3:
                faults.strike(fault)
            broadcast(group, tensor)

        def watched_health(client):
            if not faults.is_probing:
                faults.look()
            health(client)

        GlooVLLMClient._post, GlooVLLMClient._is_up = watched_post, watched_is_up
        GlooVLLMClient.check_health, gloo_client.broadcast = watched_health, watched_broadcast


class Harmed(BAPOTrainer):
    faults: Faults | None = None

    def _generate_and_score_completions(self, inputs):
        if self.faults is not None:
            self.faults.update = self.state.global_step
        return super()._generate_and_score_completions(inputs)


def main(out: str, settings: str) -> None:
    folder, settings = Path(out), json.loads(settings)
    folder.mkdir(parents=True, exist_ok=True)
    server_client.CONNECT_TIMEOUT_S, server_client.ENGINE_TIMEOUT_S = 1.0, 3.0
    server_client.PROBE_INTERVAL_S, server_client.NUM_PROBES = 0.3, 3
    model, resume = settings.pop("model"), settings.pop("resume", None)
    faults = Faults(settings.pop("faults"), settings.pop("server"), Path(model), settings["vllm_server_port"], folder)
    settings = {
        **CPU, **OFF_POLICY, "num_iterations": 1, "learning_rate": 5e-3, **OVER_SERVER,
        "vllm_server_host": "127.0.0.1", "generation_kwargs": {"seed": 11}, **settings,
    }  # fmt: skip
    args = BAPOConfig(str(folder / "run"), **settings)
    if args.process_index == 0:
        faults.install()
    trainer = Harmed(
        AutoModelForCausalLM.from_pretrained(model), digits_reward, args, train_dataset=toy_dataset(),
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    if trainer.accelerator.is_main_process:
        trainer.faults = faults
    error = None
    with warnings.catch_warnings(record=True) as caught, faults.servers:
        warnings.simplefilter("always")
        try:
            trainer.train(resume_from_checkpoint=resume)
        except RuntimeError as raised:
            error = str(raised)
        if error is None:
            trainer.save_model(str(folder / "final"))
    told = [str(each.message) for each in caught if "vLLM server" in str(each.message)]
    finish(trainer, folder, error=error, warnings=told, left=faults.faults)


if __name__ == "__main__":
    main(*sys.argv[1:])
