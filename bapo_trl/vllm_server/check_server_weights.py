"""The check of vLLM's weights for TRL's trainers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from ..batch.log_values import add_values
from ..errors import InputError
from ..upstream.trl_compat import get_config_model_id
from .engines import ServerEngine, unless_gone
from .quantized import has_quantized_layers
from .weight_check import Sequence, WeightCheck, WeightCheckOptions, choose_sequence, make_check
from .weight_readings import WeightLimits


_METHODS = ("_generate_and_score_completions", "_get_per_token_logps_and_entropies")
REQUEST_TIMEOUT_S = 600.0  # of the asynchronous trainer's server, which may sample other requests first


def check_server_weights(
    trainer: Any,
    on_failure: Literal["raise", "warn"] = "raise",
    *,
    vllm_logp_tolerance: float | None = 0.25,
    min_followed: float = 0.5,
    cache_tolerance: float = 0.01,
) -> None:
    """
    Check in each generation step of a TRL trainer that vLLM samples from the trainer's weights.

    Call this between the trainer's creation and `train()`, on all ranks. After ten checks without a suspicion, every
    tenth transfer is checked. The trainer logs `sampling/server_followed`, see docs/metrics.md.

    Args:
        trainer:
            Trainer that samples through TRL's `VLLMGeneration`, as a server or in colocate mode: `GRPOTrainer`,
            `RLOOTrainer`, `BAPOTrainer` and their subclasses; or TRL's `AsyncGRPOTrainer`.
        on_failure (`str`, *optional*, defaults to `"raise"`):
            `"raise"` raises the error on all ranks, `"warn"` warns and continues. The next warning comes after a check
            that passed.
        vllm_logp_tolerance (`float`, *optional*, defaults to 0.25):
            Largest mean absolute difference between vLLM's and the trainer's log-probabilities of fixed tokens,
            weighted by their probability, in nats per token; doubled for a model in 4 or 8 bits. `None`: no limit.
        min_followed (`float`, *optional*, defaults to 0.5):
            Smallest fraction of the trainer's change of these log-probabilities that vLLM must follow, at three checks
            in a row. `2 - min_followed` is the largest.
        cache_tolerance (`float`, *optional*, defaults to 0.01):
            Largest difference of a log-probability, in nats, between what vLLM's prefix cache holds and a new cache,
            at three checks in a row. The limit is at least four times the largest difference between two new caches.

    Raises:
        ValueError: If the trainer does not sample through vLLM, or the model takes images.
        StaleServerError: During training, if vLLM does not sample from the trainer's weights.
    """
    if on_failure not in ("raise", "warn"):
        raise InputError(f"`on_failure` is {on_failure!r}: use 'raise' or 'warn'.")
    is_asynchronous = hasattr(trainer, "weight_transfer")
    if not is_asynchronous and not getattr(trainer, "use_vllm", False):
        raise InputError(f"The {type(trainer).__name__} does not sample through vLLM: set `use_vllm=True`.")
    needs = () if is_asynchronous else ("vllm_generation", *_METHODS)
    for name in needs:
        if not hasattr(trainer, name):
            raise InputError(
                f"The {type(trainer).__name__} has no `{name}`, which the check needs: use GRPOTrainer, RLOOTrainer, "
                "BAPOTrainer or a subclass."
            )
    if getattr(trainer, "_is_vlm", False):
        raise InputError("The check cannot send images to vLLM: use a model without images.")
    if vllm_logp_tolerance is not None:
        vllm_logp_tolerance *= 1 + has_quantized_layers(trainer.model)
    options = WeightCheckOptions(WeightLimits(vllm_logp_tolerance, min_followed, cache_tolerance), on_failure)
    if hasattr(trainer, "weight_check_options"):  # of a `BAPOTrainer`, or of an earlier call
        trainer.weight_check_options = options
        return
    trainer.weight_check_options = options
    if is_asynchronous:
        trainer.add_callback(_AfterTransfers(trainer))
    else:
        trainer._generate_and_score_completions = _checking_generations(trainer)


class _TransferCheck:
    """Check a trainer's latest transfer."""

    def __init__(self, trainer: Any, make: Callable[[Any, WeightCheckOptions], WeightCheck]):
        self._trainer, self._make = trainer, make
        self._check: WeightCheck | None = None
        self._options: WeightCheckOptions | None = None

    def __call__(self, choose: Callable[[int], Sequence | None]) -> None:
        trainer = self._trainer
        if self._check is None or self._options is not trainer.weight_check_options:
            self._options = trainer.weight_check_options
            self._check = self._make(trainer, self._options)
        if self._check.is_due():
            self._check.ask(choose)
            add_values(trainer._metrics["train"], self._check(trainer.model))


