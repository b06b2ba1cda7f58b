"""Ask vLLM's engines for log-probabilities: behind a server, or in the trainer's process."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from .weight_readings import Answer


NUM_NEXT = 5  # most probable tokens of which the prefix cache must not change the log-probability
# At temperature 0, the one token that must be generated does not change the engine's random state
_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "logprobs": NUM_NEXT}


class Engine(Protocol):
    """An engine, which must be idle or answer requests one by one."""

    def max_length(self) -> int | None:
        """Return the length of the longest sequence that it takes; `None` without an answer."""

    def answer(self, sequence: list[int]) -> Answer | None:
        """Return the log-probabilities of all tokens but the first; `None` without an answer."""


def by_cache(without: Mapping[Any, float], with_cache: Mapping[Any, float]) -> float:
    """Return the largest difference between log-probabilities of the same tokens, 0 if none is in both."""
    return max((abs(without[each] - with_cache[each]) for each in without.keys() & with_cache.keys()), default=0.0)


class ServerEngine:
    """
    Engine of a vLLM server.

    Args:
        post (`Callable`):
            Function that posts a body to a path of the server and returns its answer; raises an `OSError` without one.
        model (`Callable`):
            Function that returns the model to ask for: an adapter may be one of its own.
        config (`Callable`):
            Function that returns vLLM's configuration.
    """

    def __init__(self, post: Callable[[str, dict], dict], model: Callable[[], str], config: Callable[[], dict]):
        self._post, self._model, self._config = post, model, config

    def max_length(self) -> int | None:
        try:
            return self._config()["model_config"]["max_model_len"]
        except OSError:  # the server is gone, which the next generation handles
            return None

    def answer(self, sequence: list[int]) -> Answer | None:
        body = {"model": self._model(), "prompt": sequence, "return_tokens_as_token_ids": True, **_SAMPLING}
        try:
            # Alone in its request, the sequence is computed in the same way each time. A request for the
            # log-probabilities of a prompt reads nothing from the prefix cache
            (whole,) = self._post("/v1/completions", {**body, "prompt_logprobs": 0})["choices"]
            (cached,) = self._post("/v1/completions", body)["choices"]
        except OSError:
            return None
        places = zip(sequence[1:], whole["prompt_logprobs"][1:], strict=True)
        logps = [place[str(token)]["logprob"] for token, place in places]
        of_next = [choice["logprobs"]["top_logprobs"][0] for choice in (whole, cached)]
        return Answer(torch.tensor(logps, dtype=torch.float64), by_cache(*of_next))


class ColocatedEngine:
    """vLLM's engine in the trainer's process, of a `VLLMGeneration` in colocate mode."""

    def __init__(self, generation: Any):
        self._generation = generation

    def max_length(self) -> int:
        return self._generation.llm.llm_engine.model_config.max_model_len

    def answer(self, sequence: list[int]) -> Answer:
        generation, llm = self._generation, self._generation.llm
        if generation.enable_sleep_mode:  # asleep, it has no weights
            generation.sync_weights()
            llm.wake_up(tags=["kv_cache"])
        whole, cached = (self._request(sequence, **extra) for extra in ({"prompt_logprobs": 0}, {}))
        if generation.enable_sleep_mode:
            llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        logps = [place[token].logprob for token, place in zip(sequence[1:], whole.prompt_logprobs[1:], strict=True)]
        of_next = ({k: v.logprob for k, v in each.outputs[0].logprobs[0].items()} for each in (whole, cached))
        return Answer(torch.tensor(logps, dtype=torch.float64), by_cache(*of_next))

    def _request(self, sequence: list[int], **extra: int) -> Any:
        from trl.generation.vllm_generation import SamplingParams  # which TRL imports if vLLM is installed

        sampling = SamplingParams(**_SAMPLING, **extra)
        return self._generation.llm.generate([{"prompt_token_ids": sequence}], sampling, use_tqdm=False)[0]
