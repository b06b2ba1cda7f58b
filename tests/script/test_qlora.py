"""A base model in 4 bits through the command line: trained, resumed, evaluated, merged, planned."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bapo_trl.errors import InputError
from tests.helpers.alike import assert_same_tensors
from tests.helpers.commands import ROOT
from tests.helpers.forked import run_python
from tests.helpers.script_runs import chat_tokenizer, completions, fill_folder, flags, results, run
from tests.script.test_models import logits


pytestmark = pytest.mark.trainings
pytest.importorskip("bitsandbytes")

IN_4_BITS = {
    "load_in_4bit": "true", "use_bnb_nested_quant": "true", "dtype": "bfloat16", "use_peft": "true", "lora_r": 4,
    "lora_target_modules": "all-linear", "gradient_checkpointing": "true",
}  # fmt: skip
TRAINING = {
    **IN_4_BITS, "dataset_name": "train.jsonl", "eval_dataset": "test.jsonl", "do_eval": "true", "max_steps": 4,
    "learning_rate": "0.1", "save_strategy": "steps", "save_steps": 2, "replay_capacity": 12, "replay_fraction": 0.5,
    "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = fill_folder(tmp_path_factory.mktemp("trained"), patch)
        run(**TRAINING, merge_adapter="true")
    return folder


@pytest.fixture
def in_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.syspath_prepend(trained)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # of another test's folder
    return trained


def test_an_adapter_is_trained_evaluated_and_merged_into_the_unquantized_model(in_folder):
    adapter = load_file("out/adapter_model.safetensors")
    assert max(weight.abs().max() for name, weight in adapter.items() if "lora_B" in name) > 0.01
    found = results()
    assert {"before_reward", "eval_reward"} <= set(found)
    assert Path("out/report.png").exists()
    merged = AutoModelForCausalLM.from_pretrained("out/merged")
    assert merged.dtype == torch.bfloat16
    assert getattr(merged.config, "quantization_config", None) is None
    beside = logits("out", dtype="float32")  # the adapter, beside the unquantized base
    assert (logits("out/merged").float() - beside).abs().mean() < (logits("model") - beside).abs().mean() / 10


def test_a_run_that_was_killed_and_resumed_is_equal(in_folder):
    command = [ROOT / "train_bapo.py", *flags(**TRAINING, output_dir="again")]
    killed = run_python(command, cwd=in_folder, PYTHONPATH=str(in_folder), KILLED_AT="7")  # in the second generation
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in Path("again").glob("checkpoint-*")] == ["checkpoint-2"]
    run(**TRAINING, output_dir="again", resume_from_checkpoint="true")
    assert_same_tensors(load_file("again/adapter_model.safetensors"), load_file("out/adapter_model.safetensors"))
    assert completions("again/eval_completions.jsonl") == completions()


def test_a_saved_adapter_is_evaluated_on_its_base_in_4_bits(in_folder):
    run(**IN_4_BITS, do_train="false", eval_dataset="test.jsonl", model_name_or_path="out", output_dir="evaluated")
    assert len(completions("evaluated/eval_completions.jsonl")) == len(completions())


def test_a_base_that_is_stored_in_4_bits_trains_and_cannot_be_merged(in_folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained("model", quantization_config=quantization).save_pretrained("stored")
    chat_tokenizer(None).save_pretrained("stored")
    stored = {**IN_4_BITS, "dataset_name": "train.jsonl", "load_in_4bit": "false", "model_name_or_path": "stored"}
    with pytest.raises(InputError, match=r"the base model stored is stored quantized \('bitsandbytes'\)"):
        run(**stored, output_dir="of_stored", merge_adapter="true")
    run(**stored, output_dir="of_stored")
    assert load_file("of_stored/adapter_model.safetensors")
    with pytest.raises(InputError, match="is stored quantized"):
        run(do_train="false", model_name_or_path="of_stored", output_dir="of_stored", merge_adapter="true")
