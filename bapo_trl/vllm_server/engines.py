"""Ask vLLM's engines for log-probabilities: behind a server, or in the trainer's process."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .weight_readings import Answer


NUM_NEXT = 5  # most probable tokens of which the prefix cache must not change the log-probability
# At temperature 0, the one token that must be generated does not change the engine's random state
_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "logprobs": NUM_NEXT}


class Engine(ABC):
    """An engine, which must be idle or answer requests one by one."""

    @abstractmethod
    def max_length(self) -> int | None:
        """Return the length of the longest sequence that it takes; `None` without an answer."""

    @abstractmethod
    def answer(self, sequence: list[int]) -> Answer | None:
        """Return the log-probabilities of all tokens but the first; `None` without an answer."""

    def _ask(self, sequence: list[int], request: Callable[..., Any], of_next: Callable[[Any], Mapping]) -> tuple:
        """
        Return an answer with the log-probabilities of the prompt, and the change of those of the next token by what
        the prefix cache had.

        Alone in its request, the sequence is computed in the same way each time. A request for a prompt's
        log-probabilities reads nothing from the cache. With a salt of its own, the cache of a request is new. Both
        requests that are compared read as many blocks.
        """
        salt = uuid.uuid4().hex
        whole = request(sequence, salt, prompt_logprobs=0)
        fresh = of_next(request(sequence, salt))
        request(sequence, None)  # into the cache, where it is not there yet
        kept = of_next(request(sequence, None))
        by_cache = max((abs(fresh[each] - kept[each]) for each in fresh.keys() & kept.keys()), default=0.0)
        return whole, by_cache


class ServerEngine(Engine):
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
        try:
            whole, by_cache = self._ask(sequence, self._request, lambda choice: choice["logprobs"]["top_logprobs"][0])
        except OSError as error:
            if getattr(error, "response", None) is not None:  # the server rejects the request
                raise
            return None
        places = zip(sequence[1:], whole["prompt_logprobs"][1:], strict=True)
        logps = [place[str(token)]["logprob"] for token, place in places]
        return Answer(torch.tensor(logps, dtype=torch.float64), by_cache)

    def _request(self, sequence: list[int], salt: str | None, **extra: int) -> dict:
        body = {"model": self._model(), "prompt": sequence, "return_tokens_as_token_ids": True, **_SAMPLING, **extra}
        (choice,) = self._post("/v1/completions", body if salt is None else {**body, "cache_salt": salt})["choices"]
        return choice


class ColocatedEngine(Engine):
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
        whole, by_cache = self._ask(
            sequence,
            self._request,
            lambda output: {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()},
        )
        if generation.enable_sleep_mode:
            llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        places = zip(sequence[1:], whole.prompt_logprobs[1:], strict=True)
        return Answer(torch.tensor([place[token].logprob for token, place in places], dtype=torch.float64), by_cache)

    def _request(self, sequence: list[int], salt: str | None, **extra: int) -> Any:
        from trl.generation.vllm_generation import SamplingParams  # which TRL imports if vLLM is installed

        prompt = {"prompt_token_ids": sequence} | ({} if salt is None else {"cache_salt": salt})
        sampling = SamplingParams(**_SAMPLING, **extra)
        return self._generation.llm.generate([prompt], sampling, use_tqdm=False)[0]
