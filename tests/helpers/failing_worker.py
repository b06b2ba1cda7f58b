"""Trains on two ranks over servers that fail in various places, and writes how each rank fared."""

import hashlib
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from accelerate import PartialState

from tests.helpers.failing_server import PARTIAL, RUN, ModelServer, client_of
from tests.helpers.ranks import finish
from tests.helpers.toy import toy_trainer


NOBODY_JOINS = {("/init_weight_transfer_engine", number): "hang" for number in range(2, 5)}
FAULTS = {
    "none": ({}, {}),
    "generation": ({("/v1/completions", 3): "die"}, {}),
    "tensor": ({("tensor", 20): "die"}, {}),
    "hang": ({("/update_weights", 2): "hang"} | NOBODY_JOINS, {}),
    "partial none": ({}, PARTIAL),
    "partial rounds": ({("/v1/completions", 6): "die"}, PARTIAL),
}


def run(folder: Path, faults: dict, comes_back: bool, **settings) -> dict:
    if comes_back:
        faults = {place: fault for place, fault in faults.items() if place not in NOBODY_JOINS}
    is_main = PartialState(cpu=True).is_main_process
    server = ModelServer(faults) if is_main else None

    def on_wait(look):
        if look == 2 and comes_back:
            server.stop()
            server.start()

    with client_of(server, on_wait), ExitStack() as stack:
        if is_main:
            stack.callback(server.stop)
        url = server.url if is_main else "http://127.0.0.1:1"
        trainer = toy_trainer(folder, vllm_server_base_url=url, **{**RUN, "max_steps": 6, **settings})
        error = None
        try:
            trainer.train()
        except RuntimeError as stopped:
            error = str(stopped).replace(url, "URL") if is_main else str(stopped)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in trainer.model.state_dict().values())
    if error is not None and "http" in error:
        error = error.replace(error[error.index("http") : error.index(" failed")], "URL")
    result = {"error": error, "weights": hashlib.sha256(weights).hexdigest()}
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    return result, trainer


def main(folder: str, comes_back: str) -> None:
    results, folder = {}, Path(folder)
    for name, (faults, settings) in FAULTS.items():
        results[name], trainer = run(folder / name.replace(" ", "_"), faults, json.loads(comes_back), **settings)
    finish(trainer, folder, runs=results)


if __name__ == "__main__":
    main(*sys.argv[1:])
