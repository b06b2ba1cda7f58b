"""The stand-in for `vllm.LLM` of tests/helpers/fake_vllm.py takes and gives what the real one does."""

import dataclasses
import inspect

import pytest
from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from tests.helpers import fake_vllm


CALLS = ["generate", "sleep", "wake_up", "reset_prefix_cache"]


def keywords(function) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_parameters_of_the_real_one_in_its_order(name):
    own, real = keywords(getattr(fake_vllm.ScriptedLLM, name)), keywords(getattr(LLM, name))
    assert set(own) <= set(real)
    positional = [name for name, p in own.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(real)[: len(positional)]
    assert {name: p.default for name, p in own.items()} == {name: real[name].default for name in own}
    needed = {name for name, p in real.items() if p.default is p.empty}
    assert needed <= set(own)


def test_what_trl_makes_it_with_is_taken_by_the_real_one():
    engine = inspect.signature(LLM.__init__).parameters
    from vllm.engine.arg_utils import EngineArgs

    known = set(engine) | {f.name for f in dataclasses.fields(EngineArgs)}  # the rest goes there as keywords
    assert set(keywords(fake_vllm.ScriptedLLM.__init__)) <= known


@pytest.mark.parametrize(
    ("own", "real"),
    [
        (fake_vllm.SamplingParams, SamplingParams),
        (fake_vllm.Logprob, Logprob),
        (fake_vllm.CompletionOutput, CompletionOutput),
        (fake_vllm.RequestOutput, RequestOutput),
    ],
)
def test_what_it_takes_and_gives_has_the_names_of_the_real_ones(own, real):
    names = {f.name for f in dataclasses.fields(own)}
    assert names <= {*getattr(real, "__annotations__", {}), *keywords(real.__init__), *keywords(real)}