def _checking_generations(trainer: Any) -> Callable[..., dict[str, Any]]:
    """Return the trainer's `_generate_and_score_completions` with a check after each generation with a transfer."""
    generate, check = trainer._generate_and_score_completions, _TransferCheck(trainer, make_check)
    checked_step = -1  # the weights are sent once after an update

    def generate_and_check(*args: Any, **kwargs: Any) -> dict[str, Any]:
        nonlocal checked_step
        batch = generate(*args, **kwargs)
        if trainer.model.training and trainer.state.global_step != checked_step:
            checked_step = trainer.state.global_step
            check(partial(choose_sequence, batch))
        return batch

    return generate_and_check


class _AfterTransfers(TrainerCallback):
    """A check after the transfers of TRL's `AsyncGRPOTrainer`, whose callbacks were added before this one."""

    def __init__(self, trainer: Any):
        self._trainer, self._check = trainer, _TransferCheck(trainer, self._make)
        self._has_begun = False

    def on_train_begin(self, args, state, control, **kwargs):
        if not self._has_begun:  # as the trainer, which sends the weights at its first run only
            self._has_begun = True
            self._check(self._sample)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self._trainer.args.weight_sync_steps == 0:
            self._check(self._sample)

    def _make(self, trainer: Any, options: WeightCheckOptions) -> WeightCheck:
        engine = None
        if trainer.accelerator.is_main_process:
            engine = ServerEngine(self._post, self._served_model, trainer.vllm_client.get_server_info)
        return WeightCheck(trainer.accelerator, engine, options, _packed_logits)

    def _served_model(self) -> str:
        trainer = self._trainer
        if trainer._lora_sync:  # the server has each version of the adapter as a model
            return f"{trainer._lora_name}-v{trainer.model_version}"
        return get_config_model_id(trainer.model.config)

    def _post(self, path: str, body: dict) -> dict:
        import requests  # which the trainer needs, too

        response = requests.post(f"{self._trainer.vllm_client.server_url}{path}", json=body, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        return response.json()

    def _sample(self, length: int) -> Sequence | None:
        """Return text that the server samples by itself, which is likely under the policy."""
        start = self._trainer.processing_class.eos_token_id
        body = {"model": self._served_model(), "prompt": [start], "max_tokens": length - 1, "seed": 0}
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = unless_gone(lambda: self._post("/v1/completions", {**body, **extra}))
        if answer is None:
            return None
        ids = [start, *answer["choices"][0]["token_ids"]]
        return Sequence(ids, [True] * len(ids))


def _packed_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a sequence by the packed attention of TRL's `AsyncGRPOTrainer`."""
    length = ids.shape[1]
    ends = torch.tensor([0, length], dtype=torch.int32, device=ids.device)
    places = torch.arange(length, device=ids.device)
    tree = {"tree_kv_index": places, "tree_cu_seqlens_q": ends, "tree_cu_seqlens_k": ends}
    sizes = {"tree_max_seqlen_q": length, "tree_max_seqlen_k": length}
    return model(input_ids=ids, position_ids=places.unsqueeze(0), use_cache=False, **tree, **sizes).logits
