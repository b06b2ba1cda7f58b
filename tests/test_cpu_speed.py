"""The measures for CPUs: what each changes, that results stay the same, and that none of them touches a GPU."""

import inspect

import pytest
import torch
from trl.trainer import utils as trl_utils

from bapo_trl import BAPOConfig
from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream import cpu_speed
from benchmarks.tiny_model import tiny_model


B, T, PROMPT = 3, 5, 4


@pytest.fixture
def model():
    return tiny_model(character_tokenizer(), seed=0)


@pytest.fixture
def _trl_as_it_was(monkeypatch):
    # Without what another test of this process may have set
    monkeypatch.setattr(trl_utils, "_use_triton", inspect.unwrap(trl_utils._use_triton))


def test_a_frozen_head_gets_contiguous_rows_and_gives_the_same_logits(model, monkeypatch):
    forward, is_contiguous = torch.nn.functional.linear, []

    def watched(hidden_states, weight, bias=None):
        if weight is model.get_output_embeddings().weight:
            is_contiguous.append(hidden_states.is_contiguous())
        return forward(hidden_states, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    ids = torch.randint(4, 10, (B, T))
    model.requires_grad_(False)
    before = model(ids, logits_to_keep=1).logits
    assert cpu_speed.make_head_input_contiguous(model)
    after = model(ids, logits_to_keep=1).logits
    assert is_contiguous == [False, True]
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("_trl_as_it_was")
def test_scoring_completions_only_leaves_log_probabilities_and_gradients_as_they_were(model, monkeypatch):
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.randint(4, 10, (B, PROMPT + T))
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    labels[1, -2:] = -100  # a shorter completion
    scored = []
    score = trl_utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(
        trl_utils._ChunkedLogProbFunction,
        "apply",
        lambda hidden, *rest: scored.append(len(hidden)) or score(hidden, *rest),
    )

    def outputs():
        model.zero_grad()
        result = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (result.log_probs * torch.arange(1, PROMPT + T)).sum().backward()
        return result.log_probs, result.entropy, [parameter.grad.clone() for parameter in model.parameters()]

    before = outputs()
    cpu_speed.score_completions_only()
    patched = trl_utils._use_triton
    cpu_speed.score_completions_only()
    assert trl_utils._use_triton is patched  # once is enough
    after = outputs()
    assert scored == [B * (PROMPT + T - 1), B * T - 2]
    assert before[0].abs().sum() > 1
    for got, expected in zip(after, before, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert trl_utils._use_triton(torch.device("cpu"))
    assert not trl_utils._use_triton(torch.device("meta"))  # which others decide as before


def test_one_thread_on_few_cores_unless_the_user_says_how_many(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads, expected in ((2, [1]), (1, [1]), (8, [])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        set_to.clear()
        cpu_speed.limit_threads()
        assert set_to == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu_speed.limit_threads() == 2
    assert set_to == []


@pytest.mark.parametrize(("amx", "avx512"), [(True, False), (False, True), (False, False)])
def test_bfloat16_is_for_the_processor_to_say(monkeypatch, tmp_path, amx, avx512):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    args = BAPOConfig(tmp_path, use_cpu=True)
    assert args.bf16 == (amx or avx512)
    assert cpu_speed.base_dtype(args, trains_adapter=True) == ("bfloat16" if args.bf16 else "float32")
    assert cpu_speed.base_dtype(args, trains_adapter=False) == "float32"
    for asked in (True, False):
        assert BAPOConfig(tmp_path, use_cpu=True, bf16=asked).bf16 == asked
