"""What generation by vLLM refuses of its settings."""

import math
from typing import Any

from ..errors import InputError
from ..losses import LOSSES


_MODES_OF_VESPO = ("token_truncate", "token_mask")


def check_vllm(config: Any) -> None:
    """Refuse values of the checks, of the limits, and a correction that the loss does not take."""
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
    corrects_vespo = (
        config.use_vllm and config.vllm_importance_sampling_correction and LOSSES[config.loss_type].is_of_sequences
    )
    if corrects_vespo and config.vllm_importance_sampling_mode not in _MODES_OF_VESPO:
        raise InputError(
            f"`vllm_importance_sampling_mode` is '{config.vllm_importance_sampling_mode}', but `loss_type` 'vespo' "
            "takes vLLM's correction by tokens: set it to 'token_truncate' (or 'token_mask')."
        )
