"""The measures for CPUs: what each changes, that results stay the same, and that none of them touches a GPU."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from bapo_trl import BAPOConfig
from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream import cpu_speed
from benchmarks.tiny_model import tiny_model
from tests.helpers.toy import toy_model, toy_trainer


B, T = 3, 5


def last_logits(model, ids):
    """Return the logits of the last position, and whether the head was given a contiguous slice."""
    seen = []
    forward = torch.nn.functional.linear

    def watched(hidden_states, weight, bias=None):
        if weight is model.get_output_embeddings().weight:
            seen.append(hidden_states.is_contiguous())
        return forward(hidden_states, weight, bias)

    torch.nn.functional.linear = watched
    try:
        with torch.no_grad():
            return model(ids, logits_to_keep=1).logits, seen
    finally:
        torch.nn.functional.linear = forward


def frozen_model(dtype=torch.bfloat16):
    return tiny_model(character_tokenizer(), seed=0).to(dtype).requires_grad_(False)


def test_a_frozen_head_in_bfloat16_gets_contiguous_rows_and_gives_the_same_logits():
    ids, model = torch.randint(4, 10, (B, T)), frozen_model()
    before, was_contiguous = last_logits(model, ids)
    cpu_speed.make_head_input_contiguous(model, torch.device("cpu"))
    after, is_contiguous = last_logits(model, ids)
    assert (was_contiguous, is_contiguous) == ([False], [True])
    torch.testing.assert_close(after, before, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("model", "device"),
    [
        (frozen_model(), "cuda"), (frozen_model(torch.float32), "cpu"),
        (tiny_model(character_tokenizer(), seed=0).bfloat16(), "cpu"),
    ],
    ids=["on a GPU", "float32", "trained"],
)  # fmt: skip
def test_every_other_head_is_left_alone(model, device):
    cpu_speed.make_head_input_contiguous(model, torch.device(device))
    assert last_logits(model, torch.randint(4, 10, (B, T)))[1] == [False]


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
    cpu_speed.limit_threads()
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


def test_a_run_on_a_gpu_loads_float32():
    on_a_gpu = SimpleNamespace(use_cpu=False, bf16=True)
    assert cpu_speed.base_dtype(on_a_gpu, trains_adapter=True) == "float32"


def test_the_trainer_takes_the_measure(tmp_path):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}
    trainer = toy_trainer(tmp_path, model=toy_model().bfloat16(), trainer_args=lora)
    assert len(trainer.model.get_output_embeddings()._forward_pre_hooks) == 1
