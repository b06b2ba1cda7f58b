"""Requests to a vLLM server: limits, repetitions and failures that are held, over HTTP, and the settings for them."""

import threading

import pytest
import requests
import torch

from bapo_trl.vllm_server import client as server_client
from bapo_trl.vllm_server.client import LimitedAdapter, retry_until
from tests.helpers.failing_server import ModelServer, client_of
from tests.helpers.fake_vllm import needs_vllm_server
from tests.test_bapo_config import config


pytestmark = needs_vllm_server


@pytest.fixture
def deaf():
    """A server that takes connections and never answers, but on /health as long as `is_well`."""
    server = ModelServer({("/v1/models", number): "hang" for number in range(1, 9)})
    yield server
    server.stop()


def session(server, timeout_s, is_up=lambda: True):
    session = requests.Session()
    session.mount("http://", LimitedAdapter(timeout_s, is_up))
    return session


def test_a_request_ends_at_its_limit(deaf):
    with pytest.raises(requests.ReadTimeout):
        session(deaf, 2.0).get(f"{deaf.url}/v1/models")
    assert deaf.counts["/v1/models"] == 1  # what may have been done is not asked for again


def test_a_request_ends_when_nobody_is_there_any_more(deaf, monkeypatch):
    monkeypatch.setattr(server_client, "PROBE_INTERVAL_S", 0.01)
    looks = iter([False, True, *[False] * server_client.NUM_PROBES])
    with pytest.raises(requests.ConnectionError, match="did not answer /health during a request"):
        session(deaf, 60, lambda: next(looks)).get(f"{deaf.url}/v1/models")
    assert not list(looks)

    monkeypatch.setattr(server_client, "CONNECT_TIMEOUT_S", 0.1)
    deaf.faults = {("/health", 1): "hang"}
    client = object.__new__(server_client.ServerClient)
    client.base_url = deaf.url
    assert not client._is_up()
    monkeypatch.setattr(server_client, "CONNECT_TIMEOUT_S", 10)
    assert client._is_up()
    deaf.stop()
    assert not client._is_up()


def test_a_late_answer_is_taken_within_the_limit(deaf, monkeypatch):
    monkeypatch.setattr(server_client, "PROBE_INTERVAL_S", 0.01)
    deaf.faults = {}
    third_look, answer, looks = threading.Event(), deaf.answer, []
    deaf.answer = lambda *args: third_look.wait() and answer(*args)

    def is_up():
        looks.append(1)
        if len(looks) == 3:
            monkeypatch.setattr(server_client, "PROBE_INTERVAL_S", 60)  # until the answer is here
            third_look.set()
        return True

    assert session(deaf, 60, is_up).get(f"{deaf.url}/v1/models").json() == {"data": [{"id": "toy"}]}
    assert len(looks) == 3


def test_what_did_not_reach_the_server_is_sent_again(monkeypatch):
    server, pauses = ModelServer({("/v1/models", number): 503 for number in (1, 2)}), []
    monkeypatch.setattr("time.sleep", pauses.append)
    assert session(server, 60).get(f"{server.url}/v1/models").status_code == 200
    assert server.counts["/v1/models"] == 3
    assert 0 < sum(pauses) < 30  # they are its own: the server asks for 60 s
    server.stop()


def test_pauses_grow_and_end(monkeypatch):
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(round(seconds, 3))
        now[0] += seconds

    def call():
        now[0] += 0.1
        raise ConnectionError("gone")

    monkeypatch.setattr(server_client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server_client.time, "sleep", sleep)
    with pytest.raises(ConnectionError, match="gone"):
        retry_until(60, call)
    assert pauses[:9] == [0, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15]
    assert pauses[-1] < 15  # as long as there is time
    assert now[0] == pytest.approx(60, abs=0.2)


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


def test_the_first_failure_is_kept_when_it_makes_the_call_around_it_fail():
    server = ModelServer({("/server_info", 1): 404})

    with client_of(server) as client_class:

        class Client(client_class):
            def _join_group(self, device):
                return self.get_server_info()["weight_transfer_config"]

        client = Client(base_url=server.url)
        client.init_communicator("cpu")
        assert "VLLM_SERVER_DEV_MODE=1" in client.take_failure().error
    server.stop()


def test_over_nccl_a_failed_transfer_ends_the_trainers_part():
    """NCCL itself is not run: its communicator is told to abort, once the server's answer is an error."""
    server, aborted = ModelServer({("/update_weights", 1): 500}), []

    class Communicator:
        def destroy(self):
            aborted.append(True)

    with client_of(server) as client_class:
        client = client_class(base_url=server.url)
        client.take_failure()
        client.communicator = Communicator()
        with pytest.raises(requests.HTTPError, match="status 500"):
            client._post(f"{server.url}/update_weights", json={})
    assert aborted == [True]
    server.stop()


# Settings


def test_the_other_ranks_must_wait_as_long(monkeypatch):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_request_timeout": 1700.0}
    config(**settings)  # one process waits for nobody
    monkeypatch.setattr("bapo_trl.BAPOConfig.world_size", 2)
    with pytest.raises(ValueError, match=r"1700 and `vllm_server_timeout` 240.*`ddp_timeout`, which is 1800.*1940"):
        config(**settings)
    config(**settings, ddp_timeout=1940)
