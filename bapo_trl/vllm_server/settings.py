"""What generation by vLLM refuses of its settings."""

import math
from typing import Any

from ..errors import InputError


def check_vllm(config: Any) -> None:
    """Refuse values of the checks and of the limits."""
    if config.vllm_logp_tolerance is not None and not config.vllm_logp_tolerance > 0:
        raise InputError(
            f"`vllm_logp_tolerance` is {config.vllm_logp_tolerance}: set it above 0, in nats a token, or to None "
            "for no check."
        )
    if not config.vllm_request_timeout > 0:
        raise InputError(f"`vllm_request_timeout` is {config.vllm_request_timeout}: set it above 0, in seconds.")
    longest = config.vllm_request_timeout + config.vllm_server_timeout
    if config.use_vllm and config.vllm_mode == "server" and config.world_size > 1 and longest > config.ddp_timeout:
        raise InputError(
            f"`vllm_request_timeout` is {config.vllm_request_timeout:g} and `vllm_server_timeout` "
            f"{config.vllm_server_timeout:g}: the other ranks wait for the main process that long, but give up after "
            f"`ddp_timeout`, which is {config.ddp_timeout}. Raise that to {math.ceil(longest)} at least."
        )
