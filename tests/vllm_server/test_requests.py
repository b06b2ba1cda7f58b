"""Requests to a vLLM server: limits, repetitions and failures that are held, over HTTP, and the settings for them."""

import pytest
import requests
import torch

from bapo_trl.vllm_server.client import LimitedAdapter
from tests.helpers.fake_vllm import ModelServer, client_of
from tests.test_bapo_config import config


@pytest.fixture
def deaf():
    """A server that takes connections and never answers, but on /health."""
    server = ModelServer({("/v1/models", number): "hang" for number in range(1, 9)})
    yield server
    server.stop()


def test_a_request_ends_at_its_limit(deaf):
    session = requests.Session()
    session.mount("http://", LimitedAdapter(2.0))
    with pytest.raises(requests.ReadTimeout):
        session.get(f"{deaf.url}/v1/models")
    assert deaf.counts["/v1/models"] == 1  # what may have been done is not asked for again


def test_after_a_failure_the_rest_of_the_weights_is_still_gathered():
    server, gathered = ModelServer({("tensor", 3): "break"}), []

    def gather():
        for number in range(6):
            gathered.append(number)
            yield str(number), torch.zeros(1)

    with client_of(server) as client_class:
        client = client_class(base_url=server.url)
        assert client.take_failure() is None
        client.defer_failures()
        client.update_named_params([], gather())
        assert gathered == list(range(6))
        output = client.generate([[1, 2], [3]], n=2)  # asks nobody
        assert [len(output[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [2, 4, 4]
        assert client.image_features([None]) == [None]
        failure = client.take_failure()
    assert (failure.during, failure.is_passing) == ("a weight transfer", True)
    assert "weight tensor was not transferred" in failure.error
    assert server.counts["/v1/completions"] == 0
    server.stop()


# Settings


def test_the_other_ranks_must_wait_as_long(monkeypatch):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_request_timeout": 1700.0}
    config(**settings)  # one process waits for nobody
    monkeypatch.setattr("bapo_trl.BAPOConfig.world_size", 2)
    with pytest.raises(ValueError, match=r"1700 and `vllm_server_timeout` 240.*`ddp_timeout`, which is 1800.*1940"):
        config(**settings)
    config(**settings, ddp_timeout=1940)
