"""Ask vLLM's engines for log-probabilities: behind a server, or in the trainer's process."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .weight_readings import Answer


T = TypeVar("T")

NUM_NEXT = 5  # most probable tokens of which the prefix cache must not change the log-probability
NUM_CHANCES = 10  # answers with a comparison of two new caches
# At temperature 0, the one token that must be generated does not change the engine's random state
_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "logprobs": NUM_NEXT}


def unless_gone(call: Callable[[], T]) -> T | None:
    """Return the result of a request; `None` without an answer of the server, which the next generation handles."""
    try:
        return call()
    except OSError as error:
        response = getattr(error, "response", None)
        if response is not None and response.status_code < 500:  # the server rejects the request
            raise
        return None


class Engine(ABC):
    """An engine, which should be idle."""

    is_in_process = False

    def __init__(self) -> None:
        self._salt, self._num_answers = uuid.uuid4().hex, 0  # of the run

    @abstractmethod
    def max_length(self) -> int | None:
        """Return the length of the longest sequence that it takes; `None` without an answer."""

    @abstractmethod
    def answer(self, sequence: list[int]) -> Answer | None:
        """Return the log-probabilities of all tokens but the first; `None` without an answer."""

    def _ask(self, sequence: list[int], request: Callable[..., Any], of_next: Callable[[Any], Mapping]) -> tuple:
        """
        Return an answer with the log-probabilities of the prompt, and how much those of the next token change by what
        the prefix cache had, and between two new caches.

        Alone in its request, the sequence is computed in the same way each time. A request for a prompt's
        log-probabilities reads nothing from the cache. A salt has a cache of its own; with the one of the run, only
        these requests wrote it. Two new caches are compared at the first answers only.
        """
        salts = uuid.uuid4().hex, self._salt, *([uuid.uuid4().hex] if self._num_answers < NUM_CHANCES else [])
        self._num_answers += 1
        whole = request(sequence, salts[0], prompt_logprobs=0)
        for salt in salts[1:]:
            request(sequence, salt)  # into the cache, where it is not there yet
        new, *others = (of_next(request(sequence, salt)) for salt in salts)
        return whole, *(_largest_change(new, other) for other in others)


def _largest_change(first: Mapping[Any, float], second: Mapping[Any, float]) -> float:
    return max((abs(first[each] - second[each]) for each in first.keys() & second.keys()), default=0.0)


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
        super().__init__()
        self._post, self._model, self._config = post, model, config

    def max_length(self) -> int | None:
        config = unless_gone(self._config)
        return None if config is None else config["model_config"]["max_model_len"]

    def answer(self, sequence: list[int]) -> Answer | None:
        asked = unless_gone(
            lambda: self._ask(sequence, self._request, lambda choice: choice["logprobs"]["top_logprobs"][0])
        )
        if asked is None:
            return None
        whole, *changes = asked
        places = zip(sequence[1:], whole["prompt_logprobs"][1:], strict=True)
        logps = [place[str(token)]["logprob"] for token, place in places]
        return Answer(torch.tensor(logps, dtype=torch.float64), *changes)

    def _request(self, sequence: list[int], salt: str, **extra: int) -> dict:
        body = {"model": self._model(), "prompt": sequence, "cache_salt": salt, "return_tokens_as_token_ids": True}
        (choice,) = self._post("/v1/completions", {**body, **_SAMPLING, **extra})["choices"]
        return choice


class ColocatedEngine(Engine):
    """vLLM's engine in the trainer's process, of a `VLLMGeneration` in colocate mode."""

    is_in_process = True

    def __init__(self, generation: Any):
        super().__init__()
        self._generation = generation

    def max_length(self) -> int:
        return self._generation.llm.llm_engine.model_config.max_model_len

    def answer(self, sequence: list[int]) -> Answer:
        generation, llm = self._generation, self._generation.llm
        if generation.enable_sleep_mode:  # asleep, it has no weights
            generation.sync_weights()
            llm.wake_up(tags=["kv_cache"])
        generation.accelerator.wait_for_everyone()  # as TRL does before a generation with LoRA and tensor parallelism
        whole, *changes = self._ask(
            sequence,
            self._request,
            lambda output: {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()},
        )
        if generation.enable_sleep_mode:
            llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        places = zip(sequence[1:], whole.prompt_logprobs[1:], strict=True)
        return Answer(torch.tensor([place[token].logprob for token, place in places], dtype=torch.float64), *changes)

    def _request(self, sequence: list[int], salt: str, **extra: int) -> Any:
        from trl.generation.vllm_generation import SamplingParams  # which TRL imports if vLLM is installed

        prompt = {"prompt_token_ids": sequence, "cache_salt": salt}
        sampling = SamplingParams(**_SAMPLING, **extra)
        return self._generation.llm.generate([prompt], sampling, use_tqdm=False)[0]
